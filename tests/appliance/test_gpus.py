"""GPUs as /proc/driver/nvidia shows them, and their slots."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
from pathlib import Path

import pytest
from host_trees import NO_UUID, UUIDS, add_gpu, make_dirs, nvidia_host, put
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance import gpus_cli
from appliance.events import read_events
from appliance.gpus import GpuError, bind_slots, find_gpu, mig_gpus, read_slots, unready_gpus, visible_gpus
from appliance.hostconfig import HostConfigError
from appliance.paths import Paths
from appliance.statefile import StateError, read_state, write_state

WORDS = ["GPU UUID", "Device Minor", "Model", ":", "²", UUIDS[0], "\n", " ", "7"]


def look(root: Path) -> tuple[Path, Path]:
    return root / "proc/driver/nvidia/gpus", root / "sys/bus/pci/devices"


def test_gpus_are_found_by_uuid_wherever_they_are_now(tmp_path: Path) -> None:
    add_gpu(tmp_path, 1, UUIDS[0], "0000:1b:00.0", numa=0)
    add_gpu(tmp_path, 0, UUIDS[1], "0001:c1:00.0", numa=-1)  # -1: the BIOS does not say
    first, second = visible_gpus(*look(tmp_path))
    assert (first.uuid, first.minor, first.model, first.pci) == (UUIDS[1], 0, "NVIDIA H200", "0001:c1:00.0")
    assert (first.numa_node, second.numa_node) == (None, 0)
    assert find_gpu(UUIDS[0], *look(tmp_path)).minor == 1
    with pytest.raises(GpuError, match=f"the driver shows: {UUIDS[1]}, {UUIDS[0]}"):
        find_gpu("GPU-00000000-0000-0000-0000-000000000000", *look(tmp_path))
    assert visible_gpus(tmp_path / "no", tmp_path / "no") == [] == unready_gpus(tmp_path / "no")


def test_a_gpu_without_uuid_is_said_to_be_not_up_yet(tmp_path: Path) -> None:
    add_gpu(tmp_path, 0, UUIDS[0])
    pci = add_gpu(tmp_path, 1, NO_UUID)
    assert [gpu.uuid for gpu in visible_gpus(*look(tmp_path))] == [UUIDS[0]]
    assert unready_gpus(look(tmp_path)[0]) == [pci]
    with pytest.raises(GpuError, match=f"no UUID yet for {pci}") as caught:
        find_gpu(UUIDS[1], *look(tmp_path))
    assert "nvidia-modprobe" in str(caught.value.hint)


def test_a_gpu_that_vanishes_between_listing_and_reading(tmp_path: Path) -> None:
    pci = add_gpu(tmp_path, 0, UUIDS[0])
    (look(tmp_path)[0] / pci / "information").unlink()
    assert visible_gpus(*look(tmp_path)) == [] and unready_gpus(look(tmp_path)[0]) == [pci]


@settings(max_examples=150, deadline=None)
@given(
    st.text(max_size=200)
    | st.lists(st.sampled_from(["GPU UUID", "Device Minor", "Model", ":", "²", UUIDS[0], "\n", " ", "7"])).map("".join)
)
def test_any_information_is_a_gpu_or_none(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    root = tmp_path_factory.getbasetemp() / "fuzzed"
    file = root / "0000:1b:00.0" / "information"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, errors="surrogateescape", newline="")
    assert len(visible_gpus(root, root)) <= 1


def test_mig_instances_are_seen(tmp_path: Path) -> None:
    """MIG user guide, "Device Nodes and Capabilities": gpuMINOR/mig/giN; gpu0/mig alone means nothing."""
    for path in ("mig/config", "mig/monitor", "gpu0/mig/.keep", "gpu3/mig/gi1/access", "gpu3/mig/gi1/ci0/access"):
        put(tmp_path, f"capabilities/{path}", "DeviceFileMinor: 3\nDeviceFileMode: 292\nDeviceFileModify: 1\n")
    assert mig_gpus(tmp_path) == {3}


def test_slots_are_never_renumbered(tmp_path: Path) -> None:
    path = tmp_path / "gpus.json"
    assert bind_slots(path, ["GPU-a", "GPU-b", "GPU-a"]) == [0, 1]
    assert bind_slots(path, ["GPU-b"]) == []  # GPU-a is away: it keeps its number
    assert bind_slots(path, ["GPU-c", "GPU-a"]) == [2]
    assert {number: entry["uuid"] for number, entry in read_slots(path).items()} == {0: "GPU-a", 1: "GPU-b", 2: "GPU-c"}
    entry = read_slots(path)[0]
    assert (entry["state"], entry["needs"], entry["attempts"]) == ("HEALTHY", None, [])


def test_binding_keeps_what_the_watchdog_wrote(tmp_path: Path) -> None:
    path = tmp_path / "gpus.json"
    bind_slots(path, ["GPU-a"])
    state = read_state(path, schema=1) or {}
    state["gpus"][0] |= {"state": "QUARANTINED", "needs": "rma"}
    write_state(path, state | {"epoch": 7}, schema=1)
    bind_slots(path, ["GPU-b"])
    assert read_slots(path)[0]["needs"] == "rma" and (read_state(path, schema=1) or {})["epoch"] == 7


def test_concurrent_binds_give_each_gpu_one_number(tmp_path: Path) -> None:
    path, uuids = tmp_path / "gpus.json", [f"GPU-{n}" for n in range(12)]
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.starmap(bind_slots, [(path, uuids[n : n + 4] + uuids[:2]) for n in range(9)])
    slots = read_slots(path)
    assert sorted(entry["uuid"] for entry in slots.values()) == sorted(uuids) and list(slots) == list(range(12))


@pytest.mark.parametrize(
    "gpus",
    [
        "no list", [None], [{}], [{"slot": "0", "uuid": "a"}], [{"slot": True, "uuid": "a"}],
        [{"slot": -1, "uuid": "a"}],
        [{"slot": 0}], [{"slot": 0, "uuid": "a"}, {"slot": 0, "uuid": "b"}],
        [{"slot": 0, "uuid": "a"}, {"slot": 1, "uuid": "a"}],
    ],
)  # fmt: skip
def test_a_damaged_gpus_json_is_refused_not_guessed(tmp_path: Path, gpus: object) -> None:
    write_state(tmp_path / "gpus.json", {"gpus": gpus}, schema=1)
    with pytest.raises(StateError, match=r"gpus\.json"):
        read_slots(tmp_path / "gpus.json")
    with pytest.raises(StateError):
        bind_slots(tmp_path / "gpus.json", ["GPU-x"])


# -- appliance gpus


class Cli:
    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self.paths, self.capsys = root, Paths.under(root), capsys
        make_dirs(self.paths)
        monkeypatch.setenv("APPLIANCE_ROOT", str(root))

    def config(self, text: str) -> None:
        self.paths.config.write_text(text)

    def __call__(self, verb: str, **given: bool) -> tuple[int, dict[str, object]]:
        args = argparse.Namespace(verb=verb, json=True, dry_run=False)
        code = gpus_cli.run(argparse.Namespace(**(vars(args) | given)), self.root)
        return code, json.loads(self.capsys.readouterr().out)


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path, monkeypatch, capsys)


def test_bind_and_list_on_a_gpu_host(cli: Cli) -> None:
    nvidia_host(cli.root)
    cli.config("schema = 1\n")
    assert cli("bind", dry_run=True) == (
        0, {"schema": 1, "changed": False, "new": UUIDS, "slots": {}, "dry_run": True}
    )  # fmt: skip
    code, bound = cli("bind")
    assert code == 0 and bound["slots"] == {"0": UUIDS[0], "1": UUIDS[1]} and bound["changed"] is True
    assert [event["gpu"] for event in read_events(cli.paths.events)] == [0, 1]
    assert cli("bind")[1]["changed"] is False
    shutil.rmtree(cli.root / "proc/driver/nvidia/gpus/0000:1b:00.0")
    code, listed = cli("list")
    assert code == 1 and [row["present"] for row in listed["gpus"]] == [False, True]  # type: ignore[attr-defined]


def test_bind_takes_only_the_gpus_it_may_use(cli: Cli) -> None:
    nvidia_host(cli.root)
    cli.config(f'[gpus]\ndevices = ["{UUIDS[1]}"]')
    assert cli("bind")[1]["slots"] == {"0": UUIDS[1]}
    code, listed = cli("list")
    assert code == 0 and [(row["slot"], row["uuid"]) for row in listed["gpus"]] == [(0, UUIDS[1]), (None, UUIDS[0])]  # type: ignore[attr-defined]


def test_bind_on_a_cpu_host_needs_no_driver(cli: Cli) -> None:
    cli.config('[gpus]\nbackend = "cpu"\ncpu_slots = 3')
    assert cli("bind")[1]["slots"] == {"0": "CPU-0", "1": "CPU-1", "2": "CPU-2"}
    assert cli("list")[0] == 0


def test_bind_refuses_what_cannot_serve(cli: Cli) -> None:
    cli.config("schema = 1\n")
    with pytest.raises(gpus_cli.BindRefused, match="no GPU is there") as caught:
        cli("bind")
    assert caught.value.exit_code == 4 and 'backend = "cpu"' in str(caught.value.hint)
    nvidia_host(cli.root)
    put(cli.root, "proc/driver/nvidia/capabilities/gpu1/mig/gi2/access", "")
    with pytest.raises(gpus_cli.BindRefused, match=f"MIG is on: {UUIDS[1]}"):
        cli("bind")
    cli.config(f'[gpus]\ndevices = ["{UUIDS[0]}"]')
    assert cli("bind", dry_run=True)[1]["new"] == [UUIDS[0]]  # the divided GPU is not asked for
    cli.config('[gpus]\ndevices = ["GPU-00000000-0000-0000-0000-000000000000"]')
    with pytest.raises(gpus_cli.BindRefused, match="names GPU-00000000"):
        cli("bind")
    cli.config('[gpus]\ndevices = ["MIG-5fd4f087-86f3-7a43-b711-4771313afc50"]')
    with pytest.raises(HostConfigError, match="MIG is not supported"):
        cli("bind")
    cli.config("schema = 1\n")
    add_gpu(cli.root, 1, NO_UUID)
    shutil.rmtree(cli.root / "proc/driver/nvidia/capabilities")
    with pytest.raises(gpus_cli.BindRefused, match="no UUID yet for"):
        cli("bind")
    assert not cli.paths.gpus.exists()
