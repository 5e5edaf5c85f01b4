"""What preflight reads of a host (plugins/module_utils/host_probe.py), from trees with the texts of real hosts."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests.ansible.modules import load

probe = load("module_utils/host_probe")

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (dvs-builder)  Thu Oct\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.247.01  Mon May  5 14:45:37 UTC 2025\nGCC version: 12\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(("text", "version"), [(OPEN, "580.159.04"), (CLOSED, "535.247.01"), ("", None), ("?", None)])
def test_the_version_of_the_driver(tmp_path: Path, text: str, version: str | None) -> None:
    write(tmp_path, {"proc/driver/nvidia/version": text})
    assert probe.nvidia(tmp_path)["driver"] == version


def test_a_host_without_driver_but_with_a_gpu(tmp_path: Path) -> None:
    devices = "sys/bus/pci/devices"
    write(
        tmp_path,
        {
            f"{devices}/0000:1b:00.0/vendor": "0x10de\n", f"{devices}/0000:1b:00.0/class": "0x030200\n",  # 3D
            f"{devices}/0000:07:00.0/vendor": "0x10de\n", f"{devices}/0000:07:00.0/class": "0x068000\n",  # NVSwitch
            f"{devices}/0000:02:00.0/vendor": "0x1a03\n", f"{devices}/0000:02:00.0/class": "0x030000\n",  # BMC's VGA
            "proc/modules": "nouveau 2437120 0 - Live 0x0\ne1000e 1 0 - Live 0x0\n",
        },
    )  # fmt: skip
    found = probe.nvidia(tmp_path)
    assert found["pci_devices"] == ["0000:1b:00.0"] and found["driver"] is None
    assert found["modules"] == ["nouveau"] and found["gpus"] == [] and found["mig"] == []


@pytest.mark.parametrize(
    ("text", "there"),
    [("", False), ("\n", False), ("# one\n\n", False), (f"{'0' * 64}  ops\n", True), (f"# x\n{'0' * 64}\n", True)],
)
def test_keys_are_lines_that_are_no_comment(tmp_path: Path, text: str, there: bool) -> None:
    assert not probe.has_keys(tmp_path)
    write(tmp_path, {"etc/appliance/credentials/api-keys": text})
    assert probe.has_keys(tmp_path) == there


def test_mig_is_seen(tmp_path: Path) -> None:
    """MIG user guide, "Device Nodes and Capabilities"."""
    write(tmp_path, {"proc/driver/nvidia/capabilities/gpu2/mig/gi7/access": "DeviceFileMinor: 66\n"})
    assert probe.nvidia(tmp_path)["mig"] == ["gpu2"]


def test_an_empty_host_is_unknown_and_not_wrong(tmp_path: Path) -> None:
    assert probe.distribution(tmp_path) == {"id": None, "version": None, "name": None}
    assert probe.cgroup(tmp_path) == {"version": 1, "controllers": []}
    assert probe.memory_bytes(tmp_path) is None
    assert probe.slots(tmp_path) == []
    (tmp_path / "proc").mkdir()
    assert probe.listeners(tmp_path, [80]) == [] and probe.running_versions(tmp_path) == {}


def test_debian_12(tmp_path: Path) -> None:
    text = 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nNAME="Debian GNU/Linux"\nVERSION_ID="12"\nID=debian\n'
    write(tmp_path, {"etc/os-release": text, "sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory pids\n"})
    assert probe.distribution(tmp_path)["id"] == "debian" and probe.distribution(tmp_path)["version"] == "12"
    assert probe.cgroup(tmp_path) == {"version": 2, "controllers": ["cpuset", "cpu", "io", "memory", "pids"]}


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_who_listens_on_a_port_of_this_machine(family: socket.AddressFamily) -> None:
    """The real /proc: a listener of ours is found with its process, a connected socket is none."""
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1" if family == socket.AF_INET else "::1", 0))
        port = listener.getsockname()[1]
        assert probe.listeners(Path("/"), [port]) == [], "bound, but it does not listen yet"
        listener.listen()
        (row,) = probe.listeners(Path("/"), [port])
        assert row["port"] == port and row["pid"] == os.getpid() and row["process"]
    assert probe.listeners(Path("/"), [port]) == []


def test_versions_that_units_run(tmp_path: Path) -> None:
    """A launcher on the new code, a gateway that was not restarted, an engine of an older release (its right)."""
    line = "7f1 r-xp 00000000 08:01 1 /usr/lib/appliance/{}/venv/lib/python3.11/site-packages/msgspec/_core.so\n"
    units = {
        10: ("appliance.slice/appliance-gpu@0.service", "1.1"),
        11: ("appliance.slice/appliance-gateway@stable.service", "1.0"),
        12: ("appliance.slice/appliance-gateway@stable.service", "1.1"),  # a worker
        13: ("appliance.slice/appliance-gpu0.slice/appliance-gpu0-v1.scope", "1.0"),
        14: ("system.slice/ssh.service", "1.0"),
    }
    for pid, (path, version) in units.items():
        write(tmp_path, {f"proc/{pid}/cgroup": f"0::/{path}\n", f"proc/{pid}/maps": line.format(version)})
    assert probe.running_versions(tmp_path) == {
        "appliance-gpu@0.service": {"1.1"}, "appliance-gateway@stable.service": {"1.0", "1.1"}
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, None),
        ('{"id": "7", "release": "v2", "phase": "settled"}', None),
        ('{"id": "7", "release": "v2", "phase": "step"}', "run 7 of v2 (step)"),
        ("{", "a run whose file /var/lib/appliance/canary.json cannot be understood"),
        ("[]", "a run whose file /var/lib/appliance/canary.json cannot be understood"),
    ],
)
def test_canary_run(tmp_path: Path, text: str | None, said: str | None) -> None:
    if text is not None:
        (tmp_path / "var/lib/appliance").mkdir(parents=True)
        (tmp_path / "var/lib/appliance/canary.json").write_text(text)
    assert probe.canary_run(tmp_path) == said


def test_slots(tmp_path: Path) -> None:
    write(tmp_path, {"var/lib/appliance/gpus.json": '{"schema": 1, "gpus": [{"slot": 3}, {"slot": 0}]}'})
    assert probe.slots(tmp_path) == [0, 3]
    write(tmp_path, {"var/lib/appliance/gpus.json": "{"})
    assert probe.slots(tmp_path) == []


def test_free_space_of_a_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    found = probe.free_bytes(tmp_path / "a" / "b" / "c")
    assert found is not None and found == pytest.approx(
        os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize, rel=0.2
    )
