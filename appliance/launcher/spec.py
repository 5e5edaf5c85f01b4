"""What it takes to start one engine: its release, argv, environment, limits, devices. Read anew at every start, since
device minors and NUMA nodes may change with a driver reload. Changes nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from appliance.gpus import Gpu, find_gpu
from appliance.hostconfig import HostConfig, gpu_memory_fraction, parse_cpus, parse_size
from appliance.launcher.scope import ScopePlan
from appliance.log import ApplianceError, ExitCode, UsageError
from appliance.paths import SLOT_NAMES, Paths
from appliance.releases import Release, ReleaseError, ReleaseStore, ReleaseUnreadable
from appliance.slots import SlotError, pointer
from appliance.statefile import StateError
from engine.spawn import python_env

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


def read_release(paths: Paths, name: str) -> Release:
    """SpecError names the file and the key; ReleaseUnreadable where the disk did not answer, which may pass."""
    try:
        return ReleaseStore(paths).get(name)
    except ReleaseUnreadable:
        raise
    except (ReleaseError, StateError, UsageError) as error:
        raise SpecError(error.message, hint=error.hint) from None


def pointed_releases(paths: Paths, before: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """(slot -> release of the pointers that are set; what could not be read). A pointer that cannot be read counts as
    it did `before`: it must not stop an engine that serves."""
    found, problems = {}, []
    for slot in SLOT_NAMES:
        try:
            name = pointer(paths, slot)
        except SlotError as error:
            problems.append(error.message)
            name = before.get(slot)
        if name is not None:
            found[slot] = name
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
        python, "-P", "-m", "engine", "--model-dir", str(release.model_dir(paths)),
        "--model-name", release.model_name, "--backend", config.gpus.backend, "--uds", str(socket),
        "--request-timeout", f"{config.engine.request_timeout:g}",
        "--drain-timeout", f"{config.engine.drain_timeout:g}",
        "--gpu-memory-fraction" if device else "--memory-fraction", f"{fraction:.4g}",
    ]  # fmt: skip
    for key, flag in _OPTION_FLAGS.items():
        limits = [value for value in (getattr(config.engine, key), getattr(release.options, key)) if value is not None]
        if limits:
            argv += [flag, str(min(limits))]
    argv += [*release.options.arguments, *config.engine.arguments]
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
    """(interpreter, PYTHONPATH): an installed version brings its own packages, in a checkout ours are handed on."""
    try:
        python = release.engine_python(paths)
    except ReleaseError as error:
        raise SpecError(error.message, hint=error.hint) from None
    return str(python), None if python.is_relative_to(paths.lib) else python_env().get("PYTHONPATH")


def plan_memory(config: HostConfig, release: Release, total: int) -> tuple[int, float]:
    """(MemoryMax in bytes, fraction the engine takes for its KV pool). On the CPU the pool lives in the scope too and
    the engine takes a fraction of what the scope leaves after loading: of overhead + pool."""
    fraction = gpu_memory_fraction(config.engine)
    asked = parse_size(config.engine.memory_max)
    if config.gpus.backend == "cuda":
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
