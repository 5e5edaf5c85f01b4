"""What the watchdog costs while nothing happens: CPU time and memory. In the box, as root.

`python -m tests.bench.watchdog_idle [--json] [--seconds 60]`. The shipped units and the shipped policy (NVML read every
30 s, engines asked every 5 s, golden answers every 600 s), two CPU engines with a release, a script in NVML's place.
  CPU     % of one core over --seconds: the whole unit (cpu.stat of its cgroup: the service, the NVML child, errands),
          between two comparisons of golden answers; and seconds of CPU of one comparison of both engines, which
          comes every 600 s
  PSS     smaps_rollup, MiB: the service, and the child that stands in for NVML's; apart from them the child that
          imports pynvml, on a host without a driver
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from engine.spawn import python_env
from healthcheck.nvml import child_command
from tests.healthcheck import box_world
from tests.host.appliance_box import PYTHON, why_not_here
from tests.host.box import BOX, why_no_box
from tests.host.roots import root_filesystem

FIRST_GOLDEN_SECONDS = 25.0  # healthcheck/engine_probe.py compares each engine soon after it is ready
DROP_IN = f"[Service]\nExecStart=\nExecStart={PYTHON} -P -m healthcheck --scripted-nvml {box_world.SCRIPT}\n"


def pss_mib(pid: int | str) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return round(int(next(line for line in lines if line.startswith("Pss:")).split()[1]) / 1024, 1)


class Unit:
    """The watchdog's cgroup, as this machine shows it."""

    def __init__(self, one: box_world.World) -> None:
        self._group = one.box.cgroup / "appliance.slice" / box_world.WATCHDOG

    def cpu_seconds(self) -> float:
        lines = (self._group / "cpu.stat").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("usage_usec ")).split()[1]) / 1e6

    def pss(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for pid in (self._group / "cgroup.procs").read_text().split():
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            found[words[words.index("-m") + 1]] = pss_mib(pid)
        return found


def nvml_child_mib() -> float | None:
    """PSS of the real NVML child after a reading; None where nvidia-ml-py is not installed."""
    if importlib.util.find_spec("pynvml") is None:
        return None
    pipe = subprocess.PIPE
    with subprocess.Popen(child_command(), stdin=pipe, stdout=pipe, text=True, env=python_env()) as child:
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write('{"id":1,"op":"read","known":{},"skip":[]}\n')
            child.stdin.flush()
            while (line := child.stdout.readline()) and "done" not in json.loads(line):
                pass
            return pss_mib(child.pid) if line else None
        finally:
            child.kill()


def look(one: box_world.World, *words: str) -> None:
    """Status 3 is fine: a box has no kernel log, which is unknown."""
    done = one.box.run([PYTHON, "-P", "-m", "healthcheck.cli", "check", *words], check=False)
    assert done.returncode in (0, 3), done.stdout + done.stderr


def measure(seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, box_world.world(root_filesystem(BOX), Path(folder)) as one:
        one.paths.healthcheck_config.unlink()
        one.box.write(f"/etc/systemd/system/{box_world.WATCHDOG}.d/test.conf", DROP_IN)
        one.box.run(["systemctl", "daemon-reload"])
        one.box.run(["systemctl", "start", box_world.WATCHDOG], timeout=60)
        unit = Unit(one)
        time.sleep(FIRST_GOLDEN_SECONDS)
        look(one)
        began, before = time.monotonic(), unit.cpu_seconds()
        time.sleep(seconds)
        spent, took = unit.cpu_seconds() - before, time.monotonic() - began
        pss = unit.pss()
        before = unit.cpu_seconds()
        look(one, "--golden")
        golden = unit.cpu_seconds() - before
    return {
        "bench": "watchdog_idle",
        "seconds": round(took, 1),
        "cpu_percent": round(100 * spent / took, 3),
        "golden_cpu_seconds": round(golden, 2),
        "cpu_percent_with_golden": round(100 * (spent / took + golden / 600), 3),
        "pss_mib": pss,
        "pss_mib_total": round(sum(pss.values()), 1),
        "pss_mib_nvml_child": nvml_child_mib(),
    }


def show(result: dict[str, Any]) -> None:
    if reason := result.get("skipped"):
        print(f"idle watchdog: not measured: {reason}")
        return
    print(f"idle watchdog, two GPUs, {result['seconds']} s")
    print(f"  CPU {result['cpu_percent']} % of a core, {result['cpu_percent_with_golden']} % with golden answers every "
          f"600 s ({result['golden_cpu_seconds']} s each time)")  # fmt: skip
    parts = ", ".join(f"{name} {mib}" for name, mib in result["pss_mib"].items())
    print(f"  PSS {result['pss_mib_total']} MiB ({parts}); NVML child with pynvml {result['pss_mib_nvml_child']} MiB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    reason = why_no_box() or why_not_here()
    result = {"bench": "watchdog_idle", "skipped": reason} if reason else measure(args.seconds)
    if not args.json:
        show(result)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
