"""Golden answers: SHA-256 of the logits of fixed prompts, by which a GPU and a release are judged afterwards.

RELEASES/NAME/golden/DEVICE.json is written once for each model of device, after two independent computations agreed
(golden_record.py): exactness makes any later difference a fault. The token ids are the release's own tokenizer's, and
kept in the file, so that a comparison needs nothing but an engine.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from appliance.engine_calls import EngineCalls, EngineUnavailable
from appliance.log import ExitCode
from appliance.releases import GOLDEN, MANIFEST_JSON, Release, ReleaseError, ReleaseRefused
from appliance.statefile import read_state, sync_directory, write_state

if TYPE_CHECKING:
    from appliance.paths import Paths
    from engine.tokenizer import Tokenizer

SCHEMA = 1
MAX_PROMPT_TOKENS = 320  # of the longest: three KV pages of 128 tokens
_DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_PAGE_TOKENS = 128

Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Agreement = Literal["two-gpus", "cpu-oracle", "two-starts"]


class GoldenAnswer(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    name: str
    prompt_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]
    sha256: Digest  # of the float32 logits of every position, in order


class Oracle(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """agreed "cpu-oracle": teacher-forced log probabilities on the GPU beside those of the CPU backend."""

    positions: int
    largest_difference: float  # nats
    tolerance: float


class Golden(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """golden/DEVICE.json."""

    release: str
    manifest_sha256: Digest  # of the release's manifest.json: the answers belong to these very files
    device: str
    engine_version: str
    recorded: str
    recorded_from: list[str]  # UUIDs of GPU slots
    agreed: Agreement
    weights_checksum: str  # of the weight arena, as the engine computes it at load
    prompts: Annotated[list[GoldenAnswer], Meta(min_length=1)]
    oracle: Oracle | None = None


# -- the prompts -------------------------------------------------------------------------------------------------------

_SHORT = "The capital of France is Paris, and the capital of Italy is"
_BYTES = (
    "naïve café, Ωμέγα, 東京タワー, 🦙🦙, ﬁ ligature,\ttabs  and   runs of spaces\n\n"
    "    return x_1 ** -2.5e-3  # end\r\n"
)
_CHAT = [
    {"role": "system", "content": "You answer in one sentence."},
    {"role": "user", "content": "Why does the sky look blue at noon and red at dusk?"},
]
_LONG = (
    "A compiler reads a program and writes another one that does the same thing. It begins with characters, groups "
    "them into words, and the words into a tree, because the order in which a person writes is seldom the order in "
    "which a machine must act. The tree is then checked: every name has to mean something, every operation has to "
    "fit the things it is applied to. What remains is rewritten many times, each time a little closer to the machine "
    "and a little further from the person. Loops are turned inside out, constants are folded, values that nobody "
    "reads are forgotten. In the end there are instructions, 16 or 32 or 64 bits wide, and registers, of which there "
    "are never enough. A good compiler is judged by the speed of what it writes; a great one by its silence, for "
    "nobody thinks of it at all. In 1957 the first one for FORTRAN took 18 person-years; students now write a small "
    "one in a term. "
)


def golden_prompts(tokenizer: Tokenizer, max_model_len: int) -> list[tuple[str, list[int]]]:
    """(name, token ids) of the fixed prompts: short, over more than one KV page, bytes of many scripts, and special
    tokens (the chat template where there is one). Cut to what fits `max_model_len`."""
    limit = min(MAX_PROMPT_TOKENS, max_model_len - 1)
    long = tokenizer.encode(_LONG)
    while len(long) <= _PAGE_TOKENS * 2:
        long += tokenizer.encode(_LONG, add_special_tokens=False)
    prompts = [
        ("short", tokenizer.encode(_SHORT)),
        ("pages", long),
        ("bytes", tokenizer.encode(_BYTES)),
        ("special", _special(tokenizer)),
    ]
    return [(name, ids[:limit]) for name, ids in prompts]


def _special(tokenizer: Tokenizer) -> list[int]:
    from engine.errors import TemplateError

    try:
        return tokenizer.encode(tokenizer.apply_chat_template(_CHAT), add_special_tokens=False)
    except TemplateError:  # a base model has none: its special tokens are then written into the text
        special = sorted(tokenizer.special_ids.values())[:8]
        text = tokenizer.encode(_CHAT[1]["content"], add_special_tokens=False)
        return special + text + special


# -- the file ----------------------------------------------------------------------------------------------------------


def device_slug(device: str) -> str:
    """'NVIDIA H200' -> 'NVIDIA-H200', for the file's name."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", device).strip("-.")
    if not _DEVICE.fullmatch(slug):
        raise ReleaseError(f"the device name {device!r} cannot name a file")
    return slug


def golden_path(paths: Paths, release: str, device: str) -> Path:
    return paths.release(release) / GOLDEN / f"{device_slug(device)}.json"


def manifest_digest(paths: Paths, release: str) -> str:
    return hashlib.sha256((paths.release(release) / MANIFEST_JSON).read_bytes()).hexdigest()


def read_golden(paths: Paths, release: str, device: str) -> Golden | None:
    """The golden answers of a release on a device, or None if none were recorded. ReleaseError if the file is damaged
    (its own digest) or belongs to other files."""
    path, hint = golden_path(paths, release, device), "remove the file and record it again: appliance release add"
    value = read_state(path, schema=SCHEMA)
    if value is None:
        return None
    if value.pop("sha256", None) != _digest(value):
        raise ReleaseError(f"{path} is damaged: its digest is not that of its contents", hint=hint)
    try:
        golden = msgspec.convert(value, Golden)
    except msgspec.ValidationError as error:
        raise ReleaseError(f"{path} is damaged: {error}", hint=hint) from None
    if golden.release != release or device_slug(golden.device) != path.stem:
        raise ReleaseError(f"{path} belongs to {golden.release} on {golden.device}", hint=hint)
    if golden.manifest_sha256 != manifest_digest(paths, release):
        raise ReleaseError(f"{path} was recorded from other files than those of the release", hint=hint)
    return golden


def write_golden(paths: Paths, golden: Golden) -> Path:
    """Writes golden/DEVICE.json, once: ReleaseRefused if there is one already."""
    path = golden_path(paths, golden.release, golden.device)
    if path.exists():
        raise ReleaseRefused(f"{path} is there already", hint="golden answers are recorded once for each device")
    value = msgspec.to_builtins(golden)
    write_state(path, value | {"sha256": _digest(value)}, schema=SCHEMA, mode=0o444)
    sync_directory(path.parent)
    for leftover in path.parent.glob(".*.tmp"):
        leftover.unlink(missing_ok=True)  # of a writer that was killed
    return path


def _digest(value: dict[str, Any]) -> str:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


# -- comparing ---------------------------------------------------------------------------------------------------------


class Verdict(Enum):
    SAME = "same"
    DIFFERENT = "different"
    INCONCLUSIVE = "inconclusive"

    @property
    def exit_code(self) -> ExitCode:
        codes = {Verdict.SAME: ExitCode.DONE, Verdict.DIFFERENT: ExitCode.FAILED}
        return codes.get(self, ExitCode.INCONCLUSIVE)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare` found. `differences`: one line each, empty unless DIFFERENT. `reason`: why it is INCONCLUSIVE."""

    verdict: Verdict
    device: str | None
    prompts: int = 0
    differences: tuple[str, ...] = ()
    reason: str | None = None
    weights_differ: bool = False  # DIFFERENT at least for the weights: the checksum alone says so
    logits_differ: bool = False  # DIFFERENT at least for the answers
    recorded: bool = True  # False: INCONCLUSIVE because nothing was recorded for this device


def compare(paths: Paths, release: str, socket: str | os.PathLike[str]) -> Comparison:
    """Asks the running engine at `socket` for its golden answers and the checksum of its weights, and compares them
    bit for bit with those recorded for its device.

    DIFFERENT only on evidence: other logits, NaN, other weights in memory. No golden file, no answer, a time-out or an
    unusable reply is INCONCLUSIVE. Nothing raises but a damaged golden file (ReleaseError, StateError)."""
    engine = EngineCalls(Path(socket))
    device: str | None = None
    try:
        device = engine.device()
        golden = read_golden(paths, release, device)
        if golden is None:
            reason = f"no golden answers of {release} were recorded on {device}"
            return Comparison(Verdict.INCONCLUSIVE, device, reason=reason, recorded=False)
        return judge(golden, engine)
    except EngineUnavailable as error:
        return Comparison(Verdict.INCONCLUSIVE, device, reason=error.message)


class GoldenDiffers(ReleaseRefused):
    """An engine of `release` does not give its golden answers."""

    def __init__(self, release: str, gpu: int, found: Comparison) -> None:
        super().__init__(
            f"{release} on GPU {gpu} does not give its golden answers: {'; '.join(found.differences[:3])}",
            hint=f"first `appliance release verify {release}`: a damaged file gives other answers; if all are well, "
            f"the GPU or the engine is at fault: `appliance doctor`, then `appliance release check {release}`",
        )


def judge(golden: Golden, engine: EngineCalls) -> Comparison:
    """`compare` for golden answers that are at hand. EngineUnavailable if the engine does not answer."""
    differences = []
    weights = engine.checksum()
    if not weights["ok"]:
        differences.append(f"the weights in memory are not what was loaded: {weights['actual']}")
    if weights["expected"] != golden.weights_checksum:
        differences.append(f"weights: loaded {weights['expected']}, recorded {golden.weights_checksum}")
    of_weights = len(differences)
    for answer in golden.prompts:
        found = engine.golden(answer.prompt_ids)
        if not found["finite"]:
            differences.append(f"prompt {answer.name}: NaN or infinity in the logits")
        elif found["sha256"] != answer.sha256:
            differences.append(f"prompt {answer.name}: logits have SHA-256 {found['sha256']}, recorded {answer.sha256}")
    verdict = Verdict.DIFFERENT if differences else Verdict.SAME
    return Comparison(
        verdict, golden.device, len(golden.prompts), tuple(differences),
        weights_differ=of_weights > 0, logits_differ=len(differences) > of_weights,
    )  # fmt: skip


def prompts_of(paths: Paths, release: Release, context: int | None = None) -> list[tuple[str, list[int]]]:
    """The golden prompts in the tokens of `release`, cut to its context (`context`: what the engine says it is)."""
    from engine.config import ModelConfig
    from engine.tokenizer import Tokenizer

    directory = release.model_dir(paths)
    model = ModelConfig.from_dir(directory)
    length = min(model.max_position, release.options.max_model_len or model.max_position, context or 1 << 30)
    prompts = golden_prompts(Tokenizer.from_dir(directory), length)
    return [(name, [token for token in ids if token < model.vocab_size]) for name, ids in prompts]
