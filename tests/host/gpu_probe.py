"""Looks at a scope from inside: which device nodes open, what CUDA sees, what the CPU and memory limits do.

Runs in the box with the installed Python, never under pytest: as the one command of a unit that has the launcher's own
sandbox (gpu_sandbox.py). Call order: outside -> launcher/spawn.py:spawn_trampoline -> launcher/scope_call.py (its
scope) -> launcher/scope.py:check_scope -> inside, as the user appliance and in the scope -> driver_sees. So a small
program takes the engine's own way. Each role prints JSON lines; gpu_sandbox.py puts them together.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIB = 1 << 20


def outside(order: dict[str, Any]) -> int:
    """Starts `inside` in a scope of its own below the GPU's slice, as the launcher starts an engine."""
    from appliance.launcher.last_words import LastWords
    from appliance.launcher.scope import ScopePlan, check_scope, oom_kills, own_cgroup
    from appliance.launcher.scope_call import answer
    from appliance.launcher.spawn import spawn_trampoline
    from appliance.launcher.spec import EngineSpec, environment
    from appliance.launcher.trampoline import GO
    from appliance.paths import Paths
    from appliance.releases import Release, ReleaseOptions

    gpu = int(order["gpu"])
    limits = {"memory_max": 4 << 30, "cpu_weight": 100, "tasks_max": 1024} | order.get("limits", {})
    plan = ScopePlan(gpu, "probe", devices=tuple(order["devices"]), stop_seconds=5.0, **limits)
    argv = [sys.executable, "-P", __file__, "inside", json.dumps(order["inside"])]
    release = Release(
        name="probe", created="", model_name="probe", engine_version="0", python="", options=ReleaseOptions(),
        model_bytes=0, model="", linked=False, family="", dtype="", parameters=0,
    )  # fmt: skip
    env = environment(Paths(), order["uuid"], None)
    spec = EngineSpec(release, argv, env, Path("/run/none"), plan, [])
    os.environ.pop("JOURNAL_STREAM", None)  # else what `inside` prints would go to the journal
    before = oom_kills(gpu)
    words = LastWords()
    pid, channel = spawn_trampoline(spec, order["uid"], order["uid"], words.fd)
    started = answer({"op": "start", "name": plan.name, "pid": pid, "properties": plan.properties(), "timeout": 20.0})
    findings = check_scope(plan, own_cgroup(pid), started["unit"])
    channel.send(GO)
    _, status = os.waitpid(pid, 0)
    channel.setblocking(True)
    report = {
        "returncode": os.waitstatus_to_exitcode(status), "wrong": findings.wrong, "unknown": findings.unknown,
        "refused": channel.recv(1000).decode(errors="replace") if started["ok"] else "",
        "oom_kills": None if before is None else (oom_kills(gpu) or 0) - before,
    }  # fmt: skip
    print(json.dumps({"outside": report}), flush=True)
    return 0


def inside(order: dict[str, Any]) -> int:
    """What the kernel and the driver say to a process of that scope."""
    found: dict[str, Any] = {"cgroup": Path("/proc/self/cgroup").read_text().strip()}
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    names = ("Uid", "Gid", "Groups", "CapPrm", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp")
    found["status"] = {name: status[name].split() for name in names}
    found["memlock"] = next(
        line.split()[3] for line in Path("/proc/self/limits").read_text().splitlines() if "locked" in line
    )
    found["nodes"] = {node: opened(node) for node in order.get("nodes", [])}
    found["cuda"] = {name: driver(variables) for name, variables in order.get("cuda", {}).items()}
    print(json.dumps({"inside": found}), flush=True)
    if seconds := order.get("spin"):
        print(json.dumps({"spin": spin(float(seconds))}), flush=True)
    if order.get("hog"):
        hog(int(order["hog"]))
    return 0


def opened(node: str) -> str:
    """`opened`, or the name of the error."""
    try:
        os.close(os.open(node, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    return "opened"


def spin(seconds: float) -> dict[str, float]:
    """A busy loop: CPU time of this scope (cpu.stat, else of this process) over wall time."""
    group = Path("/sys/fs/cgroup") / Path("/proc/self/cgroup").read_text().split("0::/", 1)[1].splitlines()[0]

    def used() -> float:
        try:
            return int((group / "cpu.stat").read_text().split()[1]) / 1e6
        except OSError:
            return time.process_time()

    cpu, wall = used(), time.monotonic()
    while time.monotonic() - wall < seconds:
        pass
    cpu, wall = used() - cpu, time.monotonic() - wall
    throttled = (group / "cpu.stat").read_text().split() if (group / "cpu.stat").exists() else []
    periods = {name: int(value) for name, value in zip(throttled[::2], throttled[1::2]) if name.startswith("nr_")}
    return {"cpu_seconds": round(cpu, 4), "wall_seconds": round(wall, 4), "share": round(cpu / wall, 4), **periods}


def hog(most_mib: int) -> None:
    """Takes memory 8 MiB at a time and says how much it has; the limit ends it."""
    kept = []
    for taken in range(8, most_mib + 1, 8):
        kept.append(bytearray(os.urandom(1)) * (8 * MIB))
        print(json.dumps({"hog_mib": taken}), flush=True)


def driver(variables: dict[str, str | None]) -> dict[str, Any]:
    """`driver_sees` in a process of its own, with these variables set (None: taken away)."""
    env = {key: value for key, value in (os.environ | variables).items() if value is not None}
    done = subprocess.run(
        [sys.executable, "-P", __file__, "driver", "{}"], env=env, capture_output=True, text=True, timeout=60
    )
    lines = done.stdout.splitlines()
    return json.loads(lines[-1]) if lines else {"returncode": done.returncode, "error": done.stderr[-600:]}


def driver_sees() -> dict[str, Any]:
    """CUDA's devices by UUID, and on the first one: memory set on the device, read back through pinned memory."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"error": str(error)}
    seen: dict[str, Any] = {"cuInit": cuda.cuInit(0), "uuids": []}
    count, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    if seen["cuInit"] != 0:
        return seen
    cuda.cuDeviceGetCount(ctypes.byref(count))
    for index in range(count.value):
        uuid = (ctypes.c_ubyte * 16)()
        cuda.cuDeviceGet(ctypes.byref(device), index)
        cuda.cuDeviceGetUuid_v2(uuid, device)
        text = bytes(uuid).hex()
        parts = (text[:8], text[8:12], text[12:16], text[16:20], text[20:])
        seen["uuids"].append("GPU-" + "-".join(parts))
    if not count.value:
        return seen
    words = 16 * MIB
    pointer, host = ctypes.c_uint64(), ctypes.c_void_p()
    cuda.cuDeviceGet(ctypes.byref(device), 0)
    calls: dict[str, Callable[[], int]] = {
        "cuDevicePrimaryCtxRetain": lambda: cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        "cuCtxSetCurrent": lambda: cuda.cuCtxSetCurrent(context),
        "cuMemAlloc": lambda: cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(4 * words)),
        "cuMemHostAlloc": lambda: cuda.cuMemHostAlloc(ctypes.byref(host), ctypes.c_size_t(4 * words), 0),
        "cuMemsetD32": lambda: cuda.cuMemsetD32_v2(pointer, ctypes.c_uint(0x5EED1234), ctypes.c_size_t(words)),
        "cuMemcpyDtoH": lambda: cuda.cuMemcpyDtoH_v2(host, pointer, ctypes.c_size_t(4 * words)),
    }
    for name, call in calls.items():
        seen[name] = call()
        if seen[name] != 0:
            return seen
    values = (ctypes.c_uint * words).from_address(host.value or 0)
    seen["right"] = values[0] == values[words // 2] == values[words - 1] == 0x5EED1234
    return seen


def main() -> int:
    role, order = sys.argv[1], json.loads(sys.argv[2])
    if role == "outside":
        return outside(json.loads(Path(order["file"]).read_text()))
    if role == "inside":
        return inside(order)
    print(json.dumps(driver_sees()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
