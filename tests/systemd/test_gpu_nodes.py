"""appliance/gpu_nodes.py against hosts made of files, and a stand-in for nvidia-modprobe with its real rules."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from appliance import gpu_nodes
from appliance.gpu_nodes import DriverGpu, Node, Open, Run, State, plan, problems, read

USER = pwd.struct_passwd(("appliance", "x", 870, 870, "", "/", "/usr/sbin/nologin"))
UUID = "GPU-5fd4f087-86f3-7a43-b711-4771313afc50"
OTHER = "GPU-11111111-86f3-7a43-b711-4771313afc50"
MODPROBE = "/usr/bin/nvidia-modprobe"
MAJORS = {"nvidia": 195, "nvidiactl": 195, "nvidia-uvm": 511}
GOOD = {
    "/dev/nvidia0": Node((195, 0), 0o666, 0, 0),
    "/dev/nvidiactl": Node((195, 255), 0o666, 0, 0),
    "/dev/nvidia-uvm": Node((511, 0), 0o666, 0, 0),
}
HEALTHY = State(MAJORS, (DriverGpu("0000:1b:00.0", 0, UUID),), GOOD, True, MODPROBE)


def found(state: State, groups: tuple[int, ...] = (870,)) -> list[str]:
    return [problem.message for problem in problems(state, USER, groups)]


def test_a_good_host_needs_nothing() -> None:
    assert plan(HEALTHY) == []
    assert found(HEALTHY) == []


def test_no_driver_is_loaded_first() -> None:
    """nvidia-modprobe.c: -u excludes the GPUs' nodes, so two runs; minor 255 is nvidiactl."""
    bare = State({}, (), {}, True, MODPROBE)
    assert plan(bare) == [Run((MODPROBE, "-c", "255")), Run((MODPROBE, "-u", "-c", "0"))]
    assert found(bare) == ["the NVIDIA driver is not loaded"]
    assert plan(replace(bare, modprobe=None)) == []


def test_all_gpus_in_one_run() -> None:
    gpus = tuple(DriverGpu(f"0000:{i:02x}:00.0", i, f"GPU-{i}") for i in (0, 1, 7))
    state = replace(HEALTHY, gpus=gpus, nodes={"/dev/nvidia-uvm": GOOD["/dev/nvidia-uvm"]})
    assert plan(state) == [Run((MODPROBE, "-c", "255", "-c", "0", "-c", "1", "-c", "7"))]


def test_a_stale_major_is_replaced() -> None:
    """After a reload of the driver nvidia-uvm has another major; the node of before still stands in /dev."""
    stale = replace(HEALTHY, nodes=GOOD | {"/dev/nvidia-uvm": Node((508, 0), 0o666, 0, 0)})
    assert plan(stale) == [Run((MODPROBE, "-u", "-c", "0"))]
    assert found(stale) == ["/dev/nvidia-uvm is 508:0, the driver has 511:0"]


def test_old_name_of_the_major() -> None:
    """confidential-os-builder#73: nvidia-frontend became nvidia."""
    old = replace(HEALTHY, majors={"nvidia-frontend": 195, "nvidia-uvm": 511})
    assert plan(old) == [] and found(old) == []


def test_a_gpu_that_nobody_opened_is_opened() -> None:
    fresh = replace(HEALTHY, gpus=(DriverGpu("0000:1b:00.0", 0, None),))
    assert plan(fresh) == [Open("/dev/nvidia0")]


def test_a_plain_file_in_the_place_of_a_node() -> None:
    broken = replace(HEALTHY, nodes=GOOD | {"/dev/nvidia0": Node(None, 0o644, 0, 0)})
    assert plan(broken) == [Run((MODPROBE, "-c", "255", "-c", "0"))]
    assert found(broken) == ["/dev/nvidia0 is no device, the driver has 195:0"]


@pytest.mark.parametrize(
    ("mode", "uid", "gid", "groups", "may"),
    [
        (0o666, 0, 0, (870,), True),
        (0o660, 0, 44, (870,), False),
        (0o660, 0, 44, (870, 44), True),
        (0o600, 870, 0, (870,), True),
        (0o066, 870, 0, (870,), False),  # the owner's bits count for the owner
        (0o664, 0, 44, (870,), False),  # reading is not enough
    ],
)
def test_who_may_open(mode: int, uid: int, gid: int, groups: tuple[int, ...], may: bool) -> None:
    state = replace(HEALTHY, nodes=GOOD | {"/dev/nvidia0": Node((195, 0), mode, uid, gid)})
    assert (found(state, groups) == []) is may


def test_nodes_that_the_driver_may_not_touch_are_left_alone() -> None:
    state = replace(HEALTHY, nodes={}, may_create=False)
    assert plan(state) == []
    hints = {problem.hint for problem in problems(state, USER, (870,))}
    assert hints == {"the driver was told to leave nodes alone (NVreg_ModifyDeviceFiles=0): make them yourself"}


def test_every_problem_has_a_next_step() -> None:
    states = [replace(HEALTHY, nodes={}), replace(HEALTHY, nodes={}, modprobe=None), replace(HEALTHY, gpus=())]
    for state in states:
        assert problems(state, USER, (870,))
        assert all(problem.hint for problem in problems(state, USER, (870,)))


# -- on a host of files


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A host with driver and one GPU, as /proc of driver 580 shows it."""
    proc = tmp_path / "proc/driver/nvidia"
    (proc / "gpus/0000:1b:00.0").mkdir(parents=True)
    (proc / "gpus/0000:1b:00.0/information").write_text(
        f"Model: \t\t NVIDIA H200\nIRQ:   \t\t 212\nGPU UUID: \t {UUID}\nDevice Minor: \t 0\nGPU Excluded:\t No\n"
    )
    (proc / "params").write_text("ResmanDebugLevel: 4294967295\nDeviceFileUID: 0\nModifyDeviceFiles: 1\n")
    (tmp_path / "proc/devices").write_text(
        "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n511 nvidia-uvm\n\n"
        "Block devices:\n  8 sd\n510 nvidia-uvm\n"
    )
    (tmp_path / "dev").mkdir()
    return tmp_path


def test_read(host: Path) -> None:
    (host / "dev/nvidia0").write_text("")
    state = read(host)
    assert state.gpus == (DriverGpu("0000:1b:00.0", 0, UUID),)
    assert state.majors == {"mem": 1, "nvidia": 195, "nvidiactl": 195, "nvidia-uvm": 511}
    assert state.nodes.keys() == {"/dev/nvidia0"} and state.nodes["/dev/nvidia0"].device is None
    assert state.may_create


def test_read_of_an_unopened_gpu_and_of_nothing(host: Path, tmp_path: Path) -> None:
    information = host / "proc/driver/nvidia/gpus/0000:1b:00.0/information"
    information.write_text(information.read_text().replace(UUID, "GPU-????????-????-????-????-????????????"))
    assert read(host).gpus == (DriverGpu("0000:1b:00.0", 0, None),)
    nothing = read(tmp_path / "nothing")
    assert (nothing.majors, nothing.gpus, nothing.nodes) == ({}, (), {})


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mknod")
def test_read_of_a_device(host: Path) -> None:
    try:
        os.mknod(host / "dev/nvidia0", stat.S_IFCHR | 0o600, os.makedev(195, 0))
    except PermissionError:
        pytest.skip("this machine lets nobody make device nodes")
    os.chmod(host / "dev/nvidia0", 0o660)
    assert read(host).nodes["/dev/nvidia0"] == Node((195, 0), 0o660, 0, 0)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """gpu_nodes.main on a host that is only described: the stand-in makes what nvidia-modprobe would make."""
    root = tmp_path / "appliance"
    monkeypatch.setenv("APPLIANCE_ROOT", str(root))
    (root / "etc/appliance").mkdir(parents=True)
    (root / "var/lib/appliance").mkdir(parents=True)
    monkeypatch.setattr(gpu_nodes.pwd, "getpwnam", lambda name: USER)
    monkeypatch.setattr(gpu_nodes.os, "getgrouplist", lambda name, gid: [870])

    def run(state: State, *args: str, backend: str = "cuda", broken: bool = False) -> int:
        (root / "etc/appliance/appliance.toml").write_text(f'[gpus]\nbackend = "{backend}"\n')
        host = {"state": state}

        def apply(action: gpu_nodes.Action) -> None:
            run.actions.append(str(action))  # type: ignore[attr-defined]
            old = host["state"]
            if broken:
                return
            if isinstance(action, Open):
                host["state"] = replace(old, gpus=tuple(replace(gpu, uuid=UUID) for gpu in old.gpus))
            elif "-u" in action.argv:
                node = {"/dev/nvidia-uvm": GOOD["/dev/nvidia-uvm"]}
                host["state"] = replace(old, majors=old.majors | MAJORS, nodes=old.nodes | node)
            else:
                gpus = old.gpus or (DriverGpu("0000:1b:00.0", 0, None),)
                asked = {int(word) for word in action.argv[2::2]}
                nodes = {path: node for path, node in GOOD.items() if path != "/dev/nvidia-uvm"}
                made = {path: node for path, node in nodes.items() if node.device and node.device[1] in asked}
                host["state"] = replace(old, majors=old.majors | MAJORS, gpus=gpus, nodes=old.nodes | made)

        monkeypatch.setattr(gpu_nodes, "apply", apply)
        monkeypatch.setattr(gpu_nodes, "read", lambda: host["state"])
        monkeypatch.setattr(gpu_nodes, "_wake_launchers", lambda: run.actions.append("wake"))  # type: ignore[attr-defined]
        run.actions = []  # type: ignore[attr-defined]
        return gpu_nodes.main(list(args))

    return run


def test_cold_boot_takes_rounds(program: Callable[..., int]) -> None:
    """Driver -> minors -> nodes -> UUIDs; then the launchers are told."""
    assert program(State({}, (), {}, True, MODPROBE)) == 0
    assert program.actions == [
        f"{MODPROBE} -c 255", f"{MODPROBE} -u -c 0", f"{MODPROBE} -c 255 -c 0", "open /dev/nvidia0", "wake",
    ]  # fmt: skip


def test_nothing_changed_wakes_nobody(program: Callable[..., int]) -> None:
    assert program(HEALTHY) == 0
    assert program.actions == []


def test_what_cannot_be_mended_ends_and_fails(program: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert program(State({}, (), {}, True, MODPROBE), broken=True) == 1
    assert len(program.actions) == 2, "a second round would do the same"
    assert "the NVIDIA driver is not loaded" in capsys.readouterr().err


def test_dry_run_does_nothing(program: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert program(replace(HEALTHY, nodes={}), "--dry-run") == 0
    assert program.actions == []
    assert capsys.readouterr().out == f"{MODPROBE} -c 255 -c 0\n{MODPROBE} -u -c 0\n"


def test_backend_cpu_needs_no_nodes(program: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert program(State({}, (), {}, True, None), backend="cpu") == 0
    assert capsys.readouterr().out == 'backend is "cpu": no device nodes are needed\n'


def test_an_absent_gpu_is_a_warning(program: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    """Its launcher fails; the other seven must not wait for it."""
    from appliance.gpus import bind_slots
    from appliance.paths import Paths

    bind_slots(Paths.default().gpus, [UUID, OTHER])
    assert program(HEALTHY) == 0
    assert f"does not show {OTHER} of slot 1" in capsys.readouterr().err


def test_a_bad_configuration_is_refused(program: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert program(HEALTHY, backend="metal") == 4
    assert "appliance.toml" in capsys.readouterr().err


def test_a_program_that_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_nodes, "_TIMEOUT_SECONDS", 0.1)
    with pytest.raises(gpu_nodes.ApplianceError, match="did not end"):
        gpu_nodes.apply(Run(("/bin/sleep", "10")))


def test_open_of_a_node_that_fails_is_said(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    gpu_nodes.apply(Open(str(tmp_path / "none")))
    assert "No such file" in capfd.readouterr().err
