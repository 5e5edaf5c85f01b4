"""What it takes to start one engine: its release, argv, environment, limits, devices. Read anew at every start, since
device minors and NUMA nodes may change with a driver reload. Changes nothing."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.gpus import Gpu, find_gpu
from appliance.hostconfig import HostConfig, gpu_memory_fraction, parse_cpus, parse_size
from appliance.launcher.scope import ScopePlan
from appliance.log import ApplianceError, ExitCode
from appliance.paths import RELEASE_NAME, SLOT_NAMES, Paths
from appliance.statefile import read_state
from engine.spawn import python_env

SCHEMA = 1
_GIB = 1 << 30
_OVERHEAD = 4 * _GIB  # both processes, their libraries, page tables, pinned buffers
_STOP_GRACE = 15.0  # after drain_timeout: last errors to clients, the memory given back
_OPTION_FLAGS = {  # of release.json and of [engine]; the smaller one counts
    "max_model_len": "--max-model-len",
    "max_batch_seqs": "--max-batch-seqs",
    "max_queued_requests": "--max-queued-requests",
}


class SpecError(ApplianceError):
    """This release cannot be started here; a restart does not help until somebody changes something."""

    exit_code = ExitCode.REFUSED


@dataclass(frozen=True, slots=True)
class Release:
    """release.json, as far as the launcher needs it."""

    name: str
    model_name: str
    engine_version: str
    python: str
    model_bytes: int
    options: dict[str, Any] = field(default_factory=dict)


def read_release(paths: Paths, name: str) -> Release:
    """SpecError names the file and the key."""
    if not RELEASE_NAME.fullmatch(name):
        raise SpecError(f"{name!r} is no release name", hint="lower-case letters, digits, '.', '_', '-'; at most 64")
    path = paths.release(name) / "release.json"
    table = read_state(path, schema=SCHEMA)
    if table is None:
        raise SpecError(f"there is no release {name}", hint="`appliance release list` shows what there is")

    def take(key: str, kind: type, default: Any = None) -> Any:
        value = table.get(key, default)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise SpecError(f"{path}: {key}: {value!r} is no {kind.__name__}", hint="`appliance release verify`")
        return value

    release = Release(
        take("name", str),
        take("model_name", str),
        take("engine_version", str),
        take("python", str, ""),
        take("model_bytes", int),
        take("options", dict, {}),
    )
    if release.name != name or release.model_bytes < 0:
        raise SpecError(f"{path} is not of release {name}", hint="`appliance release verify`")
    _check_options(path, release.options)
    return release


def _check_options(path: Path, options: dict[str, Any]) -> None:
    for key, value in options.items():
        if key == "arguments":
            good = isinstance(value, list) and all(isinstance(item, str) for item in value)
        elif key == "gpu_memory_fraction":
            good = isinstance(value, float) and 0 < value <= 0.95
        else:
            good = key in _OPTION_FLAGS and isinstance(value, int) and not isinstance(value, bool) and value > 0
        if not good and value is not None:
            raise SpecError(f"{path}: options.{key}: {value!r} is not usable", hint="`appliance release verify`")


def pointed_releases(paths: Paths, before: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """(slot -> release of the pointers that are set, symlinks to ../releases/NAME; what could not be read). A pointer
    that cannot be read counts as it did `before`: it must not stop an engine that serves."""
    found, problems = {}, []
    for slot in SLOT_NAMES:
        path = paths.slot_pointer(slot)
        try:
            name = Path(os.readlink(path)).name
            if not RELEASE_NAME.fullmatch(name):
                raise OSError(errno.EINVAL, f"it names no release but {name!r}")
            found[slot] = name
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
            if slot in before:
                found[slot] = before[slot]
    return found, problems


@dataclass(frozen=True, slots=True)
class EngineSpec:
    release: Release
    argv: list[str]
    env: dict[str, str]
    socket: Path
    scope: ScopePlan
    denied: list[str]  # device nodes that the engine must not be able to open


def plan_engine(paths: Paths, config: HostConfig, gpu: int, uuid: str, name: str) -> EngineSpec:
    """ApplianceError where it cannot be started: SpecError for good, GpuError while the GPU is away."""
    release = read_release(paths, name)
    device = find_gpu(uuid) if config.gpus.backend == "cuda" else None
    python, extra = _python(paths, release)
    memory_max, fraction = plan_memory(config, release, memory_total())
    socket = paths.engine_socket(gpu, name)
    argv = [
        python, "-P", "-m", "engine", "--model-dir", str(paths.release(name) / "model"),
        "--model-name", release.model_name, "--backend", config.gpus.backend, "--uds", str(socket),
        "--request-timeout", f"{config.engine.request_timeout:g}",
        "--drain-timeout", f"{config.engine.drain_timeout:g}",
        "--gpu-memory-fraction" if device else "--memory-fraction", f"{fraction:.4g}",
    ]  # fmt: skip
    for key, flag in _OPTION_FLAGS.items():
        limits = [value for value in (getattr(config.engine, key), release.options.get(key)) if value is not None]
        if limits:
            argv += [flag, str(min(limits))]
    argv += [*release.options.get("arguments", []), *config.engine.arguments]
    nodes = [f"/dev/nvidia{device.minor}", "/dev/nvidiactl", "/dev/nvidia-uvm"] if device else []
    scope = ScopePlan(
        gpu,
        name,
        memory_max=memory_max,
        cpu_weight=config.engine.cpu_weight,
        tasks_max=config.engine.tasks_max,
        cpu_quota=config.engine.cpu_quota,
        allowed_cpus=_allowed_cpus(config, device),
        devices=tuple(nodes),
        stop_seconds=config.engine.drain_timeout + _STOP_GRACE,
    )
    return EngineSpec(release, argv, environment(paths, uuid if device else None, extra), socket, scope, _denied(nodes))


def _python(paths: Paths, release: Release) -> tuple[str, str | None]:
    """(interpreter, PYTHONPATH): that of the version the release was made with; where no such version is installed (a
    checkout) the one recorded in the release, with our own packages."""
    installed = paths.lib / release.engine_version / "venv/bin/python"
    if installed.exists():
        return str(installed), None
    if release.python and os.access(release.python, os.X_OK):
        return release.python, python_env().get("PYTHONPATH")
    raise SpecError(
        f"release {release.name} needs engine version {release.engine_version}, which is not installed",
        hint=f"install that version of the appliance ({paths.lib / release.engine_version}), or add the release again",
    )


def plan_memory(config: HostConfig, release: Release, total: int) -> tuple[int, float]:
    """(MemoryMax in bytes, fraction the engine takes for its KV pool). On the CPU the pool lives in the scope too and
    the engine takes a fraction of what the scope leaves after loading: of overhead + pool."""
    fraction = gpu_memory_fraction(config.engine)
    asked = parse_size(config.engine.memory_max)
    if config.gpus.backend == "cuda":
        fraction = min(fraction, release.options.get("gpu_memory_fraction") or fraction)
        return asked or release.model_bytes + _OVERHEAD, fraction
    if asked:
        return asked, fraction
    pool = int(total * fraction / 2) // config.gpus.cpu_slots
    return release.model_bytes + _OVERHEAD + pool, max(1e-3, pool / (_OVERHEAD + pool))


def memory_total(proc: Path = Path("/proc")) -> int:
    """MemTotal in bytes."""
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    raise SpecError(f"{proc}/meminfo has no MemTotal")


def _allowed_cpus(config: HostConfig, device: Gpu | None) -> tuple[int, ...] | None:
    if config.engine.allowed_cpus != "auto":
        return tuple(parse_cpus(config.engine.allowed_cpus) or ())
    if device is None or device.numa_node is None:
        return None
    node = Path(f"/sys/devices/system/node/node{device.numa_node}/cpulist")
    try:
        return tuple(parse_cpus(node.read_text().strip()) or ()) or None
    except OSError:
        return None


def environment(paths: Paths, uuid: str | None, pythonpath: str | None) -> dict[str, str]:
    """All an engine gets; nothing of ours leaks into it."""
    env = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(paths.state),
        "LANG": "C.UTF-8",
    }
    if uuid is not None:
        env |= {"CUDA_VISIBLE_DEVICES": uuid, "CUDA_CACHE_PATH": "/var/cache/appliance/nv"}
    if pythonpath is not None:
        env["PYTHONPATH"] = pythonpath
    if "JOURNAL_STREAM" in os.environ:  # our standard error is the journal's, and so is the engine's
        env["JOURNAL_STREAM"] = os.environ["JOURNAL_STREAM"]
    return env


def _denied(allowed: list[str]) -> list[str]:
    """NVIDIA's device nodes of this host that are not in `allowed`."""
    return sorted(
        str(node) for node in Path("/dev").glob("nvidia*") if node.is_char_device() and str(node) not in allowed
    )
