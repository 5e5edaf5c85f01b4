"""Network namespaces for tests: a server's and a client's, joined by a veth pair, with real netfilter in each.

    with Pair() as pair:
        pair.server.run(["iptables", "-P", "INPUT", "DROP"])
        with pair.server.program("serve", "--name", "stable", "--port", "8000") as stable: ...

A namespace lives as long as its holder, a process that dies with the test process. Needs root (marker netns).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from appliance import command
from tests.programs import need

CHECKOUT = Path(__file__).resolve().parents[2]
SERVER, SERVER6, SECOND = "10.77.0.1", "fd77::1", "10.77.0.9"
CLIENTS = [f"10.77.0.{n}" for n in range(20, 36)]
CLIENTS6 = [f"fd77::{n:x}" for n in range(20, 36)]
STRANGER = "10.78.0.2"  # a client from another network, reached by the same wire
_PR_SET_PDEATHSIG = 1


def require_netns() -> None:
    """Skips (in CI: fails) where this machine cannot have them."""
    if os.geteuid() != 0:
        pytest.skip("needs root: network namespaces")
    packages = {"ip": "iproute2", "nsenter": "util-linux", "iptables-nft": "iptables", "nft": "nftables"}
    for program, package in {**packages, "conntrack": "conntrack"}.items():
        need(program, package)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Program:
    """tests/canary/traffic.py in a namespace."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT, preexec_fn=_die_with_parent
        )
        self.result: dict[str, Any] = {}

    def line(self, seconds: float = 60.0) -> dict[str, Any]:
        """The next line it prints."""
        assert self._process.stdout
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            raise AssertionError(f"no word from {self._process.args} in {seconds} s")
        text = self._process.stdout.readline()
        assert text, f"{self._process.args} ended with {self._process.wait()}"
        return dict(json.loads(text))

    def counts(self) -> dict[str, Any]:
        """What it counted so far."""
        assert self._process.stdin
        self._process.stdin.write("?\n")
        self._process.stdin.flush()
        return self.line()

    def stop(self) -> dict[str, Any]:
        """Ends it orderly; what it counted."""
        assert self._process.stdin
        self._process.stdin.close()
        self.result = self.line()
        assert self._process.wait(30) == 0
        return self.result

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.stdout.close()


class Namespace:
    """One network namespace."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sleep", "infinity"], stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent
        )
        self.proc = Path(f"/proc/{self._holder.pid}")
        self._wait_for_own()
        self.run(["ip", "link", "set", "lo", "up"])

    def _wait_for_own(self) -> None:
        mine, deadline = os.readlink("/proc/self/ns/net"), time.monotonic() + 10
        while os.readlink(self.proc / "ns/net") == mine:
            assert time.monotonic() < deadline and self._holder.poll() is None, "unshare --net failed"
            time.sleep(0.005)

    def argv(self, argv: Sequence[str]) -> list[str]:
        return ["nsenter", f"--net={self.proc}/ns/net", *argv]

    def runner(self, argv: Sequence[str], **options: Any) -> command.Result:
        """appliance/command.py:Runner, inside."""
        result = command.run(self.argv(argv), **options)
        return command.Result(tuple(argv), *(getattr(result, name) for name in command.Result.__slots__[1:]))

    def run(self, argv: Sequence[str], check: bool = True) -> command.Result:
        result = self.runner(argv, timeout=30)
        assert result.ok or not check, f"{argv}: {result.stderr.decode()}"
        return result

    def sh(self, script: str) -> str:
        """Shell lines, as an admin types them; the first that fails fails."""
        return self.run(["sh", "-euc", script]).text

    @contextlib.contextmanager
    def program(self, *arguments: str) -> Iterator[Program]:
        """tests/canary/traffic.py, ready."""
        program = Program(self.argv([sys.executable, "-m", "tests.canary.traffic", *arguments]))
        try:
            program.line()
            yield program
        finally:
            program.kill()

    def burst(self, connections: int, *arguments: str) -> dict[str, Any]:
        """So many new connections, a request each; what happened."""
        program = Program(
            self.argv(
                [sys.executable, "-m", "tests.canary.traffic", "load", "--connections", str(connections), *arguments]
            )
        )
        try:
            return program.line(300)
        finally:
            program.kill()

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()


class Pair:
    """`server` (10.77.0.1, .9, fd77::1) and `client` (16 addresses of each family, and one of another network)."""

    def __init__(self) -> None:
        self.server, self.client = Namespace(), Namespace()

    def __enter__(self) -> Pair:
        peer = str(self.client.proc.name)
        self.server.run(["ip", "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", peer])
        # nodad: an IPv6 address can be used at once.
        server = [f"{SERVER}/24", f"{SECOND}/24", "10.78.0.1/24", f"{SERVER6}/64"]
        client = [*(f"{address}/24" for address in CLIENTS), f"{STRANGER}/24", *(f"{each}/64" for each in CLIENTS6)]
        for namespace, addresses in ((self.server, server), (self.client, client)):
            nodad = {address: " nodad" if ":" in address else "" for address in addresses}
            lines = [f"address add {address} dev wire{flag}" for address, flag in nodad.items()]
            namespace.sh("ip -batch - <<'E'\n" + "\n".join([*lines, "link set wire up"]) + "\nE\n")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.close()
        self.client.close()
