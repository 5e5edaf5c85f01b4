"""appliance/report_failure.py: causes from what drivers and systemd really write."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance import report_failure
from appliance.events import read_events
from appliance.gpu_facts import GpuFacts, gpu_facts
from appliance.gpus import bind_slots
from appliance.paths import Paths
from appliance.report_failure import diagnose
from appliance.statefile import write_state

UUID = "GPU-5fd4f087-86f3-7a43-b711-4771313afc50"
PCI = "0000:1b:00.0"
XID79 = "NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
XID31 = "NVRM: Xid (PCI:0000:2c:00): 31, pid=4711, name=python, Ch 00000008, intr 00000000. MMU Fault"


@pytest.fixture
def host(tmp_path: Path) -> tuple[Path, Path]:
    """(proc, pci) of a host with one GPU that is well."""
    proc, pci = tmp_path / "proc", tmp_path / "pci"
    (proc / "gpus" / PCI).mkdir(parents=True)
    (proc / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06\n")
    (proc / "gpus" / PCI / "information").write_text(f"Model: NVIDIA H200\nGPU UUID: {UUID}\nDevice Minor: 0\n")
    for address, vendor, kind in ((PCI, "0x10de", "0x030200"), ("0000:00:1f.0", "0x8086", "0x060100")):
        (pci / address).mkdir(parents=True)
        (pci / address / "vendor").write_text(vendor + "\n")
        (pci / address / "class").write_text(kind + "\n")
        (pci / address / "config").write_bytes(b"\xde\x10\x35\x23" + bytes(60))
    return proc, pci


def test_a_gpu_that_is_well(host: tuple[Path, Path]) -> None:
    assert gpu_facts(UUID, *host) == GpuFacts("shown", PCI)


def test_no_driver(host: tuple[Path, Path]) -> None:
    (host[0] / "version").unlink()
    assert gpu_facts(UUID, *host).state == "no-driver"


def test_off_the_bus_also_while_the_driver_shows_it(host: tuple[Path, Path]) -> None:
    (host[1] / PCI / "config").write_bytes(b"\xff" * 64)
    assert gpu_facts(UUID, *host).state == "off-bus"
    (host[0] / "gpus" / PCI / "information").unlink()
    (host[0] / "gpus" / PCI).rmdir()
    assert gpu_facts(UUID, *host).state == "off-bus"


def test_another_device_off_the_bus_is_no_gpu(host: tuple[Path, Path]) -> None:
    (host[1] / "0000:00:1f.0/config").write_bytes(b"\xff" * 64)
    assert gpu_facts(UUID, *host).state == "shown"
    assert gpu_facts("GPU-0", *host).state == "not-shown"


def test_what_cannot_be_read_is_unknown(host: tuple[Path, Path]) -> None:
    assert gpu_facts("GPU-0", host[0], Path("/nonexistent")).state == "unknown"


@pytest.mark.parametrize(
    ("unit", "gpu", "kernel", "cause"),
    [
        ({"Result": "exit-code", "ExecMainStatus": "1"}, GpuFacts("no-driver"), [], "driver is not loaded"),
        ({"Result": "watchdog"}, GpuFacts("off-bus", PCI), [XID79], "fell off the PCI bus"),
        ({"Result": "exit-code", "ExecMainStatus": "1"}, GpuFacts("shown", PCI), [XID79], "Xid 79"),
        ({"Result": "exit-code", "ExecMainStatus": "1"}, GpuFacts("not-shown"), [XID79, XID31, XID79], "Xid 79, 31"),
        ({"Result": "exit-code", "ExecMainStatus": "1"}, GpuFacts("shown", PCI), [XID31], "exit status 1"),
        ({"Result": "exit-code", "ExecMainStatus": "4"}, GpuFacts("shown", PCI), [], "appliance config check"),
        ({"Result": "exit-code", "ExecMainStatus": "243"}, None, [], "credentials"),
        ({"Result": "exit-code", "ExecMainStatus": "217"}, None, [], "systemd-sysusers"),
        ({"Result": "watchdog"}, None, [XID31], "stood still"),
        ({"Result": "start-limit-hit"}, None, [], "too often"),
        ({"Result": "signal", "ExecMainStatus": "9"}, None, [], "signal, exit status 9"),
        ({}, None, [], "unknown"),
    ],
)
def test_causes(unit: dict[str, str], gpu: GpuFacts | None, kernel: list[str], cause: str) -> None:
    assert cause in diagnose(unit, gpu, kernel)


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    monkeypatch.setenv("APPLIANCE_ROOT", str(tmp_path / "root"))
    paths = Paths.default()
    paths.state.mkdir(parents=True)
    answers = {
        "systemctl": ["Result=exit-code", "ExecMainStatus=1", "NRestarts=5", "StatusText=engine v1: a=b"],
        "journalctl": [XID79, "x" * 5000],
    }
    monkeypatch.setattr(report_failure, "_output", lambda argv: answers[argv[0]])
    return paths


def test_the_event_of_a_launcher(paths: Paths, capsys: pytest.CaptureFixture[str]) -> None:
    bind_slots(paths.gpus, [UUID])
    paths.gpu_run(0).mkdir(parents=True)
    engine = {"release": "v1", "state": "failed", "last_exit": "status 4"}
    write_state(paths.launcher_state(0), {"engines": [engine]}, schema=1, durable=False)
    assert report_failure.main(["appliance-gpu@0.service"]) == 0
    (event,) = read_events(paths.events)
    assert (event["event"], event["unit"]) == ("unit-failed", "appliance-gpu@0.service")
    assert (event["gpu"], event["uuid"], event["restarts"]) == (0, UUID, "5")
    assert event["status"] == "engine v1: a=b"
    assert event["engines"] == ["v1: failed, last exit status 4"]
    assert event["gpu_state"] in ("no-driver", "not-shown", "off-bus", "shown")  # this machine's
    assert event["kernel"][0] == XID79 and len(event["kernel"][1]) <= 300
    assert capsys.readouterr().out.startswith("<3>appliance-gpu@0.service failed: ")


def test_a_cpu_slot_has_no_gpu_to_blame(paths: Paths) -> None:
    bind_slots(paths.gpus, ["CPU-0"])
    assert report_failure.main(["appliance-gpu@0.service"]) == 0
    (event,) = read_events(paths.events)
    assert "gpu_state" not in event and event["cause"] == "exit-code, exit status 1"


def test_broken_state_files_do_not_stop_the_report(paths: Paths) -> None:
    paths.gpus.write_text("{")
    paths.gpu_run(3).mkdir(parents=True)
    paths.launcher_state(3).write_text("[]")
    assert report_failure.main(["appliance-gpu@3.service"]) == 0
    (event,) = read_events(paths.events)
    assert event["gpu"] == 3 and "uuid" not in event


def test_a_gateway_has_no_gpu(paths: Paths) -> None:
    assert report_failure.main(["appliance-gateway@stable.service"]) == 0
    (event,) = read_events(paths.events)
    assert "gpu" not in event and event["cause"] == "exit-code, exit status 1"


@pytest.mark.parametrize("unit", ["", "a b", "../x", "x\n", "a" * 300])
def test_no_unit_name(unit: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert report_failure.main([unit]) == 2
    assert "no unit name" in capsys.readouterr().err


def test_programs_that_are_missing_or_hang(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(report_failure, "_TIMEOUT_SECONDS", 0.1)
    assert report_failure._output(["/nonexistent"]) == []
    assert report_failure._output(["/bin/sleep", "10"]) == []
    assert report_failure._output(["/bin/echo", "a\nb"]) == ["a", "b"]
    assert capsys.readouterr().err.count("warning") == 2
