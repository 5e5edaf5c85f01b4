"""Canary runs in the qemu machine. Clients come through its network card; the rule sees them there."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.ansible.vm_host import KEY, Host
from tests.canary import clients
from tests.canary.policies import toml
from tests.tiny import make_tiny_model

# What two emulated processors can fill in half a minute.
POLICY = {
    "steps": [50], "step_seconds": 15.0, "interval": 2.0, "warmup_seconds": 0.0, "error_rate": 0.05, "min_requests": 60,
    "min_connections": 10, "ttft_not_worse": False, "settle_seconds": 2.0, "cooldown": 0.0, "liveness_seconds": 20.0,
    "progress_deadline": 400.0,
}  # fmt: skip
SHARE = 0.2  # of the requests may take longer than the limit
_NETFILTER = "/usr/lib/appliance/current/venv/bin/python -P -m canary.netfilter"
# nft goes with the packages of the bundle; /tmp does not count as left over.
_KEEP_NFT = (
    "mkdir -p /tmp/nft && cp /usr/sbin/nft /tmp/nft/ && ldd /usr/sbin/nft | grep -o '/[^ ]*' | xargs -r cp -Lt /tmp/nft"
)


class Canary:
    def __init__(self, host: Host, directory: Path) -> None:
        self._host, self._vm, self._directory = host, host.vm, directory

    def policy(self, seconds: float) -> None:
        """A fifth of the requests may take longer."""
        text = toml(POLICY | {"limits": [{"metric": "request", "seconds": seconds, "share": SHARE}]})
        print(f"policy of the emulated machine: {text}")
        self._vm.write("/etc/appliance/canary.toml", text)

    def add(self, name: str, **model: Any) -> None:
        made = make_tiny_model(self._directory / name, seed=zlib.crc32(name.encode()), **model)
        self._vm.copy(made, f"/root/models/{name}")
        self._vm.run(f"appliance model add /root/models/{name} --quiet", timeout=300)
        self._vm.run(f"appliance release add {name} --model {name} --model-name tiny --quiet", timeout=600)

    def run(self, words: str, timeout: float = 120.0, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = self._vm.run(f"canary {words}", check=check, timeout=timeout)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.run("status --json", check=False).stdout))

    def start(self, release: str, tokens: int = 16) -> tuple[int, dict[str, Any], dict[str, int]]:
        """(exit code, the run when it is over, the ends of the clients' requests, of so many tokens each)."""
        with self.load(tokens) as ends:
            done = self.run(f"start {release} --wait --json", timeout=900, check=False)
        run = json.loads(done.stdout)["run"]
        took = {result["weight"]: result["seconds"] for result in run["results"]}
        print(f"{release}: {run['phase']} ({run['reason']}); steps {took}; {ends}")
        return done.returncode, run, ends

    def hold(self, release: str, weight: float, timeout: float = 600.0) -> None:
        """Starts a run that stays at its first step, and waits until the rule has this weight."""
        deadline = time.monotonic() + timeout
        self.run(f"start {release} --step-time 30m")
        while self.weight() != weight:
            run = self.status()["run"]
            assert time.monotonic() < deadline, run
            if run["stage"] == "over":  # an emulated systemd may take longer for a scope than we wait for it
                assert "systemd did not answer" in run["reason"], run["reason"]
                self.run(f"start {release} --step-time 30m")
            time.sleep(1)

    @contextmanager
    def load(self, tokens: int) -> Iterator[dict[str, int]]:
        """Until the block ends; then what the requests came to."""
        program = Path(clients.__file__)
        ports = ",".join(str(self._vm.port(8000, number)) for number in range(len(clients.KINDS)))
        where = ["127.0.0.1", ports, clients.POISON]
        options = ["--model", "tiny", "--key", KEY, "--tokens", str(tokens), "--think", "0.3"]
        process = subprocess.Popen(
            [sys.executable, program, *where, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        found: dict[str, int] = {}
        try:
            assert process.stdout is not None and process.stdout.readline() == "up\n"
            yield found
        finally:
            found.update(json.loads(process.communicate(timeout=300)[0]))

    def weight(self) -> float | None:
        weight: float | None = json.loads(self._vm.run(f"{_NETFILTER} show --json").stdout)["weight"]
        return weight

    def rules(self) -> str:
        """All that netfilter has, whoever's it is; also after the uninstall."""
        self._vm.run(f"test -x /tmp/nft/nft || {{ {_KEEP_NFT}; }}")
        return self._vm.run("LD_LIBRARY_PATH=/tmp/nft /tmp/nft/nft list ruleset").stdout
