"""The issues' way from a bare machine and back to it, in the qemu machine: its own kernel, every cgroup controller.

install -> a completion through :8000 -> the second run changes nothing -> engine killed in mid-stream -> a memory hog
in a scope -> a launcher restarted under load -> daemon-reload under load -> an uncorrectable error while clients stream
-> upgrade and rollback -> a slow, an erring and a good canary -> reboot in mid-canary, power cut -> uninstall. CPU
backend and a tiny model: qemu emulates here, everything is some twenty times slower than real. Each test goes on where
the one before it stopped. The fault, the canaries and an upgrade to another version of the software have their turn
with APPLIANCE_FULL=1 only; in CI the upgrade brings another release, and the box has the rest (test_life_of_a_*.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ansible import hosts, vm_faults
from tests.ansible.conftest import build_bundle
from tests.ansible.vm_canary import Canary
from tests.ansible.vm_host import MEMORY_MAX, Host, bare_host, good
from tests.canary.clients import ERRORS, GOOD_ENDS, POISON
from tests.host.vm_image import Image
from tests.tiny import make_tiny_model

FULL = os.environ.get("APPLIANCE_FULL") == "1"
WANTED = bool(os.environ.get("CI")) or FULL
pytestmark = [
    pytest.mark.vm,
    pytest.mark.slow,
    pytest.mark.timeout(3000),
    pytest.mark.xdist_group("vm"),
    pytest.mark.skipif(not WANTED, reason="twenty minutes; in CI (CI=true) or with APPLIANCE_FULL=1"),
]


def only_full(time: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not FULL, reason=f"{time}; with APPLIANCE_FULL=1")


PROMPTS = {f"request {number}": 24 + 8 * number for number in range(4)}
SCOPE = "/sys/fs/cgroup/appliance.slice/appliance-gpu{0}.slice/appliance-gpu{0}-{1}.scope"
CLIENTS = 32


@pytest.fixture(scope="module")
def host(ansible_bin: Path, bundle: Path, vm_image: Image, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    directory = tmp_path_factory.mktemp("controller")
    with bare_host(ansible_bin, vm_image, directory, bundle, make_tiny_model(directory / "tiny")) as made:
        yield made


@pytest.fixture(scope="module")
def canary(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Canary:
    return Canary(host, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of the software, with the full counts: variables of the upgrade."""
    if not FULL:
        return {}
    return {"appliance_bundle": str(build_bundle(tmp_path_factory.mktemp("new") / "dist", "--version", "9.0.0+test"))}


def learn(host: Host) -> None:
    """The right text of each prompt, of the release that serves now."""
    for prompt, tokens in PROMPTS.items():
        host.texts[prompt] = tokens, host.endpoint.complete(prompt, tokens)


def test_install_on_a_bare_machine_answers_on_port_8000(host: Host) -> None:
    assert host.vm.run("python3 -c 'import gi'", check=False).returncode != 0, "the bundle has something to bring"
    host.before, host.packages_before = host.listing(), host.packages()
    good(host.play("install"))
    learn(host)
    assert host.endpoint.complete("request 0", PROMPTS["request 0"], stream=True) == host.texts["request 0"][1]
    assert host.status()["ok"]


def test_the_second_run_changes_nothing(host: Host) -> None:
    assert good(host.play("install")).changed == 0
    if FULL:
        assert good(host.play("install", "--check")).changed == 0


def test_limits_are_the_kernels(host: Host) -> None:
    for gpu in (0, 1):
        scope = SCOPE.format(gpu, "v1")
        assert host.vm.run(f"cat {scope}/memory.max").stdout.strip() == str(MEMORY_MAX)
        assert host.vm.run(f"cat {scope}/pids.max").stdout.strip() == "1024"
        uid = host.vm.run(f"stat -c %u /proc/{host.engine(gpu)['pid']}").stdout.strip()
        assert uid == host.vm.run("id -u appliance").stdout.strip() != "0"


def test_an_engine_killed_in_mid_stream_costs_no_answer(host: Host) -> None:
    before = host.engine(0)
    with host.traffic() as traffic:
        traffic.wait(4)
        host.vm.run(f"kill -KILL {before['pid']}")
        traffic.wait(8)
    host.wait_ok()
    after = host.engine(0)
    assert after["restarts"] == before["restarts"] + 1 and after["pid"] != before["pid"]
    assert host.engine(1)["restarts"] == 0
    print(f"{traffic.done} requests, the longest {traffic.longest:.1f} s")


def test_a_memory_hog_in_a_scope_dies_alone(host: Host) -> None:
    others = host.engine(1)["pid"], host.vm.run("systemctl show -P MainPID appliance-gateway@stable").stdout
    scope = SCOPE.format(0, "v1")
    slice_events = f"grep -w oom_kill {scope.rpartition('/')[0]}/memory.events"  # the scope ends, and its count with it
    before = int(host.vm.run(slice_events).stdout.split()[1])
    hog = f"sh -c 'echo $$ > {scope}/cgroup.procs; exec python3 -c \"x = bytearray(2 << 30)\"'"
    with host.traffic() as traffic:
        traffic.wait(2)
        done = host.vm.run(hog, check=False, timeout=300)
        assert done.returncode == 137, done
        traffic.wait(4)
    assert int(host.vm.run(slice_events).stdout.split()[1]) > before
    host.wait_ok()
    assert "MemoryMax" in host.engine(0)["last_exit"]
    assert (host.engine(1)["pid"], host.vm.run("systemctl show -P MainPID appliance-gateway@stable").stdout) == others


def test_a_launcher_restarted_under_load_loses_no_request(host: Host) -> None:
    with host.traffic() as traffic:
        traffic.wait(2)
        host.vm.run("systemctl restart appliance-gpu@0", timeout=400)
        traffic.wait(6)
    host.wait_ok()


def test_daemon_reload_under_load_is_harmless(host: Host) -> None:
    pids = [host.engine(gpu)["pid"] for gpu in (0, 1)]
    with host.traffic() as traffic:
        for _ in range(3):
            host.vm.run("systemctl daemon-reload", timeout=300)
            traffic.wait(2)
    assert [host.engine(gpu)["pid"] for gpu in (0, 1)] == pids
    assert host.vm.run(f"cat {SCOPE.format(0, 'v1')}/memory.max").stdout.strip() == str(MEMORY_MAX)


@only_full("three minutes")
def test_an_uncorrectable_error_while_clients_stream(host: Host) -> None:
    with vm_faults.scripted(host) as faults:
        pids = [host.engine(gpu)["pid"] for gpu in (0, 1)]
        before = [faults.way(gpu) for gpu in (0, 1)]
        with host.traffic(CLIENTS) as traffic:
            traffic.wait(8)
            faults.uncorrectable(0)
            faults.wait_way(0, before[0] + vm_faults.REPAIR)
            traffic.wait(8)
        faults.wait_way(1, before[1])
        assert faults.resets() == [1, 0] and faults.all_is_back()
        phases = faults.phases(0)
        print(f"{sum(phases.values()):.1f} s: {phases}; {traffic.done} requests of {CLIENTS} clients, the longest "
              f"{traffic.longest:.1f} s")  # fmt: skip
        assert host.engine(0)["pid"] != pids[0] and host.engine(1)["pid"] == pids[1]
    host.wait_ok()


def test_upgrade_to_a_second_release_and_back_under_load(host: Host, newer: dict[str, str]) -> None:
    host.controller.variables.update(newer, appliance_release={"name": "v2"})
    good(host.play("upgrade"))
    state = host.wait_ok()
    assert state["slots"]["stable"] == "v2" and state["host"]["drain"] is None
    assert (state["version"] == "9.0.0+test") == bool(newer)
    with host.traffic() as traffic:
        traffic.wait(2)
        host.vm.run("appliance release use v1", timeout=900)
        traffic.wait(4)
    state = host.wait_ok()
    assert state["slots"]["stable"] == "v1"
    assert {engine["engine_version"] for gpu in state["gpus"] for engine in gpu["engines"]} != {"9.0.0+test"}


@only_full("five minutes each")
@pytest.mark.parametrize(
    ("release", "model", "tokens", "seconds"),
    # Twelve times the layers of the stable release, and long answers: its golden answers (recorded and compared under
    # load) come in time all the same, as they are prefill for the most part. Seen on two busy cores: nearly all answers
    # of the stable release within 10 s, nearly all of the slow one after that.
    [("slow", {"num_hidden_layers": 24}, 128, 10.0), ("erring", {"poison_token": ord(POISON)}, 16, 5.0)],
)
def test_a_bad_canary_is_rolled_back_by_itself(
    host: Host, canary: Canary, release: str, model: dict[str, int], tokens: int, seconds: float
) -> None:
    canary.policy(seconds)
    canary.add(release, **model)
    before = host.way(0), host.way(1)
    code, run, ends = canary.start(release, tokens)
    assert (code, run["phase"]) == (1, "failed"), run["reason"]
    assert ("request >= " if release == "slow" else "errors") in run["reason"]
    expected = GOOD_ENDS | (ERRORS if release == "erring" else set())
    assert ends.keys() <= expected, ends  # nobody was reset or refused
    assert canary.weight() == 0
    assert host.wait_ok()["slots"] == {"stable": "v1", "canary": None}
    assert (host.way(0), host.way(1)) == before, "a bad release is no sick GPU"


@only_full("five minutes")
def test_a_good_canary_is_promoted_and_settles(host: Host, canary: Canary) -> None:
    canary.add("v3")
    code, run, ends = canary.start("v3")
    assert (code, run["phase"]) == (0, "settled"), run["reason"]
    assert ends.keys() <= GOOD_ENDS, ends
    assert canary.weight() == 0
    assert host.wait_ok()["slots"] == {"stable": "v3", "canary": None}
    before = dict(host.texts)
    learn(host)
    assert host.texts != before, "another model answers"


def test_after_a_reboot_and_a_power_cut_all_is_back(host: Host, canary: Canary) -> None:
    """With the full counts the reboot comes in the middle of a canary."""
    stable = host.status()["slots"]["stable"]
    if FULL:
        canary.hold("v1", 50)
    for cut in (False, True):
        if cut:
            host.vm.kill()
            host.vm.boot()
        else:
            host.vm.reboot()
        state = host.wait_ok()
        assert state["slots"] == {"stable": stable, "canary": None} and canary.weight() == 0
        if FULL:
            run = canary.status()["run"]
            assert (run["phase"], run["reason"]) == ("aborted", "reboot")
        for prompt, (tokens, text) in host.texts.items():
            assert host.endpoint.complete(prompt, tokens, stream=True) == text


def test_uninstall_leaves_nothing(host: Host, canary: Canary) -> None:
    assert "appliance" in canary.rules()
    host.vm.run("rm -rf /root/models")  # ours, not the appliance's
    good(host.play("uninstall"))
    assert canary.rules() == ""
    assert host.units() == ""
    left = hosts.boiled_down(host.before, host.listing())
    assert not [line for line in left if not line.startswith(("+ /etc/appliance", "+ /srv/appliance"))], left
    assert host.packages() == host.packages_before
    assert host.vm.run("getent passwd appliance", check=False).returncode != 0
    good(host.play("uninstall", appliance_purge=True))
    assert not hosts.boiled_down(host.before, host.listing())
