"""The NVIDIA device nodes: `python -m appliance.gpu_nodes`, run by appliance-gpu-nodes.service before any launcher.

read() -> plan() (pure; --dry-run prints it) -> apply(), a few rounds, because each step shows more: loading the driver
shows the minors, the first open of a GPU shows its UUID. Then what is there is compared with what the driver says; a
node with a wrong number or one that the user `appliance` cannot open is an error that names the fix, never a guess.

nvidia-modprobe makes the nodes, since it knows the owner and mode that the driver was told to use (NVreg_DeviceFile*).
Its -u excludes the GPUs' nodes (nvidia-modprobe.c: with -u, -c numbers nvidia-uvm nodes), so it runs twice.
"""

from __future__ import annotations

import argparse
import os
import pwd
import shutil
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance import command
from appliance.gpus import read_slots
from appliance.hostconfig import load_config
from appliance.log import ApplianceError, ExitCode, report_error
from appliance.paths import Paths

_ROUNDS = 4  # load the driver, make the nodes, open the GPUs, look once more
_CTL_MINOR = 255  # of /dev/nvidiactl (nvidia-modprobe-utils.h: NV_CTL_DEVICE_NUM)
_TIMEOUT_SECONDS = 60.0
_USER = "appliance"
# The name in /proc/devices was nvidia-frontend, is nvidia on current drivers; both are major 195.
_GPU_MAJORS = ("nvidia", "nvidia-frontend")
_CTL_MAJORS = ("nvidiactl", *_GPU_MAJORS)
_UVM_MAJORS = ("nvidia-uvm",)


@dataclass(frozen=True, slots=True)
class Node:
    """What is at a path below /dev."""

    device: tuple[int, int] | None  # (major, minor); None: no character device
    mode: int
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class DriverGpu:
    pci: str
    minor: int | None
    uuid: str | None  # None: nobody has opened it since the driver was loaded (GPU-????...)


@dataclass(frozen=True, slots=True)
class State:
    majors: dict[str, int]  # of /proc/devices, character devices
    gpus: tuple[DriverGpu, ...]
    nodes: dict[str, Node]  # by path, those that are there
    may_create: bool  # the driver parameter ModifyDeviceFiles
    modprobe: str | None  # path of nvidia-modprobe


@dataclass(frozen=True, slots=True)
class Run:
    argv: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(self.argv)


@dataclass(frozen=True, slots=True)
class Open:
    """Opens and closes a node, so that the driver initialises the GPU and knows its UUID."""

    path: str

    def __str__(self) -> str:
        return f"open {self.path}"


Action = Run | Open


@dataclass(frozen=True, slots=True)
class Problem:
    message: str
    hint: str


def read(root: Path = Path("/")) -> State:
    """What the driver says and what is in /dev; nothing is opened."""
    params = _fields(root / "proc/driver/nvidia/params")
    directory = root / "proc/driver/nvidia/gpus"
    gpus = tuple(_driver_gpu(path) for path in sorted(directory.iterdir())) if directory.is_dir() else ()
    paths = [path for path, _, _ in _wanted(gpus)]
    nodes = {path: node for path in paths if (node := _node(root / path.lstrip("/")))}
    may_create = params.get("ModifyDeviceFiles", "1") == "1"
    modprobe = shutil.which("nvidia-modprobe", path="/usr/sbin:/usr/bin:/sbin:/bin")
    return State(_majors(root / "proc/devices"), gpus, nodes, may_create, modprobe)


def plan(state: State) -> list[Action]:
    """What to do next; empty when nothing is left that could be done."""
    if state.modprobe is None:
        return [action for action in _opens(state) if action.path in state.nodes]
    missing = {path for path, _, _ in _wanted(state.gpus) if not _is_right(path, state)}
    if not state.may_create and state.majors.keys() & set(_GPU_MAJORS):
        missing = set()  # the admin told the driver to leave nodes alone; _problems says what is wrong
    actions: list[Action] = []
    if missing - {"/dev/nvidia-uvm"}:
        minors = [_CTL_MINOR, *(gpu.minor for gpu in state.gpus if gpu.minor is not None)]
        actions.append(Run((state.modprobe, *(word for minor in minors for word in ("-c", str(minor))))))
    if "/dev/nvidia-uvm" in missing:
        actions.append(Run((state.modprobe, "-u", "-c", "0")))
    return actions or list(_opens(state))


def apply(action: Action) -> None:
    """Does it. A failure is not reported here: the comparison afterwards says what is still wrong."""
    print(action, flush=True)
    if isinstance(action, Open):
        try:
            os.close(os.open(action.path, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            print(f"open {action.path}: {error.strerror}", file=sys.stderr)
        return
    result = command.run(action.argv, timeout=_TIMEOUT_SECONDS)
    sys.stderr.write(result.stderr.decode(errors="replace"))
    if result.timed_out:
        raise ApplianceError(
            f"`{action}` did not end in {_TIMEOUT_SECONDS:.0f} s",
            hint="the driver hangs: see `journalctl -k -g NVRM`; a reboot may be needed",
        )
    if not result.ok:
        print(f"{action}: {result.why()}", file=sys.stderr)


def problems(state: State, user: pwd.struct_passwd, groups: Sequence[int]) -> list[Problem]:
    """What keeps engines (user `appliance`) from a GPU that the driver shows. Empty: all is well."""
    if not any(name in state.majors for name in _GPU_MAJORS):
        hint = "install the driver; `modprobe nvidia` and `journalctl -k -g NVRM` say why it does not load"
        return [Problem("the NVIDIA driver is not loaded", hint)]
    if not state.gpus:
        return [Problem("the NVIDIA driver shows no GPU", "see `lspci -d 10de:` and `journalctl -k -g NVRM`")]
    found = []
    for path, majors, minor in _wanted(state.gpus):
        node = state.nodes.get(path)
        major = _major(majors, state)
        if major is None:
            found.append(Problem(f"the module of {path} is not loaded", "`modprobe nvidia-uvm` says why"))
        elif node is None:
            found.append(Problem(f"{path} is missing", _create_hint(state)))
        elif node.device != (major, minor):
            is_now = "no device" if node.device is None else f"{node.device[0]}:{node.device[1]}"
            found.append(Problem(f"{path} is {is_now}, the driver has {major}:{minor}", _create_hint(state)))
        elif not _may_open(node, user, groups):
            found.append(
                Problem(
                    f"{path} (mode {node.mode:04o}, {node.uid}:{node.gid}) cannot be opened by {user.pw_name}",
                    f"add {user.pw_name} to the group of the node, or change NVreg_DeviceFileMode of the driver",
                )
            )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m appliance.gpu_nodes", description=__doc__.partition("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="print what would be done, change nothing")
    args = parser.parse_args(argv)
    try:
        return _main(Paths.default(), dry_run=args.dry_run)
    except ApplianceError as error:
        report_error(error.message, hint=error.hint, code=error.exit_code)
        return error.exit_code


def _main(paths: Paths, *, dry_run: bool) -> int:
    if load_config(paths.config).gpus.backend != "cuda":
        print('backend is "cpu": no device nodes are needed')
        return ExitCode.DONE
    state = read()
    if dry_run:
        print("\n".join(map(str, plan(state))) or "nothing to do")
        return ExitCode.DONE
    changed = False
    for _ in range(_ROUNDS):
        actions = plan(state)
        for action in actions:
            apply(action)
        before, state = state, read()
        changed |= before.nodes != state.nodes
        if not actions or before == state:
            break
    try:
        user = pwd.getpwnam(_USER)
    except KeyError:
        raise ApplianceError(f"there is no user {_USER}", hint="`systemd-sysusers` makes it") from None
    found = problems(state, user, os.getgrouplist(user.pw_name, user.pw_gid))
    for problem in found:
        report_error(problem.message, hint=problem.hint)
    _warn_of_absent(state, paths)
    if changed and not found:
        _wake_launchers()
    return ExitCode.FAILED if found else ExitCode.DONE


def _warn_of_absent(state: State, paths: Paths) -> None:
    """A bound GPU that is not there is its launcher's failure; the others' nodes are right nevertheless."""
    seen = {gpu.uuid for gpu in state.gpus}
    for number, slot in read_slots(paths.gpus).items():
        if slot["uuid"] not in seen:
            print(f"warning: the driver does not show {slot['uuid']} of slot {number}", file=sys.stderr)


def _wake_launchers() -> None:
    """Nodes were made anew (the driver was loaded again): running launchers look again; those that start are waiting
    for us anyway. A reload never starts anything."""
    result = command.run(["systemctl", "--no-block", "reload", "appliance-gpu@*.service"], timeout=_TIMEOUT_SECONDS)
    if not result.ok:
        print(f"warning: the launchers were not told of new nodes: {result.why()}", file=sys.stderr)


def _wanted(gpus: Sequence[DriverGpu]) -> list[tuple[str, tuple[str, ...], int]]:
    """(path, names of its major, minor) of every node that engines need."""
    own = [(f"/dev/nvidia{gpu.minor}", _GPU_MAJORS, gpu.minor) for gpu in gpus if gpu.minor is not None]
    return [*own, ("/dev/nvidiactl", _CTL_MAJORS, _CTL_MINOR), ("/dev/nvidia-uvm", _UVM_MAJORS, 0)]


def _opens(state: State) -> list[Open]:
    return [Open(f"/dev/nvidia{gpu.minor}") for gpu in state.gpus if gpu.uuid is None and gpu.minor is not None]


def _is_right(path: str, state: State) -> bool:
    node = state.nodes.get(path)
    expected = {name: (_major(majors, state), minor) for name, majors, minor in _wanted(state.gpus)}[path]
    return node is not None and node.device == expected


def _major(names: Sequence[str], state: State) -> int | None:
    return next((state.majors[name] for name in names if name in state.majors), None)


def _may_open(node: Node, user: pwd.struct_passwd, groups: Sequence[int]) -> bool:
    """Read and write, by mode bits (ACLs are not looked at)."""
    shift = 6 if node.uid == user.pw_uid else 3 if node.gid in groups else 0
    return (node.mode >> shift) & 0o6 == 0o6


def _create_hint(state: State) -> str:
    if state.modprobe is None:
        return "install nvidia-modprobe (it comes with the driver), then `systemctl restart appliance-gpu-nodes`"
    if not state.may_create:
        return "the driver was told to leave nodes alone (NVreg_ModifyDeviceFiles=0): make them yourself"
    return "`nvidia-modprobe` failed: see `journalctl -u appliance-gpu-nodes` and `journalctl -k -g NVRM`"


def _driver_gpu(directory: Path) -> DriverGpu:
    fields = _fields(directory / "information")
    minor, uuid = fields.get("Device Minor", ""), fields.get("GPU UUID", "")
    known = uuid.startswith("GPU-") and "?" not in uuid
    return DriverGpu(directory.name, int(minor) if minor.isdigit() else None, uuid if known else None)


def _fields(path: Path) -> dict[str, str]:
    """`Key: value` lines of a /proc file; empty without it."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, separator, value in pairs if separator}


def _majors(path: Path) -> dict[str, int]:
    """Character devices of /proc/devices: name -> major."""
    try:
        character = path.read_text(errors="replace").partition("Block devices:")[0]
    except OSError:
        return {}
    words = (line.split() for line in character.splitlines())
    return {word[1]: int(word[0]) for word in words if len(word) == 2 and word[0].isdigit()}


def _node(path: Path) -> Node | None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    numbers = (os.major(found.st_rdev), os.minor(found.st_rdev)) if stat.S_ISCHR(found.st_mode) else None
    return Node(numbers, stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid)


if __name__ == "__main__":
    raise SystemExit(main())
