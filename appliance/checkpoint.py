"""Which files of a Hugging Face style directory make up a model, and whether the engine can serve it.

What config.json, the tensors and the tokenizer must be is the engine's to say: `inspect` runs the very checks that
`appliance serve` runs before it loads weights, and none of its own.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.fsutil import StoreError, explain_engine_errors, explain_os_errors, read_json
from engine.checkpoint import INDEX_NAME, MAX_INDEX_BYTES, SINGLE_NAME
from engine.jsonfile import shown
from engine.safetensors import SafetensorsFile, is_plain_file_name

if TYPE_CHECKING:
    from engine.config import ModelConfig

REQUIRED = ("config.json", "tokenizer.json")
OPTIONAL = (
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "LICENSE",
    "NOTICE",
)
_ALWAYS_RELEVANT = (*REQUIRED, *OPTIONAL, INDEX_NAME, SINGLE_NAME)
_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_REFUSED = "the engine cannot serve this model"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The files that make up a model (names inside its directory) and what `list` shows of it."""

    files: tuple[str, ...]
    family: str
    dtype: str  # that most tensors are stored in, in torch's spelling
    parameters: int


def model_files(directory: Path) -> tuple[str, ...]:
    """Names of all files that the engine would look at, sorted. Raises StoreError if one is missing, or is a FIFO or
    the like, which would block a reader. The index is an allow-list: *.safetensors that it does not name are left out.
    """
    with explain_os_errors(f"cannot read the model directory {directory}"):
        present = {entry.name for entry in directory.iterdir()}
    for name in REQUIRED:
        if name not in present:
            raise StoreError(f"{directory} has no {name}", hint=_missing_hint(name, present))
    files = {name for name in _ALWAYS_RELEVANT if name in present}
    if INDEX_NAME in present:
        shards = _shards(directory / INDEX_NAME)
        if missing := sorted(shards - present):
            raise StoreError(f"{directory} has no {missing[0]}, which {INDEX_NAME} names", hint="get the missing shard")
        files |= shards
    elif SINGLE_NAME not in present:
        raise _no_weights(directory, present)
    for name in sorted(files):
        with explain_os_errors(f"cannot read {name}"):
            mode = (directory / name).stat().st_mode
        if not stat.S_ISREG(mode):
            raise StoreError(f"{directory / name} is not a regular file")
    return tuple(sorted(files))


def inspect(directory: Path) -> Checkpoint:
    """Everything that can be checked without reading weights, by the engine. Raises StoreError with its words."""
    from engine.load_plan import checkpoint_summary  # slow to import: not for `model list`

    files = model_files(directory)
    with explain_engine_errors(_REFUSED):
        config = _check_texts(directory)
        summary = checkpoint_summary(directory, config)
    stored = max(summary.source_dtypes, key=lambda dtype: summary.source_dtypes[dtype])
    return Checkpoint(files, summary.family, _DTYPE_NAMES.get(stored, stored), summary.num_parameters)


def inspect_links(directory: Path) -> tuple[str, ...]:
    """`model_files`, and of `inspect` what works where files are links out of the directory, as in the cache of Hugging
    Face: the engine refuses those, so only a copy can be checked in full. Finds most faults before the long copy."""
    files = model_files(directory)
    with explain_engine_errors(_REFUSED):
        _check_texts(directory)
        for name in files:
            if name.endswith(".safetensors"):
                SafetensorsFile(directory / name).close()
    return files


def _check_texts(directory: Path) -> ModelConfig:
    """config.json, the tokenizer, and that they belong together."""
    from engine.config import ModelConfig
    from engine.serve import check_vocabulary
    from engine.tokenizer import Tokenizer

    config = ModelConfig.from_dir(directory)
    check_vocabulary(config, Tokenizer.from_dir(directory))
    return config


def is_relevant(name: str) -> bool:
    """True for a file that the engine would read if it were in a model's directory."""
    return name in _ALWAYS_RELEVANT


def _missing_hint(name: str, present: Iterable[str]) -> str:
    if any(item.endswith(".gguf") for item in present):
        return "this looks like a GGUF model; a Hugging Face style directory is needed"
    if name == "tokenizer.json":
        return "convert the tokenizer once with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
    return "give the directory that holds config.json, *.safetensors and tokenizer.json"


def _no_weights(directory: Path, present: set[str]) -> StoreError:
    others = sorted(name for name in present if name.endswith(".safetensors"))
    if others:
        return StoreError(
            f"{directory} has {others[0]} but neither {SINGLE_NAME} nor {INDEX_NAME}",
            hint=f"get the index of the shards, or rename the one file that is the model to {SINGLE_NAME}",
        )
    if any(name.endswith((".bin", ".pt", ".pth")) for name in present):
        return StoreError(
            f"{directory} has no *.safetensors, only pickled weights",
            hint="pickles can run code and are refused; save the model with safe_serialization=True",
        )
    return StoreError(f"{directory} has no *.safetensors", hint="get the weights")


def _shards(index: Path) -> set[str]:
    """The file names in the index. Only what makes them safe to touch is checked here."""
    weight_map: Any = read_json(index, limit=MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise StoreError(f"{index} has no 'weight_map', or an empty one")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not is_plain_file_name(name):
            raise StoreError(
                f"{index} places tensor {shown(tensor)} in {shown(name)}, which is no plain *.safetensors name"
            )
    return set(weight_map.values())
