"""What the stack costs without a model: time until all of it is up, and its idle memory. In the box, as root.

`python -m tests.bench.bench_host [--json] [--times 5]`. The shipped units, backend "cpu", no release, 1 and 3 slots.
  up      seconds from `systemctl start appliance.target` until it returns, with every unit active (launchers and
          gateways have said READY); the best of --times, and the CPU seconds that launchers and gateways had used
  PSS     smaps_rollup of launchers and gateways, MiB, twenty seconds later; per further GPU: (3 slots - 1 slot) / 2
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from tests.host.appliance_box import BIND, install, stop, units, why_not_here
from tests.host.box import BOX, Box, why_no_box
from tests.host.roots import root_filesystem

SLOTS = (1, 3)
SETTLE_SECONDS = 20.0
# Every process of a unit: a gateway with workers has several.
READ = r"""
for unit in "$@"; do
    group=/sys/fs/cgroup$(systemctl show --property=ControlGroup --value -- "$unit")
    for pid in $(cat "$group/cgroup.procs"); do
        awk -v unit="$unit" '/^Pss:/ { print unit, "pss", $2 }' "/proc/$pid/smaps_rollup"
        awk -v unit="$unit" -v hz="$(getconf CLK_TCK)" '{ print unit, "cpu", ($14 + $15) / hz }' "/proc/$pid/stat"
    done
done
"""


def read(box: Box, names: tuple[str, ...], key: str) -> dict[str, float]:
    """Unit -> sum of `key` over its processes: "pss" in KiB, "cpu" in seconds."""
    found = dict.fromkeys(names, 0.0)
    for line in box.run(["bash", "-euc", READ, "read", *names]).stdout.splitlines():
        unit, what, value = line.split()
        if what == key:
            found[unit] += float(value)
    return found


def start(box: Box, names: tuple[str, ...]) -> float:
    """Seconds, with the few milliseconds that it takes to enter the box."""
    began = time.perf_counter()
    box.run(["systemctl", "start", "appliance.target"], timeout=120)
    seconds = time.perf_counter() - began
    states = {name: box.show(name, "ActiveState", "StatusText") for name in names}
    assert all(state["ActiveState"] == "active" for state in states.values()), states
    return seconds


def measure_slots(slots: int, times: int) -> dict[str, Any]:
    with Box(root_filesystem(BOX), bind=BIND, network=False) as box:
        install(box, slots=slots)
        names = units(slots)
        processes = names[1:]
        box.run(["systemctl", "enable", *names])
        taken, cpu = [], 0.0
        for _ in range(times):
            taken.append(start(box, names))
            cpu = sum(read(box, processes, "cpu").values())
            stop(box)
            box.run(["systemctl", "reset-failed"])  # starts that follow each other are limited
        start(box, names)
        time.sleep(SETTLE_SECONDS)
        pss = {name: round(kib / 1024, 1) for name, kib in read(box, processes, "pss").items()}
    return {
        "up_seconds": [round(seconds, 2) for seconds in taken],
        "up_seconds_best": round(min(taken), 2),
        "cpu_seconds": round(cpu, 2),
        "pss_mib": pss,
        "pss_mib_total": round(sum(pss.values()), 1),
    }


def measure(times: int) -> dict[str, Any]:
    result: dict[str, Any] = {"bench": "host"}
    for slots in SLOTS:
        result[f"{slots} slots"] = measure_slots(slots, times)
    one, three = (result[f"{slots} slots"]["pss_mib_total"] for slots in SLOTS)
    result["pss_mib_per_further_gpu"] = round((three - one) / (SLOTS[1] - SLOTS[0]), 1)
    return result


def show(result: dict[str, Any]) -> None:
    if reason := result.get("skipped"):
        print(f"host: not measured: {reason}")
        return
    print("host, no release, backend cpu")
    for slots in SLOTS:
        row = result[f"{slots} slots"]
        took = f"up in {row['up_seconds_best']} s ({row['cpu_seconds']} s of CPU)"
        print(f"  {slots} slot(s): {took}, launchers and gateways {row['pss_mib_total']} MiB PSS")
    print(f"  each further GPU: {result['pss_mib_per_further_gpu']} MiB PSS")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    reason = why_no_box() or why_not_here()
    result = {"bench": "host", "skipped": reason} if reason else measure(args.times)
    if not args.json:
        show(result)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
