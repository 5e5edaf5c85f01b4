"""A GPU that breaks and is repaired, on a real one: with its own NVML and its own engines, a bit of whose weights turns
over. Only the reset is our stand-in for nvidia-smi (tests/healthcheck/nvidia_smi), which does nothing to the GPU.
gpu_host.py calls this.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tests.host.box import CHECKOUT
from tests.host.gpu_record import Record
from tests.host.gpu_world import PYTHON, World

WATCHDOG = "appliance-watchdog.service"
SMI = "/var/lib/appliance/nvidia-smi"
LEDGER, EVENTS = "/var/lib/appliance/gpus.json", "/var/lib/appliance/events.jsonl"
# How soon a fault is noticed is no part of what is measured; probation keeps its share for a moment only.
POLICY = """
schema = 1
[limits]
probe_interval = 2.0
golden_interval = 2.0
heartbeat_interval = 2.0
[timeouts]
probation = 1.0
mute_after_reset = 1.0
[attempts]
resets = 20
resets_per_week = 20
"""
REPAIRED = ("STOPPING", "RESETTING", "WARMUP", "VERIFY")  # hold -> stop -> reset -> start -> warm-up -> verify
LIMIT_SECONDS = 10.0  # of all of them, for a small model
CHECKSUM_MS = 6.0  # for 15 GB

_ASK = """
import json, sys, time
from pathlib import Path
from appliance.engine_calls import EngineCalls
socket, what, times = sys.argv[1], sys.argv[2], int(sys.argv[3])
engine, seen, took = EngineCalls(Path(socket)), {}, []
size = engine.state()["engine"]["weights_bytes"]
for n in range(times):
    began = time.perf_counter()
    if what == "golden":
        answer = engine.golden([1 + 7 * k % 200 for k in range(64)])
    elif what == "checksum":
        answer = engine.checksum()
    else:
        answer = engine._control("flip", {"offset": size // 2 | 1, "bit": 6}, {})
    took.append(1000 * (time.perf_counter() - began))
    key = json.dumps(answer, sort_keys=True)
    seen[key] = seen.get(key, 0) + 1
took.sort()
print(json.dumps({"weights_bytes": size, "answers": [[json.loads(key), count] for key, count in seen.items()],
                  "ms": {"least": took[0], "p50": took[len(took) // 2], "most": took[-1]}}))
"""


def ask(world: World, gpu: int, what: str, times: int = 1) -> dict[str, Any]:
    """`what`: "golden", "checksum", or "flip": bit 6 of a byte in the middle of the weights. From within the box."""
    words = [PYTHON, "-P", "-c", _ASK, world.engine(gpu)["socket"], what, str(times)]
    answer: dict[str, Any] = json.loads(world.box.run(words, timeout=180).stdout)
    return answer


def exact(world: World, record: Record, golden_runs: int) -> None:
    """The golden probe so often: one hash; the checksum: its time."""
    golden = ask(world, 0, "golden", golden_runs)
    record.check(f"{golden_runs} golden probes, one hash ({world.release})", len(golden["answers"]) == 1, **golden)
    checksum = ask(world, 0, "checksum", 50)
    ((answer, _),) = checksum["answers"]
    # Over HTTP and between the steps of an engine that has nothing to do: more than the kernels take.
    record.check(f"checksum ({world.release})", answer["ok"], limit_ms_for_15_gb=CHECKSUM_MS, **checksum)


def watchdog(world: World, record: Record) -> None:
    """Starts it, with NVML as it is on this machine, and engines that let a bit be turned over."""
    box = world.box
    box.write(SMI, (CHECKOUT / "tests/healthcheck/nvidia_smi").read_text())
    box.run(["chmod", "755", SMI])
    gpus = [
        {"uuid": slot.uuid, "pci": f"00000000:{27 + slot.gpu:02X}:00.0", "persistence": True,
         "recovery_action": "Reset"}
        for slot in world.slots
    ]  # fmt: skip
    box.write(f"{SMI}.json", json.dumps({"gpus": gpus, "clients": [], "calls": [], "on_reset": []}))
    box.write("/etc/default/appliance", f"APPLIANCE_NVIDIA_SMI={SMI}\n")
    box.write("/etc/appliance/healthcheck.toml", POLICY)
    began = time.monotonic()
    box.run(["systemctl", "restart", WATCHDOG], timeout=120)
    document = world.until(lambda: _looked(world), 60, "the watchdog has not looked at every GPU")
    shown = box.run(["/usr/bin/healthcheck", "check", "--json"], check=False).stdout
    record.check(
        "watchdog looks at every GPU", document["nvml"] == "on" or world.backend == "cpu", nvml=document["nvml"],
        seconds=round(time.monotonic() - began, 2), check=shown[-20_000:],
    )  # fmt: skip
    pids = [int(pid) for pid in box.read(f"/sys/fs/cgroup/appliance.slice/{WATCHDOG}/cgroup.procs").split()]
    memory = {pid: world.pss_mib(pid) for pid in pids}
    record.check("watchdog's memory, MiB PSS", sum(memory.values()) <= 60, processes=memory)


def _looked(world: World) -> dict[str, Any] | None:
    done = world.box.run(["/usr/bin/healthcheck", "status", "--json"], check=False)
    try:
        document: dict[str, Any] = json.loads(done.stdout)
        rows = document["gpus"]
    except (ValueError, KeyError):
        return None
    return (
        document
        if len(rows) == len(world.slots) and all(world.release in json.dumps(row["checks"]) for row in rows)
        else None
    )


def repair(world: World, record: Record, limit: float | None) -> None:
    """A bit of GPU 0's weights turns over; the watchdog finds it, and the GPU comes back. `limit`: seconds of
    REPAIRED; None: they are only told."""
    box = world.box
    world.until(lambda: _healthy(world), 60, "GPU 0 is not healthy to begin with")
    seen = len(box.read(EVENTS).splitlines())
    pid = world.engine(0)["pid"]
    flipped = ask(world, 0, "flip")
    began = time.monotonic()
    world.until(lambda: (now := _ledger(world)) and now["state"] != "HEALTHY", 60, "the flip was not noticed")
    noticed = time.monotonic() - began
    state = world.until(lambda: _healthy(world), 120, "GPU 0 is not healthy again")
    took = time.monotonic() - began
    events = [json.loads(line) for line in box.read(EVENTS).splitlines()[seen:]]
    way = [event["after"] for event in events if event["event"] == "watchdog_transition" and event["gpu"] == 0]
    document = _looked(world) or {"gpus": [{}]}
    phases = document["gpus"][0].get("phases", {})
    spent = sum(seconds for name, seconds in phases.items() if name in REPAIRED)
    resets = [event["detail"] for event in events if event["event"] == "watchdog_reset"]
    good = all(name in way for name in (*REPAIRED, "PROBATION", "HEALTHY")) and world.engine(0)["pid"] != pid
    record.check(
        f"a turned bit is found and repaired ({world.release})", good and (limit is None or spent <= limit),
        repaired_seconds=round(spent, 2), limit=limit, phases=phases, noticed_after=round(noticed, 2),
        healthy_after=round(took, 2), way=way, reset=resets, flip=flipped["answers"], state=state,
    )  # fmt: skip


def _ledger(world: World) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(world.box.read(LEDGER))["gpus"][0]
    return row


def _healthy(world: World) -> dict[str, Any] | None:
    row = _ledger(world)
    return row if row["state"] == "HEALTHY" and world.engine(0).get("admitted") else None


def another_release(world: World, record: Record, name: str, model: Path | str) -> None:
    """Of another model, and into service: what follows is measured with that."""
    world.appliance("model", "add", str(model), "--name", name, "--link", "-q")
    words = ("--model", name, "--model-name", world.model_name, "--link", "-q")
    world.appliance("release", "add", name, *words, timeout=150)
    world.appliance("release", "use", name, "--wait", "-q", timeout=150)
    world.release = name
    for slot in world.slots:
        record.figure(f"engine of gpu{slot.gpu} ({name})", world.until_admitted(slot.gpu))
