"""Releases: immutable directories that say everything about what an engine serves. Complete or absent.

    RELEASES/NAME/release.json     who it is: model name, engine version, options
    RELEASES/NAME/model/           the model's files; with `add --link` a link to a model of the store
    RELEASES/NAME/manifest.json    size and SHA-256 of release.json and of every file of the model
    RELEASES/NAME/golden/X.json    golden answers on the device X, written once (appliance/golden.py)
    RELEASES/.tmp/NAME/            being built or removed; cleared by the next change after a kill
    RELEASES/.lock                 flock: one change of releases or slots at a time

A release is built in .tmp, fsynced, and appears by one rename. This module is read by the launcher, which must stay
small: whatever needs digests or the engine's checks is in release_build.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from appliance.canary_guard import run_on
from appliance.hostconfig import ContextTokens, Count
from appliance.log import ApplianceError, ExitCode, Progress, UsageError
from appliance.paths import RELEASE_NAME, Paths
from appliance.slots import slots_of
from appliance.state_hints import damaged_hint
from appliance.statefile import StateError, read_state, sync_directory

if TYPE_CHECKING:
    from appliance.hostconfig import HostConfig
    from appliance.models import ModelStore
    from appliance.verify import Verification

SCHEMA = 1
RELEASE_JSON, MANIFEST_JSON, MODEL, GOLDEN = "release.json", "manifest.json", "model", "golden"
_LAUNCHER_SCHEMA = 1


class ReleaseError(ApplianceError):
    """A release cannot be used, made or removed as asked; says why and what to do."""


class ReleaseRefused(ReleaseError):
    """A check or a rule says no. The same command again will not help."""

    exit_code = ExitCode.REFUSED


class ReleaseUnreadable(ReleaseError):
    """The disk or the permissions did not let us read it: another try may succeed."""


class ReleaseOptions(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What a release may decide about its engine; None = the host's appliance.toml. Narrower than the engine's command
    line: where it listens, who may use it and how much of the GPU it takes belong to the host."""

    max_model_len: ContextTokens | None = None
    max_batch_seqs: Annotated[int, Meta(ge=1, le=256)] | None = None
    max_queued_requests: Count | None = None
    arguments: list[str] = []  # further options of `python -m engine`, after those of appliance.toml


class Release(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """release.json."""

    name: str
    created: str  # UTC, 2026-11-29T19:02:26Z
    model_name: str  # what clients call it
    engine_version: str
    python: str  # argv[0] of the engine where /usr/lib/appliance/ENGINE_VERSION is not there (a checkout)
    options: ReleaseOptions
    model_bytes: Annotated[int, Meta(ge=0)]
    model: str  # its name in the model store, when the release was made
    linked: bool
    family: str
    dtype: str
    parameters: int
    note: str = ""

    def directory(self, paths: Paths) -> Path:
        return paths.release(self.name)

    def model_dir(self, paths: Paths) -> Path:
        """For `python -m engine --model-dir`."""
        return paths.release(self.name) / MODEL

    def engine_python(self, paths: Paths) -> Path:
        """The Python of the engine version that this release was made with. ReleaseError if that is not installed."""
        packaged = paths.lib / self.engine_version / "venv" / "bin" / "python"
        for python in (packaged, Path(self.python)):
            if os.access(python, os.X_OK):
                return python
        raise ReleaseError(
            f"release {self.name} needs the engine of appliance {self.engine_version}, which is not installed",
            hint=f"install that version again ({packaged.parents[2]}), or add a new release with this one",
        )


@dataclass(frozen=True, slots=True)
class ReleaseInfo:
    """One line of `list`. `problem` is set where the directory is no usable release, and says why."""

    name: str
    release: Release | None
    slots: tuple[str, ...] = ()
    golden: tuple[str, ...] = ()  # devices
    problem: str | None = None


@dataclass(slots=True)
class ReleaseStore:
    """All operations raise ApplianceError with a hint where there is one. Those that change something must be called
    inside `changing()`, except `add` and `remove`, which are."""

    paths: Paths
    progress: Progress = field(default_factory=lambda: Progress(quiet=True))

    # -- reading ---------------------------------------------------------------------------------------------------

    def get(self, name: str) -> Release:
        """ReleaseError if it is not there or its release.json cannot be understood."""
        path = self.paths.release(check_name(name)) / RELEASE_JSON
        try:
            state = read_state(path, schema=SCHEMA)
        except NotADirectoryError:
            state = None  # a file in the place of a directory
        except OSError as error:
            raise ReleaseUnreadable(f"cannot read {path}: {error.strerror}", hint="run it as root?") from None
        if state is None and os.path.lexists(path.parent):
            raise ReleaseError(f"the release {name!r} is unusable: it has no {RELEASE_JSON}", hint=damaged_hint(path))
        if state is None:
            raise ReleaseError(
                f"there is no release {name!r} in {self.paths.releases}", hint="see `appliance release list`"
            )
        try:
            release = msgspec.convert(state, Release)
        except msgspec.ValidationError as error:
            raise ReleaseError(f"{path} is damaged: {error}", hint=damaged_hint(path)) from None
        if release.name != name:
            raise ReleaseError(f"{path} belongs to the release {release.name!r}", hint="directories are never renamed")
        return release

    def list(self) -> list[ReleaseInfo]:
        """Every release, by name; directories that are none are listed with their `problem`."""
        try:
            names = sorted(entry for entry in os.listdir(self.paths.releases) if not entry.startswith("."))
        except FileNotFoundError:
            return []
        return [self._info(name) for name in names]

    def _info(self, name: str) -> ReleaseInfo:
        try:
            release = self.get(name)
            return ReleaseInfo(name, release, tuple(slots_of(self.paths, name)), self.golden_devices(name))
        except (ReleaseError, StateError, UsageError) as error:
            return ReleaseInfo(name, None, problem=error.message)

    def golden_devices(self, name: str) -> tuple[str, ...]:
        """Devices that golden answers of the release were recorded on."""
        directory = self.paths.release(check_name(name)) / GOLDEN
        if not directory.is_dir():
            return ()
        return tuple(
            sorted(item.stem for item in directory.glob("*.json") if not item.name.startswith(".") and item.is_file())
        )

    def verify(self, name: str) -> Verification:
        """Recomputes every digest: the manifest's, and each golden file's own. Reports bad, missing and extra files."""
        from appliance.release_build import verify_release

        return verify_release(self.paths, self.get(name), self.progress)

    # -- changing --------------------------------------------------------------------------------------------------

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Holds the lock of all releases and slots (BusyError, exit 5, if another process has it) and clears what a
        killed change left behind."""
        from appliance.fsutil import locked

        with explained("cannot change the releases"), ExitStack() as stack:
            # Whatever the umask is: the engine's user reads releases. What is being built nobody reads: its files are
            # looked at only when they are copied, and a link in a model of a stranger may have led anywhere.
            for directory, mode in ((self.paths.releases, 0o755), (self._tmp(), 0o700)):
                directory.mkdir(mode=mode, parents=True, exist_ok=True)
                os.chmod(directory, mode)
            stack.enter_context(locked(self.paths.releases / ".lock", "the set of releases"))
            for leftover in self._tmp().iterdir():
                _remove_tree(leftover)
            stack.callback(self.progress.finish)
            yield

    def add(
        self,
        name: str,
        models: ModelStore,
        model: str,
        config: HostConfig,
        *,
        model_name: str | None = None,
        options: ReleaseOptions | None = None,
        link: bool = False,
        note: str = "",
    ) -> tuple[Release, bool]:
        """Makes a release of a stored model; (release, changed). One of that name that is the same already is left as
        it is; a different one is refused, since releases never change."""
        with self.changing():
            return self.add_locked(
                name, models, model, config, model_name=model_name, options=options, link=link, note=note
            )

    def add_locked(
        self,
        name: str,
        models: ModelStore,
        model: str,
        config: HostConfig,
        *,
        model_name: str | None = None,
        options: ReleaseOptions | None = None,
        link: bool = False,
        note: str = "",
    ) -> tuple[Release, bool]:
        """`add` for a caller that holds `changing()`."""
        from appliance.release_build import Request, build, same_as

        wanted = Request(check_name(name), model, model_name or model, options or ReleaseOptions(), link, note)
        target = self.paths.release(name)
        if os.path.lexists(target):
            current = self.get(name)
            if difference := same_as(self.paths, current, wanted, models):
                raise ReleaseRefused(
                    f"there is already a release {name!r}, and it differs: {difference}",
                    hint="releases never change; choose another name",
                )
            return current, False
        staged = self._tmp() / name
        with explained(f"cannot add the release {name}"):
            staged.mkdir(mode=0o755)
            try:
                release = build(self.paths, wanted, models, staged, config, self.progress)
                os.rename(staged, target)
            finally:
                if staged.exists():
                    _remove_tree(staged)
            sync_directory(self.paths.releases)
        return release, True

    def remove(self, name: str) -> None:
        """ReleaseRefused (exit 4) while a slot points at it or a launcher runs it."""
        with self.changing():
            self.remove_locked(name)

    def remove_locked(self, name: str) -> None:
        """`remove` for a caller that holds `changing()`. Also removes what is no usable release."""
        target = self.paths.release(check_name(name))
        if not os.path.lexists(target):
            raise ReleaseError(f"there is no release {name!r}", hint="see `appliance release list`")
        if slots := slots_of(self.paths, name):
            raise ReleaseRefused(
                f"the release {name!r} is what the slot {' and '.join(slots)} points at",
                hint=_run_hint(self.paths, name) or "point it at another one first: appliance release use NAME",
            )
        if gpus := running_on(self.paths, name):
            raise ReleaseRefused(
                f"the release {name!r} runs on GPU {', '.join(map(str, gpus))}",
                hint=_run_hint(self.paths, name) or "see `appliance status`; finish the change that started it",
            )
        with explained(f"cannot remove the release {name}"):
            retired = self._tmp() / name
            os.rename(target, retired)
            sync_directory(self.paths.releases)
            _remove_tree(retired)

    def _tmp(self) -> Path:
        return self.paths.releases / ".tmp"


def _run_hint(paths: Paths, release: str) -> str | None:
    """What ends the canary run that needs it: `release use` is refused meanwhile."""
    with suppress(StateError, OSError):
        run = run_on(paths)
        if run is not None and release in (run.release, run.stable):
            return f"the canary run {run.id} needs it: {run.way_out}"
    return None


def running_on(paths: Paths, release: str) -> list[int]:
    """GPUs whose launcher says that it has an engine of `release`, in any state."""
    found = []
    for file in sorted(paths.run.glob("gpu*/state.json")):
        state = read_state(file, schema=_LAUNCHER_SCHEMA) or {}
        if any(engine.get("release") == release for engine in state.get("engines", [])):
            found.append(int(state["gpu"]))
    return sorted(found)


def check_name(name: str) -> str:
    """`name` if it can name a release, else UsageError."""
    if not RELEASE_NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot name a release",
            hint="use a-z, 0-9, '.', '_' and '-', at most 64, beginning with a letter or digit",
        )
    return name


def parse_options(pairs: list[str], arguments: list[str]) -> ReleaseOptions:
    """Options of the command line ("max_model_len=4096"), checked by type and range; UsageError names the one."""
    values: dict[str, Any] = {}
    known = [name for name in ReleaseOptions.__struct_fields__ if name != "arguments"]
    for pair in pairs:
        key, separator, text = pair.partition("=")
        key = key.strip().replace("-", "_")
        if not separator or key not in known:
            raise UsageError(
                f"--option {pair}: {key!r} is no option of a release",
                hint=f"KEY=VALUE with one of: {', '.join(known)}; others with --argument",
            )
        if key in values:
            raise UsageError(f"--option {key} is given twice")
        try:
            values[key] = json.loads(text)
        except ValueError:
            values[key] = text
    if arguments:
        values["arguments"] = arguments
    try:
        return msgspec.convert(values, ReleaseOptions)
    except msgspec.ValidationError as error:
        text, _, at = str(error).partition(" - at ")
        raise UsageError(f"--option {at.strip('`').removeprefix('$.')}: {text}") from None


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turns an OSError inside into a ReleaseError that names the file."""
    try:
        yield
    except OSError as error:
        where = f": {os.fsdecode(error.filename)}" if error.filename is not None else ""
        reason = os.strerror(error.errno) if error.errno else str(error)
        if isinstance(error, PermissionError):
            raise ReleaseRefused(f"{doing}: {reason}{where}", hint="run as root") from error
        raise ReleaseError(f"{doing}: {reason}{where}", hint="check the disk, and that you are root") from error


def _remove_tree(path: Path) -> None:
    import shutil

    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
