"""What a Hugging Face style model directory must hold, checked without reading the weights.

`scan` finds the files of a model and refuses what could not be served, naming the file. The meaning of config.json and
of every tensor is the engine's to judge: `engine_check` asks it when it is installed.
"""

from __future__ import annotations

import importlib
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.fsutil import StoreError, explain_os_errors, read_json
from appliance.safetensors_file import HeaderEntry, dominant_dtype, read_header

INDEX_NAME = "model.safetensors.index.json"
REQUIRED = ("config.json", "tokenizer.json")
OPTIONAL = (
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "LICENSE",
    "NOTICE",
)
_ALWAYS_RELEVANT = {*REQUIRED, *OPTIONAL, INDEX_NAME, "model.safetensors"}
MAX_CONFIG_BYTES = 4 * 1024 * 1024
MAX_TEMPLATE_BYTES = 1024 * 1024
MAX_FILES = 10_000


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The files that make up a model (names inside its directory) and what `list` shows of it."""

    files: tuple[str, ...]
    weight_files: tuple[str, ...]
    family: str
    dtype: str
    parameters: int


def scan(directory: Path) -> Checkpoint:
    """Checks a model directory structurally. Raises StoreError naming the file and what is wrong with it."""
    with explain_os_errors(f"cannot read the model directory {directory}"):
        present = {entry.name for entry in directory.iterdir()}
    for name in REQUIRED:
        if name not in present:
            raise StoreError(f"{directory} has no {name}", hint=_missing_hint(name, present))
    family = _check_config(directory / "config.json")
    weight_files, index_files, entries = _weights(directory, present)
    tokenizer = read_json(directory / "tokenizer.json")
    if not isinstance(tokenizer.get("model"), dict):
        raise StoreError(
            f"{directory / 'tokenizer.json'} has no 'model' object", hint="is it the tokenizers library's file?"
        )
    optional = [name for name in OPTIONAL if name in present]
    for name in optional:
        _check_optional(directory / name)
    files = (*REQUIRED, *optional, *index_files, *weight_files)
    parameters = sum(_num_elements(entry) for entry in entries)
    return Checkpoint(tuple(sorted(files)), tuple(weight_files), family, dominant_dtype(entries), parameters)


def engine_check(directory: Path) -> None:
    """Lets the engine judge the model: config.json, every tensor's name and shape, the tokenizer; reads no weights.

    Raises StoreError with the engine's words. Parts of the engine that are not installed are not asked.
    """
    checks: tuple[tuple[str, str], ...] = (
        ("engine.load_plan", "checkpoint_summary"),
        ("engine.tokenizer", "Tokenizer"),
    )
    model_config = _engine_part("engine.config", "ModelConfig")
    if model_config is None:
        return
    from engine.errors import EngineError

    try:
        config = model_config.from_dir(directory)
        for module, attribute in checks:
            part = _engine_part(module, attribute)
            if attribute == "Tokenizer" and part is not None:
                part.from_dir(directory)
            elif part is not None:
                part(directory, config)
    except EngineError as error:
        raise StoreError(f"the engine cannot serve this model: {error.message}", hint=error.hint) from error


def _engine_part(module: str, attribute: str) -> Any:
    """An attribute of an engine module, None if there is no such module. A module that is broken still raises."""
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        return None


def is_relevant(name: str) -> bool:
    """True for a file that the engine would read if it were in a model's directory."""
    return name in _ALWAYS_RELEVANT


def _missing_hint(name: str, present: Iterable[str]) -> str:
    if any(item.endswith(".gguf") for item in present):
        return "this looks like a GGUF model; a Hugging Face style directory is needed"
    if name == "tokenizer.json":
        return "convert the tokenizer once with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
    return "give the directory that holds config.json, *.safetensors and tokenizer.json"


def _check_config(path: Path) -> str:
    config = read_json(path, limit=MAX_CONFIG_BYTES)
    family = config.get("model_type")
    if not isinstance(family, str) or not family:
        raise StoreError(f"{path} has no 'model_type'", hint="it should be the config.json of transformers")
    return family


def _check_optional(path: Path) -> None:
    if path.suffix == ".json":
        read_json(path, limit=MAX_CONFIG_BYTES * 16)
        return
    with explain_os_errors(f"cannot read {path}"):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_TEMPLATE_BYTES:
        raise StoreError(f"{path} is no regular file of at most {MAX_TEMPLATE_BYTES} bytes")


def _weights(directory: Path, present: set[str]) -> tuple[list[str], list[str], list[HeaderEntry]]:
    """(weight files, index file if any, all tensors). The index is an allow-list: other *.safetensors are left out."""
    single = "model.safetensors"
    if INDEX_NAME not in present:
        if single not in present:
            raise _no_weights(directory, present)
        return [single], [], _nonempty(directory / single, read_header(directory / single))
    by_file = _read_index(directory / INDEX_NAME)
    if single in present and single not in by_file:
        raise StoreError(f"{directory} has both {single} and {INDEX_NAME}", hint="remove the one that is not meant")
    entries: list[HeaderEntry] = []
    for name, tensors in sorted(by_file.items()):
        if name not in present:
            raise StoreError(f"{directory} has no {name}, which {INDEX_NAME} names", hint="get the missing shard")
        header = read_header(directory / name)
        missing = sorted(tensors - header.keys())
        if missing:
            raise StoreError(f"{directory / name} has no tensor {missing[0]!r}, which {INDEX_NAME} places there")
        entries += [header[tensor] for tensor in tensors]
    return sorted(by_file), [INDEX_NAME], entries


def _nonempty(path: Path, header: dict[str, HeaderEntry]) -> list[HeaderEntry]:
    if not header:
        raise StoreError(f"{path} holds no tensors")
    return list(header.values())


def _no_weights(directory: Path, present: set[str]) -> StoreError:
    others = sorted(name for name in present if name.endswith(".safetensors"))
    if others:
        return StoreError(
            f"{directory} has {others[0]} but neither model.safetensors nor {INDEX_NAME}",
            hint="get the index of the shards, or rename the one file that is the model to model.safetensors",
        )
    if any(name.endswith((".bin", ".pt", ".pth")) for name in present):
        return StoreError(
            f"{directory} has no *.safetensors, only pickled weights",
            hint="pickles can run code and are refused; save the model with safe_serialization=True",
        )
    return StoreError(f"{directory} has no *.safetensors", hint="get the weights")


def _read_index(path: Path) -> dict[str, set[str]]:
    """file name -> tensors it must hold."""
    weight_map: Any = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise StoreError(f"{path} has no 'weight_map', or an empty one")
    by_file: dict[str, set[str]] = {}
    for tensor, name in weight_map.items():
        if not is_plain_name(name) or not name.endswith(".safetensors"):
            raise StoreError(f"{path} places tensor {tensor!r} in {name!r}, which is no plain *.safetensors name")
        by_file.setdefault(name, set()).add(tensor)
    if len(by_file) > MAX_FILES:
        raise StoreError(f"{path} names {len(by_file)} files; at most {MAX_FILES} are accepted")
    return by_file


def is_plain_name(name: Any) -> bool:
    """True for a file name without directory parts, control characters or a leading dot."""
    return (
        isinstance(name, str)
        and 0 < len(name.encode("utf-8", "surrogatepass")) <= 255
        and name.isprintable()
        and "/" not in name
        and not name.startswith(".")
    )


def _num_elements(entry: HeaderEntry) -> int:
    count = 1
    for size in entry.shape:
        count *= size
    return count
