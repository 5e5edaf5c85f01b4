"""The safetensors files of one model directory as one set of tensors.

With model.safetensors.index.json the index is an allow-list: each tensor is read from the one file it names and from no
other. Without it only model.safetensors is read. Other files (consolidated.safetensors, *.bin, shards of an older
upload) are never looked at.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import CheckpointError
from engine.jsonfile import read_json_object, shown
from engine.safetensors import SafetensorsFile, TensorInfo, is_plain_file_name

if TYPE_CHECKING:
    from types import TracebackType

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_INDEX_BYTES = 32 << 20
MAX_SHARDS = 512


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Open files and, for each tensor, the one file that holds it. A context manager (closes the files)."""

    folder: Path
    files: tuple[SafetensorsFile, ...]
    tensors: dict[str, tuple[int, TensorInfo]]  # name -> (index into files, place)
    notes: tuple[str, ...]
    _stack: ExitStack = field(repr=False)

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Open and check every header. Raises CheckpointError."""
        folder = Path(path)
        index = folder / INDEX_NAME
        single = folder / SINGLE_NAME
        with ExitStack() as stack:
            if index.exists():
                files, tensors, notes = _open_sharded(folder, index, stack)
                if single.exists() and SINGLE_NAME not in {file.path.name for file in files}:
                    raise CheckpointError(
                        f"{folder} holds both {INDEX_NAME} and a {SINGLE_NAME} it does not mention",
                        hint="Remove the one that does not belong to the model.",
                    )
            elif single.exists():
                file = stack.enter_context(_open_inside(folder, SINGLE_NAME))
                files, notes = [file], []
                tensors = {name: (0, info) for name, info in file.tensors.items()}
            else:
                raise CheckpointError(
                    f"{folder} holds neither {SINGLE_NAME} nor {INDEX_NAME}",
                    hint="Only safetensors checkpoints in Hugging Face form are loaded.",
                )
            return cls(folder, tuple(files), tensors, tuple(notes), stack.pop_all())

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()

    @property
    def total_bytes(self) -> int:
        """Sizes of the files together."""
        return sum(file.size for file in self.files)


def _open_inside(folder: Path, name: str) -> SafetensorsFile:
    """Open a file that must really lie in `folder`: a symbolic link may not lead out of it."""
    try:
        target = (folder / name).resolve(strict=True)
        root = folder.resolve(strict=True)
    except (OSError, RuntimeError) as exc:  # RuntimeError: a loop of links, before Python 3.13
        raise CheckpointError(f"cannot open {folder / name}: {getattr(exc, 'strerror', None) or exc}") from exc
    if target.parent != root:
        raise CheckpointError(
            f"{folder / name} is a link out of the model's directory (to {target})",
            hint="Import the directory with `appliance model add`, which copies the files.",
        )
    return SafetensorsFile(target)


def _open_sharded(
    folder: Path, index: Path, stack: ExitStack
) -> tuple[list[SafetensorsFile], dict[str, tuple[int, TensorInfo]], list[str]]:
    weight_map = _read_index(index)
    shards = sorted(set(weight_map.values()))
    for name in shards:
        if not (folder / name).exists():
            raise CheckpointError(f"{index}: {name} is missing in {folder}", hint="Fetch the missing shard.")
    files = [stack.enter_context(_open_inside(folder, name)) for name in shards]
    number = {name: i for i, name in enumerate(shards)}
    tensors: dict[str, tuple[int, TensorInfo]] = {}
    for name, shard in weight_map.items():
        info = files[number[shard]].tensors.get(name)
        if info is None:
            raise CheckpointError(f"{index} places tensor {shown(name)} in {shard}, which does not hold it")
        tensors[name] = (number[shard], info)
    notes = []
    for shard, file in zip(shards, files, strict=True):
        unknown = file.tensors.keys() - weight_map.keys()
        if unknown:
            raise CheckpointError(
                f"{file.path} holds tensor {shown(min(unknown))}, which {INDEX_NAME} does not list",
                hint="Index and shards are of different uploads: fetch the model again.",
            )
        stale = [name for name in file.tensors if weight_map[name] != shard]
        if stale:
            notes.append(
                f"{shard}: {len(stale)} tensors ignored, the index takes them from another shard ({shown(min(stale))})"
            )
    return files, tensors, notes


def _read_index(index: Path) -> dict[str, str]:
    weight_map = read_json_object(index, max_bytes=MAX_INDEX_BYTES, error=CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map must map tensor names to file names")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not is_plain_file_name(shard):
            raise CheckpointError(
                f"{index}: tensor {shown(name)} is placed in {shown(shard)}; "
                "a shard must be a plain file name ending in .safetensors"
            )
    if len(set(weight_map.values())) > MAX_SHARDS:
        raise CheckpointError(f"{index} names more than {MAX_SHARDS} shards")
    return weight_map
