"""Run in a network namespace of its own, as root: both gateways, rules that send a share of new connections to the
canary, and clients over IPv4 and IPv6. Prints what the kernel, the clients and the samples say.

`unshare -n python -m tests.appliance.gateway.redirected DIRECTORY CONNECTIONS`
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import aiohttp
import uvloop

from appliance.hostconfig import Gateway
from appliance.paths import Paths
from canary.marker import write_marker
from canary.probe import Target, probe_all, targets
from canary.samples import Samples

from .world import Host, fronted

SHARE = 0.3
FAMILIES = {"iptables": "127.0.0.1", "ip6tables": "[::1]"}


def command(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def redirect() -> None:
    command("ip", "link", "set", "lo", "up")
    for tool in FAMILIES:
        rule = ["-o", "lo", "-p", "tcp", "--syn", "--dport", "8000", "-m", "statistic", "--mode", "random"]
        rule += ["--probability", str(SHARE), "-j", "REDIRECT", "--to-ports", "8001"]
        command(tool, "-w", "5", "-t", "nat", "-A", "OUTPUT", *rule)


def counted() -> int:
    """Connections that the rules sent to the canary."""
    listed = [command(tool, "-t", "nat", "-nvxL", "OUTPUT") for tool in FAMILIES]
    return sum(int(found[1]) for text in listed for found in re.finditer(r"^ *(\d+) +\d+ +REDIRECT", text, re.M))


async def visit(address: str, port: int, times: int) -> Counter[str]:
    """New connections, each with a probe and a request."""
    seen: Counter[str] = Counter()
    for _ in range(times):
        async with aiohttp.ClientSession() as http:
            async with http.get(f"http://{address}:{port}/livez") as response:
                seen[response.headers["X-Appliance-Slot"]] += 1
            async with http.post(f"http://{address}:{port}/infer", json={}) as response:
                assert response.status == 200
                await response.read()
    return seen


async def main(directory: str, connections: int) -> None:
    host = Host(Paths.under(Path(directory)))
    redirect()
    for slot, release in (("stable", "r1"), ("canary", "r2")):
        host.point(slot, release)
        await host.engine(0, release)
    write_marker(host.paths, "1")
    options = {"host": "::", "canary_host": "::", "auth": "none", "port": 8000}
    async with fronted(host, **options), fronted(host, slot="canary", **options):
        samples = Samples(host.paths, releases={"stable": "r1", "canary": "r2"})
        seen: Counter[str] = Counter()
        for address in FAMILIES.values():
            seen += await visit(address, 8000, connections // 2)
        kernel = counted()
        direct = await visit("127.0.0.1", 8001, 20) + await visit("[::1]", 8001, 20)
        found = await asyncio.to_thread(samples.read)
        assert found.canary is not None and found.stable is not None and found.invalid is None
        listening = [str(target) for target in targets(Gateway(canary_host="::"), "canary")]
        through = await asyncio.to_thread(probe_all, [Target(a, 8000) for a in ("127.0.0.1", "::1")] * 20, 2.0)
    print(json.dumps({
        "kernel": kernel, "seen": seen, "direct": direct, "canary": found.canary.connections,
        "stable": found.stable.connections, "clients": [found.canary.clients, found.stable.clients],
        "requests": [found.canary.requests, found.stable.requests], "listening": listening,
        "probes": Counter(f"{probe.kind}/{probe.slot}" for probe in through),
    }))  # fmt: skip
    await host.close()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2])))
