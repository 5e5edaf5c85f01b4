"""Recording golden answers through launchers: who must agree, what happens if they do not, and that nothing is left."""

from __future__ import annotations

import json

import pytest
from fake_launcher import FakeFleet
from release_helpers import paths_fixture, release_command, store_fixture  # noqa: F401  # fixtures

from appliance.golden import read_golden
from appliance.paths import Paths
from appliance.releases import ReleaseStore

H200 = "NVIDIA H200"
ADD = ("add", "v1", "--model", "tiny")


def leases(paths: Paths) -> list[object]:
    file = paths.state / "leases.json"
    return list(json.loads(file.read_text())["leases"]) if file.exists() else []


def cuda(paths: Paths, gpus: int, kind: str = "stub") -> FakeFleet:
    return FakeFleet(paths, gpus, kind=kind, backend="cuda")


def test_two_gpus_agree(store: ReleaseStore, paths: Paths, capsys: pytest.CaptureFixture[str]) -> None:
    with cuda(paths, 3) as fleet:
        for gpu in range(3):
            fleet.script(gpu, device=H200)
        code, answer = release_command(capsys, *ADD)
        assert (code, answer["golden"], answer["changed"]) == (0, ["NVIDIA-H200"], True)
        golden = read_golden(paths, "v1", H200)
        assert golden is not None and golden.agreed == "two-gpus"
        assert golden.recorded_from == ["GPU-00000000", "GPU-00000001"]
        assert [fleet.log(gpu) for gpu in range(3)] == [["run v1", "stop v1"], ["run v1", "stop v1"], []]
        assert leases(paths) == []


@pytest.mark.parametrize(
    "script, message",
    [
        ({"salt": {"v1": "!"}}, "do not compute the same bits: short, pages, bytes, special"),
        ({"weights": {"v1": "!"}}, "the weights' checksum"),
        ({"nan": ["v1"]}, "NaN or infinity"),
        ({"flipped": ["v1"]}, "not what was loaded"),
        ({"device": "NVIDIA H100"}, "is a NVIDIA H200, GPU 1 a NVIDIA H100"),
    ],
)
def test_gpus_that_differ_make_no_release(
    store: ReleaseStore, paths: Paths, capsys: pytest.CaptureFixture[str], script: dict[str, object], message: str
) -> None:
    with cuda(paths, 2) as fleet:
        fleet.script(0, device=H200)
        fleet.script(1, **({"device": H200} | script))
        code, answer = release_command(capsys, *ADD)
        error = answer["error"]
        assert code == 4 and isinstance(error, dict) and message in error["message"]
        assert "was not kept" in error["message"]
        assert store.list() == [] and leases(paths) == []
        assert fleet.running(0) == fleet.running(1) == {}


def test_an_engine_that_does_not_start_makes_no_release(
    store: ReleaseStore, paths: Paths, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeFleet(paths) as fleet:
        fleet.script(0, dies={"v1": "exit status 4: no room"})
        code, answer = release_command(capsys, *ADD)
        assert code == 1 and "exit status 4: no room" in str(answer["error"])
        assert store.list() == [] and leases(paths) == [] and fleet.running(0) == {}
        fleet.script(0, dies={}, refuse={"run": "the disk is full"})
        code, answer = release_command(capsys, *ADD)
        assert code == 1 and "the disk is full" in str(answer["error"])
        assert store.list() == [] and leases(paths) == []


def test_without_launchers_it_says_what_to_start(
    store: ReleaseStore, paths: Paths, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeFleet(paths) as fleet:
        fleet.ask(0, "hold", owner="watchdog", level="stop", reason="XID 79")
        code, answer = release_command(capsys, *ADD)
        assert code == 1 and "held by watchdog: XID 79" in str(answer["error"])
    code, answer = release_command(capsys, *ADD)
    assert code == 1 and "not running" in str(answer["error"]) and store.list() == []
    code, answer = release_command(capsys, *ADD, "--golden", "skip")
    assert code == 0 and answer["golden"] == []


def test_add_again_records_what_is_missing(
    store: ReleaseStore, paths: Paths, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeFleet(paths) as fleet:
        assert release_command(capsys, *ADD, "--golden", "skip")[1]["changed"] is True
        code, answer = release_command(capsys, *ADD)
        assert (code, answer["changed"], answer["golden"]) == (0, True, ["cpu"])
        fleet.script(0, log=[])
        code, answer = release_command(capsys, *ADD)
        assert (code, answer["changed"], fleet.log(0)) == (0, False, [])


def test_a_release_in_service_is_kept_when_its_answers_differ(
    store: ReleaseStore, paths: Paths, capsys: pytest.CaptureFixture[str]
) -> None:
    """And its engines go on: they were not started for this."""
    with cuda(paths, 2) as fleet:
        fleet.script(0, device=H200)
        fleet.script(1, device=H200, salt={"v1": "!"})
        assert release_command(capsys, *ADD, "--golden", "skip")[0] == 0
        assert release_command(capsys, "use", "v1")[0] == 0
        code, answer = release_command(capsys, *ADD)
        assert code == 4 and "is kept: the release 'v1' is what the slot stable points at" in str(answer["error"])
        assert fleet.running(0) == fleet.running(1) == {"v1": "ready"}
        fleet.script(1, salt={})
        assert release_command(capsys, *ADD)[1]["golden"] == ["NVIDIA-H200"]
        assert fleet.running(0) == fleet.running(1) == {"v1": "ready"}


def test_room_is_counted_before_an_engine_is_started(
    store: ReleaseStore, paths: Paths, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeFleet(paths, 1, backend="cuda") as fleet:
        fleet.script(0, device=H200)
        for name, slot in (("v1", "stable"), ("v2", "canary")):
            assert release_command(capsys, "add", name, "--model", "tiny", "--golden", "skip")[0] == 0
            assert release_command(capsys, "use", name, "--slot", slot)[0] == 0
        fleet.script(0, log=[])
        code, answer = release_command(capsys, "add", "v3", "--model", "tiny")
        words = "3 engines of gpu_memory_fraction 0.45, together 1.35 of its memory"
        assert code == 4 and words in str(answer["error"])
        assert fleet.log(0) == [] and [info.name for info in store.list()] == ["v1", "v2"]


def test_displace_takes_one_gpu_at_a_time(
    store: ReleaseStore, paths: Paths, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where every GPU serves and none has room: v1 is back on the first before the second is taken."""
    with FakeFleet(paths, 2, backend="cuda", config='[engine]\nplacement = "exclusive"\n') as fleet:
        for gpu in range(2):
            fleet.script(gpu, device=H200)
        assert release_command(capsys, *ADD)[0] == 0  # nothing serves yet: there is room
        assert release_command(capsys, "use", "v1")[0] == 0
        for gpu in range(2):
            fleet.script(gpu, log=[])
        code, answer = release_command(capsys, "add", "v2", "--model", "tiny")
        assert code == 4 and "placement is exclusive" in str(answer) and "--golden displace" in str(answer)
        code, answer = release_command(capsys, "add", "v2", "--model", "tiny", "--golden", "displace")
        assert (code, answer["golden"]) == (0, ["NVIDIA-H200"])
        assert fleet.log(0) == fleet.log(1) == ["replace v2", "stop v2"]
        assert fleet.running(0) == fleet.running(1) == {"v1": "ready"} and leases(paths) == []
        golden = read_golden(paths, "v2", H200)
        assert golden is not None and golden.agreed == "two-gpus"


@pytest.mark.slow
def test_one_gpu_and_the_cpu_oracle(store: ReleaseStore, paths: Paths, capsys: pytest.CaptureFixture[str]) -> None:
    """Two real engines; the one behind the launcher says that it is a GPU. Beyond the tolerance it is refused."""
    with cuda(paths, 1, kind="real") as fleet:
        fleet.script(0, device=H200)
        code, answer = release_command(capsys, *ADD, "--argument=--kv-tokens=4096")
        assert (code, answer["golden"]) == (0, ["NVIDIA-H200"])
        golden = read_golden(paths, "v1", H200)
        assert golden is not None and golden.agreed == "cpu-oracle" and golden.oracle is not None
        assert golden.oracle.largest_difference == 0 and golden.oracle.positions > 64  # the same arithmetic here
        fleet.script(0, shift=0.3)
        code, answer = release_command(capsys, "add", "v2", "--model", "tiny", "--argument=--kv-tokens=4096")
        assert code == 4 and "differ by 0.300 in a log probability; at most 0.27" in str(answer["error"])
        fleet.script(0, shift=0.2)
        assert release_command(capsys, "add", "v3", "--model", "tiny", "--argument=--kv-tokens=4096")[0] == 0
        assert [info.name for info in store.list()] == ["v1", "v3"]
        assert fleet.running(0) == {} and leases(paths) == []
