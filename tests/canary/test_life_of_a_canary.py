"""The life of a canary on a host with systemd: shipped units with their sandboxes, real engines, gateways, netfilter,
judge, controller and command. A good release is promoted and settles; a slow one and an erring one, each bad for real
(many layers; an embedding of NaN), are rolled back by themselves; no client ever sees a reset; a host that restarts in
mid-canary comes back at weight 0; and an uninstall leaves no rule."""

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

import pytest

from canary.netfilter.model import ANCHOR
from tests.canary import clients
from tests.canary.clients import ERRORS, GOOD_ENDS, POISON
from tests.canary.policies import toml
from tests.host import appliance_box
from tests.host.box import Box
from tests.host.plugin import HOST_SECONDS
from tests.tiny import make_tiny_model

pytestmark = [pytest.mark.box, pytest.mark.slow, pytest.mark.timeout(HOST_SECONDS)]

UNITS = appliance_box.units()
STATE = "/var/lib/appliance"
GATEWAY = """
[gateway]
host = "0.0.0.0"
canary_host = "0.0.0.0"
auth = "none"
"""
# What two slow processors can fill in half a minute: 5 % of errors, one request in ten over 0.5 s. The good release
# takes a fifth of that, the slow one several times as long.
POLICY = {
    "steps": [25, 50], "step_seconds": 8.0, "interval": 1.0, "warmup_seconds": 0.0, "error_rate": 0.05,
    "min_requests": 60, "min_connections": 20, "ttft_not_worse": False, "settle_seconds": 2.0, "cooldown": 0.0,
    "progress_deadline": 300.0,
    "limits": [{"metric": "request", "seconds": 0.5, "share": 0.1}, {"metric": "itl", "seconds": 1.0, "share": 0.1}],
}  # fmt: skip


class Host:
    """A box with the appliance. /var/lib/appliance outlives it, as a disk outlives a reboot."""

    def __init__(self, root: Path, disk: Path) -> None:
        options = appliance_box.boot_options() | {"network": True}
        binds = (*options["bind"], (disk / "state", STATE, "rw"))
        self.box = Box(root, **(options | {"bind": binds}))

    def start(self) -> None:
        box = self.box.start()
        appliance_box.install(box, config=appliance_box.CONFIG.format(slots=1, engine="") + GATEWAY)
        box.run(["systemctl", "enable", *UNITS])

    def appliance(self, *words: str) -> str:
        return self.box.run([appliance_box.PYTHON, "-P", "-m", "appliance", *words], timeout=300).stdout

    def canary(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        argv = [appliance_box.PYTHON, "-P", "-m", "canary.cli", *words]
        done = self.box.run(argv, check=check, timeout=600)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.canary("status", "--json", check=False).stdout))

    def wait(self, what: Any, seconds: float = 120.0) -> Any:
        deadline = time.monotonic() + seconds
        while not (value := what()):
            assert time.monotonic() < deadline, self.status()
            time.sleep(0.3)
        return value

    def add(self, folder: Path, name: str, **model: Any) -> None:
        made = make_tiny_model(folder / name, seed=zlib.crc32(name.encode()), **model)
        self.box.copy(made, f"/root/models/{name}")
        self.appliance("model", "add", f"/root/models/{name}", "--quiet")
        self.release(name, model=name)

    def release(self, name: str, *, model: str) -> None:
        self.appliance("release", "add", name, "--model", model, "--model-name", "chat", "--quiet")

    def policy(self) -> list[str]:
        self.box.write("/etc/appliance/canary.toml", toml(POLICY))
        return ["--wait", "--json"]

    @contextmanager
    def load(self) -> Iterator[dict[str, int]]:
        """From this machine, and from inside the box, until the block ends; then what their requests came to."""
        program = Path(clients.__file__).read_text()
        outside = subprocess.Popen(
            [sys.executable, "-c", program, self.box.address, "8000", POISON], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        inside = self.box.popen(
            ["/usr/bin/python3", "-c", program, "127.0.0.1", "8000", POISON], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        found: dict[str, int] = {}
        try:
            for process in (outside, inside):
                assert process.stdout is not None and process.stdout.readline() == "up\n"
            yield found
        finally:
            for process in (outside, inside):
                text = process.communicate(timeout=120)[0]
                for key, count in json.loads(text).items():
                    found[key] = found.get(key, 0) + count

    def rules(self) -> str:
        """What nft, iptables and ip6tables have of ours."""
        saved = "".join(self.box.run([program]).stdout for program in ("iptables-save", "ip6tables-save"))
        lines = (saved + self.box.run(["nft", "list", "tables"]).stdout).splitlines()
        return "\n".join(line for line in lines if "appliance" in line.lower())

    def weight(self) -> float | None:
        command = [appliance_box.PYTHON, "-P", "-m", "canary.netfilter", "show", "--json"]
        weight: float | None = json.loads(self.box.run(command).stdout)["weight"]
        return weight


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    disk = tmp_path_factory.mktemp("disk")
    disk.chmod(0o755)
    (disk / "state").mkdir(mode=0o755)
    return disk


@pytest.fixture(scope="module")
def host(box_root: Path, disk: Path) -> Iterator[Host]:
    made = Host(box_root, disk)
    try:
        made.start()
        made.box.run(["systemctl", "start", "appliance.target"], timeout=120)
        for unit in UNITS:
            made.box.wait_for(unit, timeout=60)
        made.add(disk / "models", "v1")
        made.appliance("release", "use", "v1", "--quiet")
        yield made
    finally:
        made.box.stop()


def sandbox(host: Host) -> dict[str, int]:
    """Capabilities and groups of the controller's process."""
    pid = host.box.show("appliance-canary.service", "MainPID")["MainPID"]
    status = dict(line.split(":", 1) for line in host.box.read(f"/proc/{pid}/status").splitlines())
    return {"caps": int(status["CapEff"], 16), "group": appliance_box.UID in map(int, status["Groups"].split())}


def run_of(host: Host, release: str) -> tuple[int, dict[str, Any], dict[str, int]]:
    with host.load() as ends:
        done = host.canary("start", release, *host.policy(), check=False)
    document = json.loads(done.stdout)
    run = document["run"]
    took = {result["weight"]: result["seconds"] for result in run["results"]}
    rule = document.get("live", {}).get("rule_seconds")
    print(f"{release}: {run['phase']} ({run['reason']}); steps {took}; rule {rule}; {ends}")
    return done.returncode, run, ends


def test_the_controller_has_one_capability_and_the_group_of_the_sockets(host: Host) -> None:
    assert sandbox(host) == {"caps": 1 << 12, "group": True}  # CAP_NET_ADMIN (capability.h)


def test_a_release_that_is_the_same_under_another_name_is_refused(host: Host) -> None:
    host.release("twin", model="v1")
    done = host.canary("start", "twin", check=False)
    assert done.returncode == 4 and "twin is the same as v1" in done.stderr


@pytest.mark.parametrize(
    ("release", "model"), [("slow", {"num_hidden_layers": 400}), ("erring", {"poison_token": ord(POISON)})]
)
def test_a_bad_release_is_rolled_back_by_itself(host: Host, disk: Path, release: str, model: dict[str, int]) -> None:
    host.add(disk / "models", release, **model)
    code, run, ends = run_of(host, release)
    assert (code, run["phase"]) == (1, "failed"), run["reason"]
    assert ("request >= 500 ms" if release == "slow" else "errors") in run["reason"]
    expected = GOOD_ENDS | (ERRORS if release == "erring" else set())
    assert ends.keys() <= expected, ends  # nobody was reset or refused
    assert host.weight() == 0
    status = json.loads(host.appliance("status", "--json"))
    assert status["slots"] == {"stable": "v1", "canary": None}
    assert [engine["release"] for engine in status["gpus"][0]["engines"]] == ["v1"]


def test_a_good_release_is_promoted_and_settles(host: Host, disk: Path) -> None:
    host.add(disk / "models", "v2")
    code, run, ends = run_of(host, "v2")
    assert (code, run["phase"]) == (0, "settled"), run["reason"]
    assert [result["outcome"] for result in run["results"]] == ["pass", "pass"]
    assert ends.keys() <= GOOD_ENDS, ends
    assert host.weight() == 0
    assert json.loads(host.appliance("status", "--json"))["slots"] == {"stable": "v2", "canary": None}


def test_a_host_that_restarts_in_mid_canary_comes_back_at_weight_0(host: Host, disk: Path) -> None:
    """Power cut, not shutdown. Then nothing of it is left when the rules are taken away."""
    host.canary("start", "v1", "--step-time", "10m")
    host.wait(lambda: host.status()["run"]["stage"] == "observe" and host.weight() == 25)
    refused = host.box.run([appliance_box.PYTHON, "-P", "-m", "appliance", "release", "use", "v1"], check=False)
    assert refused.returncode == 5 and "canary rollback" in refused.stderr
    host.box.stop()
    # A box has the kernel of this machine, and so its boot_id: let the disk be of the boot before.
    kept = disk / "state/canary.json"
    run = json.loads(kept.read_text())
    kept.write_text(json.dumps(run | {"boot_id": "11111111-0000-4000-8000-000000000001"}))
    host.start()
    host.box.run(["systemctl", "start", "appliance.target"], timeout=120)
    run = host.wait(lambda: (found := host.status()["run"])["phase"] == "aborted" and found)
    assert run["reason"] == "reboot" and host.weight() == 0
    host.wait(lambda: json.loads(host.appliance("status", "--json"))["slots"] == {"stable": "v2", "canary": None})
    with host.load() as ends:
        time.sleep(2)
    assert ends.keys() <= GOOD_ENDS and ends["answer"] > 0, ends

    assert ANCHOR in host.rules()
    host.box.run(["systemctl", "disable", "--now", *UNITS], timeout=150)  # what the role's uninstall does
    host.box.run([appliance_box.PYTHON, "-P", "-m", "canary.netfilter", "down", "--force"])
    assert host.rules() == ""
