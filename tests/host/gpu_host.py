"""The host part on a real GPU machine, in the namespace box: python3 -m tests.host.gpu_host --root DIR --bundle FILE
--model DIR --results DIR. Root, Python 3.11 or newer, no network; needs nothing of systemd on the machine itself.

Boots the root as a box with the machine's GPUs and driver in it, installs the bundle with the collection's code and the
units as they are shipped, binds two GPUs, adds a release (golden answers: two GPUs, every bit), serves it, and then
looks and measures: gpu_checks.py; at the end a GPU breaks and is repaired: gpu_repair.py. `--backend cpu` is the
rehearsal: the same way with CPU slots and a tiny model.
Writes RESULTS/host-*.json; exit status 1 if a check failed. Nothing stops half way: see gpu_record.py.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.host import gpu_checks as checks
from tests.host import gpu_repair as repair
from tests.host.box import CHECKOUT, Box
from tests.host.gpu_record import Record
from tests.host.gpu_sandbox import cuda_works, drop_in, probe, search
from tests.host.gpu_world import DRIVER, MODEL, Slot, World, collect_driver, find_driver, unpack_wheels

SECONDS = 300.0
BOOT_SECONDS = 180.0  # the rehearsal may run under emulation
SMALL = "/srv/small-model-of-the-host"
GRANTED, DENIED = "/dev/nvidia6", "/dev/nvidia7"  # of a rehearsal: no driver is behind them
ENGINE: dict[str, dict[str, Any]] = {
    "cuda": {"max_model_len": 4096, "drain_timeout": 20},
    "cpu": {"max_model_len": 1024, "drain_timeout": 20, "arguments": ["--threads", "1", "--kv-tokens", "16384"]},
}
LOAD = {"cuda": (16, 600), "cpu": (6, 800)}  # streams, tokens of each
TOO_LITTLE = {"cuda": "96M", "cpu": "48M"}  # for an engine to start in


def card() -> list[dict[str, str]]:
    fields = "index,name,uuid,pci.bus_id,driver_version,memory.total,persistence_mode,mig.mode.current"
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"], capture_output=True, text=True, timeout=60
        )
    except OSError:
        return []
    rows = [[value.strip() for value in line.split(",")] for line in answer.stdout.splitlines()]
    names = fields.split(",")
    return [dict(zip(names, row)) if len(row) == len(names) else {"said": ", ".join(row)} for row in rows]


def wake_gpus(stack: ExitStack, record: Record) -> None:
    """CUDA once on the machine itself, which makes the nodes and the UUIDs; then the GPUs are held open, which is all
    that nvidia-persistenced does (the box has none)."""
    command = [sys.executable, str(CHECKOUT / "tests/host/gpu_probe.py"), "driver", "{}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    record.figure("CUDA on the machine itself", (done.stdout + done.stderr)[-2000:])
    nodes = sorted(Path("/dev").glob("nvidia[0-9]*"))
    for node in nodes:
        stack.callback(os.close, os.open(node, os.O_RDWR | os.O_CLOEXEC))
    record.figure("held open for the time of the run", [str(node) for node in nodes])


def compute_processes(world: World, record: Record) -> None:
    """Which process has which GPU, by nvidia-smi; and the engines' processes, as this machine counts them."""
    query = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader"]
    shown = subprocess.run(query, capture_output=True, text=True, timeout=60).stdout.splitlines()
    inside = {slot.uuid: world.scope(slot.gpu).removeprefix("/sys/fs/cgroup/") for slot in world.slots}
    engines = {uuid: (world.box.cgroup / group / "cgroup.procs").read_text().split() for uuid, group in inside.items()}
    record.figure("compute processes", {"nvidia-smi": shown, "engines": engines})


def commit() -> str:
    """Of the checkout; of an archive of it, what git wrote into tests/bench/COMMIT."""
    if (CHECKOUT / ".git").exists():
        command = ["git", "describe", "--always", "--dirty"]
        return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True).stdout.strip() or "unknown"
    return (CHECKOUT / "tests/bench/COMMIT").read_text().strip()


def machine() -> dict[str, Any]:
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "commit": commit(),
        "kernel": platform.release(), "cpus": len(os.sched_getaffinity(0)), "memory": memory.split(":")[1].strip(),
        "python": platform.python_version(), "cards": card(), "command": sys.argv[1:],
    }  # fmt: skip


class Run:
    """One run; each method is a part of it."""

    def __init__(self, args: argparse.Namespace, record: Record, work: Path) -> None:
        self.args, self.record, self.work = args, record, work
        self.engine = ENGINE[args.backend]
        self.requests: list[dict[str, Any]] = []
        self.reference: dict[str, Any] = {}

    # -- the box
    def box(self) -> Box:
        bind: list[Any] = [
            (CHECKOUT / "tests", "/opt/tests/tests"),
            (CHECKOUT / "ansible", "/opt/collections/ansible_collections/appliance/host"),
            (self.args.bundle, "/opt/bundle.tar"), (self.args.model, MODEL),
        ]  # fmt: skip
        if self.args.small_model:
            bind.append((self.args.small_model, SMALL))
        if self.args.extra:
            self.record.figure("wheels of the benchmark", unpack_wheels(self.args.extra, self.work / "extra"))
            bind.append((self.work / "extra", "/opt/extra"))
        if self.args.backend == "cuda":
            source = find_driver()
            copied = collect_driver(source, self.work / "driver")
            self.record.figure("driver", {"from": str(source), "libraries": copied})
            bind.append((self.work / "driver", DRIVER))
        return Box(self.args.root, bind=bind, network=False, hostname="gpu-host")

    def driver(self, world: World) -> None:
        """As the driver's installer does: its libraries are known to the dynamic linker."""
        world.box.run(["mount", "--make-rshared", "/"])  # as on a host; credentials of units need it
        if self.args.backend == "cpu":
            for node in (GRANTED, DENIED):
                world.box.run(["mknod", "-m", "666", node, "c", "195", node[-1]])
            return
        world.box.write("/etc/ld.so.conf.d/nvidia.conf", f"{DRIVER}\n")
        world.box.run(["ldconfig"], check=False)  # the next line says whether it did what it should
        load = "import ctypes; ctypes.CDLL('libcuda.so.1'); print(open('/proc/driver/nvidia/version').read())"
        done = world.box.run(["/usr/bin/python3", "-c", load], check=False)
        nodes = world.box.run(["sh", "-c", "ls -l /dev/nvidia*; grep nvidia /proc/devices"], check=False).stdout
        self.record.check("driver in the box", done.returncode == 0, said=done.stdout + done.stderr, nodes=nodes)

    def install(self, world: World) -> None:
        result = world.install("/opt/bundle.tar")
        self.record.check("install", True, **result)
        same = world.units_as_shipped()
        self.record.check("units, sysusers and tmpfiles as shipped", all(same.values()), files=same)
        world.configure(self.engine, self.args.gpus)
        slots = world.bind()
        if self.args.backend == "cpu":
            world.slots = [Slot(slot.gpu, slot.uuid, (GRANTED,), "cpu") for slot in slots]
        told = len(slots) == self.args.gpus
        self.record.check(
            f"{self.args.gpus} GPUs bound",
            told,
            slots=[[slot.gpu, slot.uuid, slot.model, slot.nodes] for slot in slots],
        )
        world.box.run(["systemctl", "start", "appliance-gpu-nodes.service"], check=False)
        nodes = world.box.show("appliance-gpu-nodes.service", "Result", "ExecMainStatus")
        journal = world.box.journal("appliance-gpu-nodes.service", 20)
        self.record.check("appliance-gpu-nodes", nodes["Result"] == "success", **nodes, journal=journal)

    # -- the sandbox, before any engine
    def sandbox(self, world: World) -> None:
        for slot in world.slots:
            inside = checks.look(world, slot)
            found = probe(world, slot, inside)
            if self.args.backend == "cuda" and not cuda_works(found, slot) and slot == world.slots[0]:
                found = self.loosen(world, slot, inside, found)
            checks.devices(self.record, slot, found)
        if self.args.backend == "cpu":  # the kernel's own word for what the launchers' engines are granted: nothing
            world.slots = [Slot(slot.gpu, slot.uuid, (), slot.model) for slot in world.slots]

    def loosen(self, world: World, slot: Slot, inside: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
        """CUDA does not live in the sandbox as shipped: recorded as failed; with a drop-in the run goes on."""
        lines, tries = search(world, slot, inside)
        self.record.check("CUDA in the unit's sandbox as shipped", False, found=found, tries=tries, drop_in=lines)
        if lines is None:
            return found
        drop_in(world, lines)
        return probe(world, slot, inside, looser=lines)

    # -- the appliance
    def start(self, world: World) -> None:
        units = [f"appliance-gpu@{slot.gpu}.service" for slot in world.slots]
        units += ["appliance.target", "appliance-gateway@stable.service", "appliance-gateway@canary.service"]
        world.box.run(["systemctl", "enable", *units])
        began = time.monotonic()
        world.appliance("start")
        for unit in units:
            world.box.wait_for(unit)
        took = round(time.monotonic() - began, 2)
        self.record.check("all units up without a model", took < 10, seconds=took, units=units)
        checks.idle_memory(world, self.record, "no release")

    def release(self, world: World) -> None:
        for name, words in {
            "model add": ["model", "add", MODEL, "--name", "m", "--link", "-q"],
            "release add": [
                "release",
                "add",
                world.release,
                "--model",
                "m",
                "--model-name",
                world.model_name,
                "--link",
                "-q",
            ],
            "release use": ["release", "use", world.release, "-q"],
        }.items():
            began = time.monotonic()
            done = world.appliance(*words, timeout=150, check=False)
            took = round(time.monotonic() - began, 2)
            said = (done.stdout + done.stderr)[-3000:]
            if not self.record.check(name, done.returncode == 0, seconds=took, said=said):
                self.record.text(f"journal {name}", world.box.journal(lines=60))
        golden = world.box.run(["sh", "-c", f"cat /var/lib/appliance/releases/{world.release}/golden/*.json"]).stdout
        table = json.loads(golden)
        agreed = table["agreed"] == self.agreement()
        table["prompts"] = [
            {"name": p["name"], "tokens": len(p["prompt_ids"]), "sha256": p["sha256"]} for p in table["prompts"]
        ]
        both = self.args.backend == "cpu" or set(table["recorded_from"]) == {slot.uuid for slot in world.slots}
        self.record.check("golden answers agreed bit for bit", agreed and both, golden=table)
        for slot in world.slots:
            entry = world.until_admitted(slot.gpu)
            self.record.figure(f"engine of gpu{slot.gpu}", entry)

    def agreement(self) -> str:
        """Who agreed on the golden answers (appliance/golden_record.py); one GPU has only the CPU to ask."""
        if self.args.backend == "cpu":
            return "two-starts"
        return "two-gpus" if self.args.gpus > 1 else "cpu-oracle"

    def undisturbed(self, world: World) -> None:
        streams, tokens = self.args.load or LOAD[self.args.backend]
        self.requests = checks.bodies(world, streams, tokens)
        with world.load(self.requests) as result:
            pass
        self.reference = result
        whole = not result["errors"] and all(len(texts) == 1 for texts in result["texts"])
        different = len({text for texts in result["texts"] for text in texts})
        self.record.check(
            "undisturbed streams", whole and different == streams, **checks.shown(result), different=different
        )

    def allow_faults(self, world: World) -> None:
        """Engines whose weights can be turned over, from here on."""
        arguments = [*self.engine.get("arguments", []), "--allow-fault-injection"]
        world.configure(self.engine | {"arguments": arguments}, self.args.gpus)
        for slot in world.slots:
            world.box.run(["systemctl", "restart", f"appliance-gpu@{slot.gpu}"], timeout=120)
            world.until_admitted(slot.gpu)

    def repairs(self, world: World) -> None:
        """The watchdog's part: the large model's times are told, the small one's have a limit."""
        record = self.record
        record.part("fault injection", self.allow_faults, world, needs=30)
        record.part("exact", repair.exact, world, record, 100, needs=20)
        record.part("watchdog", repair.watchdog, world, record, needs=20)
        record.part("repair", repair.repair, world, record, None, needs=30)
        if self.args.small_model:
            record.part("small model", repair.another_release, world, record, "small", SMALL, needs=30)
            record.part("exact, small model", repair.exact, world, record, 1000, needs=25)
            limit = repair.LIMIT_SECONDS if self.args.backend == "cuda" else None
            record.part("repair, small model", repair.repair, world, record, limit, needs=25)

    def parts(self, world: World) -> None:
        """In this order; a part is left out where its time would not suffice."""
        record, backend = self.record, self.args.backend
        record.only = self.args.parts
        record.part("completion", checks.completion, world, record)
        record.part("the same bits", checks.same_bits, world, record)
        for slot in world.slots:
            record.part(f"scope of gpu{slot.gpu}", checks.scope, world, record, slot)
        if backend == "cuda":
            record.part("compute processes", compute_processes, world, record)
        record.part("idle memory", checks.idle_memory, world, record, "engines ready")
        record.part("operator", checks.operator_views, world, record)
        record.part("undisturbed", self.undisturbed, world)
        load = (self.reference, self.requests)
        seconds = 16.0 if backend == "cuda" else 8.0
        record.part("daemon-reload", checks.daemon_reload, world, record, *load, needs=15)
        if len(world.slots) > 1:  # the other one goes on
            record.part("kill", checks.kill, world, record, *load, needs=20)
            record.part("restart", checks.restart, world, record, *load, seconds, needs=30)
        record.part("memory of a scope", checks.memory_of_a_probe, world, record, needs=10)
        if len(world.slots) > 1:
            limited = (self.engine, TOO_LITTLE[backend])
            record.part("memory of an engine", checks.memory_of_an_engine, world, record, *load, *limited, needs=40)
        record.part("CPU quota", checks.cpu_quota, world, record, needs=10)
        record.part("bits at the end", checks.same_bits, world, record, " at the end")
        self.repairs(world)
        record.part("stop", checks.stop, world, record)
        if self.args.extra:
            record.part("gateway bench", checks.gateway_bench, world, record, 2.0, needs=40)

    def run(self) -> None:
        record = self.record
        with ExitStack() as stack:
            if self.args.backend == "cuda":
                record.part("wake the GPUs", wake_gpus, stack, record)
            began = time.monotonic()
            box = self.box().start(BOOT_SECONDS)
            stack.callback(box.stop)
            record.figure("boot_seconds", round(time.monotonic() - began, 2))
            record.figure("controllers", sorted(box.controllers))
            world = World(box, self.args.backend)
            try:
                for part in (self.driver, self.install, self.sandbox, self.start, self.release):
                    record.part(part.__name__, part, world)
                self.parts(world)
            finally:
                events = box.run(["tail", "-n", "60", "/var/lib/appliance/events.jsonl"], check=False).stdout
                record.text("events", events)
                record.text("journal", box.journal(lines=40))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="an unpacked root filesystem (tests/host/roots.py)")
    parser.add_argument("--bundle", type=Path, required=True, help="of `make bundle GPU=1`; its .debs are not used")
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face style directory; it is linked to")
    parser.add_argument("--small-model", type=Path, help="another, whose GPU is to be repaired within 10 s")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--extra", type=Path, help="wheels for Python 3.11 that bench_gateway needs: psutil")
    parser.add_argument("--backend", choices=list(ENGINE), default="cuda")
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=2, help="1: without what needs a second one")
    parser.add_argument("--load", type=int, nargs=2, metavar=("STREAMS", "TOKENS"), help="of the runs under load")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="of those after `release`; default: all")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="parts that do not fit any more are left out")
    args = parser.parse_args()
    head = machine()
    args.results.mkdir(parents=True, exist_ok=True)
    stamp = head["date"].replace(":", "").replace("+0000", "Z")
    path = args.results / f"host-{args.backend}-{stamp}.json"
    record = Record(path, args.seconds, strict=args.backend == "cuda", **head)
    with tempfile.TemporaryDirectory(prefix="gpu-host-") as work:
        record.part("run", Run(args, record, Path(work)).run)
    failed = record.failed()
    record.say(f"{len(record.data['checks'])} checks, failed: {', '.join(failed) or 'none'}; {path}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
