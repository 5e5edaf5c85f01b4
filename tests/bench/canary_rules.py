"""How long the canary's rules take to change, in a network namespace of its own: `python -m tests.bench.canary_rules`.

Needs root. A rollback is timed from the call to the moment the kernel has taken the transaction of the family, which is
when the first new connection can no longer come to the canary; the read-back after it is timed as well. Once on an
empty host, once beside rules of others.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from appliance import command
from canary.netfilter.apply import Netfilter

_CLONE_NEWNET = 0x40000000


class Timed:
    """Runs the programs, and remembers when each restore had ended."""

    def __init__(self) -> None:
        self.restored: list[float] = []

    def __call__(self, argv: Sequence[str], **options: Any) -> command.Result:
        result = command.run(argv, **options)
        if "--noflush" in argv:
            self.restored.append(time.perf_counter())
        return result


def measure(rounds: int, folder: Path) -> dict[str, list[float]]:
    """Milliseconds of each round."""
    timed = Timed()
    netfilter = Netfilter(timed, lock=folder / "netfilter")
    found: dict[str, list[float]] = {name: [] for name in ("step", "IPv4 at 0", "both at 0", "read back", "tick")}
    for number in range(rounds):
        start = time.perf_counter()
        netfilter.set_weight("bench", 5 + number % 50)
        found["step"].append(time.perf_counter() - start)
        timed.restored.clear()
        start = time.perf_counter()
        netfilter.set_weight("bench", 0)
        found["read back"].append(time.perf_counter() - start)
        found["IPv4 at 0"].append(timed.restored[0] - start)
        found["both at 0"].append(timed.restored[1] - start)
        start = time.perf_counter()
        assert netfilter.repair() == []
        found["tick"].append(time.perf_counter() - start)
    return {name: [1000 * value for value in values] for name, values in found.items()}


def crowd(rules: int) -> None:
    """Rules of others, in chains of their own."""
    for program, address in (("iptables-restore", "10.0.{}.{}/32"), ("ip6tables-restore", "fd00::{}:{}/128")):
        lines = [f"-A OTHERS -p tcp -s {address.format(n // 250, n % 250)} -j RETURN" for n in range(rules // 2)]
        text = "".join(f"*{table}\n:OTHERS - [0:0]\n" + "\n".join(lines) + "\nCOMMIT\n" for table in ("nat", "filter"))
        command.check(command.run([program, "--noflush"], timeout=60, stdin=text.encode()), "rules of others")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--rules", type=int, default=2000, help="of others, per family")
    args = parser.parse_args()
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise SystemExit(f"no network namespace: {os.strerror(ctypes.get_errno())}")
    command.check(command.run(["ip", "link", "set", "lo", "up"], timeout=10), "lo")
    print("| rules of others | | median ms | 99 % | worst |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for others in (0, args.rules):
            if others:
                crowd(others)
            for name, values in measure(args.rounds, Path(folder)).items():
                edge = statistics.quantiles(values, n=100)[98]
                print(f"| {others} | {name} | {statistics.median(values):.1f} | {edge:.1f} | {max(values):.1f} |")


if __name__ == "__main__":
    main()
