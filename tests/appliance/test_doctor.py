"""`appliance doctor` on trees of healthy and of broken hosts: each fault is found, named, and comes with its fix."""

# ruff: noqa: E501 (lines of kernels, and a table)
from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from host_trees import (
    CLOSED_VERSION,
    DEVICES,
    NO_UUID,
    OLD_DEVICES,
    UUIDS,
    Commands,
    add_gpu,
    add_pci,
    add_release,
    make_dirs,
    nvidia_host,
    put,
    show,
)

from appliance.command import Result
from appliance.doctor import command as doctor
from appliance.doctor import install, kernel_log, nvidia, releases, system, watchdog
from appliance.doctor.report import Device, Finding, Host, Line, Space, Status, ok, run_checks
from appliance.gpus import bind_slots
from appliance.hostconfig import Gateway, HostConfig, parse_config
from appliance.paths import Paths
from appliance.statefile import write_state
from tests.certificates import make_certificate

NODES = {
    "nvidiactl": Device(195, 255, 0o666),
    "nvidia0": Device(195, 0, 0o666),
    "nvidia1": Device(195, 1, 0o666),
    "nvidia-uvm": Device(510, 0, 0o666),
}
PERSISTENCED, FABRIC = "nvidia-persistenced.service", "nvidia-fabricmanager.service"
ACTIVE = {"LoadState": "loaded", "ActiveState": "active", "UnitFileState": "enabled", "NeedDaemonReload": "no"}
OURS = ["appliance.target", "appliance-gateway@stable.service", "appliance-gateway@canary.service"]
OURS += ["appliance-netfilter.service", "appliance-canary.service", "appliance-watchdog.service"]
OURS += ["appliance-gpu@0.service", "appliance-gpu@1.service"]
KERNEL_LOG = """\
2026-11-29T08:00:01+00:00 llm1 kernel: nvidia-nvlink: Nvlink Core is being initialized, major device number 238
2026-11-29T08:00:02+00:00 llm1 kernel: NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.82.07
"""
# As in NVIDIA's Xid documentation; the second form has no Xid number.
XID = "2026-11-29T09:00:00+00:00 llm1 kernel: NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
FALLEN = "2026-11-29T09:00:00+00:00 llm1 kernel: NVRM: GPU 0000:1b:00.0: GPU has fallen off the bus.\n"
OOM = "2026-11-29T09:10:00+00:00 llm1 kernel: oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/appliance.slice/appliance-gpu0.slice/a.scope,task_memcg=/appliance.slice/appliance-gpu0.slice/a.scope,task=python,pid=99,uid=870\n"
MEMINFO = "MemTotal:       528280000 kB\nMemFree: 1 kB\nHugePages_Total:       0\nHugePages_Free:        0\nHugepagesize:       2048 kB\n"


class Box:
    """A healthy host with two H200s that a test breaks."""

    def __init__(self, root: Path) -> None:
        self.root, self.paths = root, Paths.under(root)
        self.nodes: dict[str, Device] = dict(NODES)
        self.unit_states: dict[str, dict[str, str]] = {name: dict(ACTIVE) for name in [PERSISTENCED, *OURS]}
        self.unit_states["appliance-gpu@0.service"]["LimitMEMLOCK"] = "infinity"
        self.log = KERNEL_LOG
        self.space = Space(10**12, 5 * 10**11, 10**6)
        self.config: HostConfig | None = HostConfig()
        self.commands = Commands({
            "systemctl show": lambda argv: show(self.unit_states)(argv),
            "modinfo": "580.82.07\n",
            "journalctl": lambda argv: self.log,
            "timedatectl": "yes\n",
        })  # fmt: skip
        make_dirs(self.paths)
        nvidia_host(root)
        bind_slots(self.paths.gpus, UUIDS)
        add_release(self.paths, "a", slot="stable", golden=["NVIDIA-H200"])
        self.paths.config.write_text("schema = 1\n")
        put(root, "sys/fs/cgroup/cgroup.controllers", "cpuset cpu io memory hugetlb pids rdma misc\n")
        put(root, "proc/sys/net/ipv4/ip_unprivileged_port_start", "1024\n")
        put(root, "proc/uptime", "100000.50 700000.00\n")
        self.watchdog()
        put(root, "proc/cmdline", "BOOT_IMAGE=/vmlinuz-6.1.0 root=/dev/sda1 ro quiet\n")
        put(root, "proc/meminfo", MEMINFO)
        put(root, "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
        put(root, "etc/passwd", "root:x:0:0:root:/root:/bin/bash\nappliance:x:870:870::/var/lib/appliance:/bin/false\n")
        put(root, "etc/group", "root:x:0:\nappliance:x:870:\n")
        put(root, "proc/net/tcp", TCP_HEAD)
        put(root, "usr/lib/appliance/0.1.0/VERSION", "")
        (self.paths.lib / "current").symlink_to("0.1.0")
        put(root, "usr/bin/appliance", "")

    def watchdog(self, gpu: dict[str, Any] | None = None, **changes: Any) -> None:
        """The state file of a watchdog that runs (as this process) and has looked just now; `gpu`: of GPU 1."""
        rows = [{"gpu": n, "uuid": UUIDS[n], "state": "HEALTHY", "reason": "", "needs": None, "probed_at": time.time()}
                for n in range(2)]  # fmt: skip
        rows[1] |= gpu or {}
        document = {"pid": os.getpid(), "status": "2 of 2 GPUs healthy", "nvml": "on", "maintenance": None}
        document |= {"since": 1000.0, "breaker": None, "saved": True, "gpus": rows} | changes
        write_state(self.paths.watchdog_state, document, schema=1, durable=False)

    def watchdog_unit(self, **changes: str) -> None:
        self.unit_states["appliance-watchdog.service"].update(changes)

    @property
    def host(self) -> Host:
        def device(path: Path) -> Device | None:
            return self.nodes.get(str(path.relative_to(self.root / "dev")))

        return Host(self.paths, self.config, self.root, self.commands, device, lambda path: self.space)


TCP_HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode                     \n"


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


def only(found: Finding | list[Finding]) -> Finding:
    return found[0] if isinstance(found, list) else found


def test_a_healthy_host_is_ok_everywhere(box: Box) -> None:
    lines = run_checks(doctor.GROUPS, box.host)
    bad = {(line.check, line.finding.text) for line in lines if line.finding.status is not Status.OK}
    assert {check for check, _ in bad} <= {"python"}, bad  # the test's own Python may have no gi
    assert len({line.check for line in lines}) == sum(map(len, doctor.GROUPS.values()))


def test_a_cpu_host_needs_nothing_of_nvidia(box: Box) -> None:
    shutil.rmtree(box.root / "proc/driver")
    shutil.rmtree(box.root / "sys/bus")
    put(box.root, "proc/devices", "Character devices:\n  1 mem\n\nBlock devices:\n")
    box.nodes, box.config = {}, parse_config(b'[gpus]\nbackend = "cpu"', where="f")
    box.paths.gpus.unlink()
    bind_slots(box.paths.gpus, ["CPU-0"])
    lines = run_checks({"nvidia": nvidia.CHECKS}, box.host)
    assert {line.finding.status for line in lines} == {Status.OK}
    bind_slots(box.paths.gpus, [UUIDS[0]])
    assert only(nvidia.gpus(box.host)).status is Status.FAILED


Break = Callable[[Box], Any]
BROKEN: list[tuple[Any, Break, Status, str]] = [
    (nvidia.driver, lambda b: put(b.root, "proc/driver/nvidia/version", CLOSED_VERSION), Status.FAILED,
     "driver 535.104.05 is too old"),
    (nvidia.driver, lambda b: put(b.root, "proc/driver/nvidia/version", "nonsense"), Status.UNKNOWN, "cannot read"),
    (nvidia.driver, lambda b: (b.root / "proc/driver/nvidia/version").unlink(), Status.FAILED,
     "2 GPUs, but the NVIDIA driver is not loaded"),
    (nvidia.driver, lambda b: (shutil.rmtree(b.root / "proc/driver"), shutil.rmtree(b.root / "sys/bus")),
     Status.FAILED, "no NVIDIA GPU is on the PCI bus"),
    (nvidia.module, lambda b: b.commands.answers.update(modinfo="590.10\n"), Status.FAILED, "590.10 is installed"),
    (nvidia.module, lambda b: b.commands.answers.pop("modinfo"), Status.UNKNOWN, "modinfo is not installed"),
    (nvidia.nodes, lambda b: put(b.root, "proc/devices", "Character devices:\n  1 mem\n"), Status.FAILED,
     "neither nvidia nor nvidia-frontend"),
    (nvidia.nodes, lambda b: b.nodes.pop("nvidia1"), Status.FAILED, "/dev/nvidia1 is not there"),
    (nvidia.nodes, lambda b: b.nodes.pop("nvidiactl"), Status.FAILED, "/dev/nvidiactl is not there"),
    (nvidia.nodes, lambda b: b.nodes.update({"nvidia-uvm": Device(511, 0, 0o666)}), Status.FAILED,
     "/dev/nvidia-uvm is 511:0, the driver has 510:0"),
    (nvidia.nodes, lambda b: b.nodes.update({"nvidia0": Device(195, 1, 0o666)}), Status.FAILED, "/dev/nvidia0 is 195:1"),
    (nvidia.nodes, lambda b: b.nodes.update({"nvidia0": Device(195, 0, 0o660)}), Status.DEGRADED, "mode 0660"),
    (nvidia.nodes, lambda b: put(b.root, "proc/devices", DEVICES.replace("510 nvidia-uvm\n", "")), Status.FAILED,
     "nvidia-uvm is not loaded"),
    (nvidia.gpus, lambda b: shutil.rmtree(b.root / "proc/driver/nvidia/gpus/0000:1b:00.0"), Status.FAILED,
     f"gpu 0: {UUIDS[0]} is bound and not there"),
    (nvidia.gpus, lambda b: add_gpu(b.root, 2, NO_UUID), Status.DEGRADED, "has no UUID for it yet"),
    (nvidia.gpus, lambda b: add_gpu(b.root, 2, UUIDS[0].replace("5fd4", "0000")), Status.DEGRADED, "has no slot"),
    (nvidia.gpus, lambda b: b.paths.gpus.unlink(), Status.DEGRADED, "has no slot"),
    (nvidia.mig, lambda b: put(b.root, "proc/driver/nvidia/capabilities/gpu1/mig/gi1/access", ""), Status.FAILED,
     f"MIG instances on {UUIDS[1]}"),
    (nvidia.persistence, lambda b: b.unit_states[PERSISTENCED].update(ActiveState="inactive"), Status.DEGRADED,
     "is inactive"),
    (nvidia.persistence, lambda b: b.unit_states.pop(PERSISTENCED), Status.DEGRADED, "not installed"),
    (nvidia.persistence, lambda b: b.commands.answers.clear(), Status.UNKNOWN, "systemctl does not answer"),
    (nvidia.fabric, lambda b: add_pci(b.root, "0000:05:00.0", "0x10de", "0x068000"), Status.FAILED,
     "1 NVSwitches, but nvidia-fabricmanager.service is not installed: CUDA answers 802"),
    (nvidia.fabric, lambda b: (add_pci(b.root, "0000:05:00.0", "0x10de", "0x068000"),
                               b.unit_states.update({FABRIC: ACTIVE | {"ActiveState": "failed"}})),
     Status.FAILED, "is failed: CUDA answers 802"),
    (kernel_log.nvrm, lambda b: setattr(b, "log", KERNEL_LOG + XID), Status.DEGRADED, "Xid 79 on 0000:1b:00"),
    (kernel_log.nvrm, lambda b: setattr(b, "log", KERNEL_LOG + FALLEN), Status.DEGRADED, "fallen off the bus"),
    (kernel_log.nvrm, lambda b: setattr(b, "log", ""), Status.UNKNOWN, "no kernel messages"),
    (kernel_log.oom, lambda b: setattr(b, "log", KERNEL_LOG + OOM), Status.DEGRADED, "appliance-gpu0.slice/a.scope"),
    (system.cgroup, lambda b: put(b.root, "sys/fs/cgroup/cgroup.controllers", "cpu pids"), Status.FAILED,
     "without cpuset, memory"),
    (system.cgroup, lambda b: (b.root / "sys/fs/cgroup/cgroup.controllers").unlink(), Status.FAILED, "no cgroup v2"),
    (system.cgroup, lambda b: ((b.root / "sys/fs/cgroup/cgroup.controllers").unlink(),
                               put(b.root, "sys/fs/cgroup/unified/cgroup.controllers", "")), Status.FAILED, "hybrid"),
    (system.memlock, lambda b: b.unit_states["appliance-gpu@0.service"].update(LimitMEMLOCK="8388608"),
     Status.DEGRADED, "LimitMEMLOCK=8388608"),
    (system.memlock, lambda b: b.unit_states.pop("appliance-gpu@0.service"), Status.UNKNOWN, "not installed"),
    (system.disk, lambda b: setattr(b, "space", Space(10**12, 10**8, 10**6)), Status.FAILED, "100 MB free of 1.0 TB"),
    (system.disk, lambda b: setattr(b, "space", Space(10**12, 10**10, 10**6)), Status.DEGRADED, "10.0 GB free"),
    (system.disk, lambda b: setattr(b, "space", Space(10**12, 5 * 10**11, 5)), Status.DEGRADED, "5 inodes free"),
    (system.clock, lambda b: b.commands.answers.update(timedatectl="no\n"), Status.DEGRADED, "not synchronized"),
    (system.clock, lambda b: b.commands.answers.pop("timedatectl"), Status.UNKNOWN, "timedatectl is not installed"),
    (system.cmdline, lambda b: put(b.root, "proc/cmdline", "ro cgroup_disable=memory"), Status.FAILED, "takes MemoryMax away"),
    (system.hugepages, lambda b: put(b.root, "proc/meminfo", MEMINFO.replace("Total:       0", "Total: 200000")),
     Status.DEGRADED, "in huge pages"),
    (install.user, lambda b: put(b.root, "etc/passwd", "xappliance:x:1:1::/:/bin/sh\n"), Status.FAILED, "no user"),
    (install.user, lambda b: put(b.root, "etc/group", ""), Status.FAILED, "no group"),
    (install.units, lambda b: b.unit_states.pop("appliance-gpu@1.service"), Status.FAILED, "gpu@1.service is not-found"),
    (install.units, lambda b: b.unit_states["appliance.target"].update(UnitFileState="disabled"), Status.DEGRADED,
     "not enabled: gone after a reboot"),
    (install.units, lambda b: b.unit_states["appliance-gateway@stable.service"].update(
        ActiveState="failed", Result="exit-code"), Status.FAILED, "has failed (exit-code)"),
    (install.units, lambda b: b.unit_states["appliance-canary.service"].update(
        ActiveState="activating", SubState="auto-restart", Result="exit-code", ExecMainStatus="1", NRestarts="3"),
     Status.FAILED, "canary.service has ended (exit-code, exit status 1) and is started again, 3 times"),
    (install.units, lambda b: b.unit_states["appliance-canary.service"].update(
        SubState="running", NRestarts="3", ActiveEnterTimestampMonotonic="99998000000"),
     Status.DEGRADED, "canary.service has ended 3 times by itself"),
    (install.units, lambda b: b.watchdog_unit(ActiveState="failed", Result="exit-code"), Status.FAILED,
     "appliance-watchdog.service has failed"),
    (watchdog.watchdog, lambda b: b.watchdog_unit(ActiveState="inactive"), Status.FAILED,
     "the watchdog does not run (inactive)"),
    (watchdog.watchdog, lambda b: b.watchdog_unit(ActiveState="failed", Result="exit-code", ExecMainStatus="4"),
     Status.FAILED, "exit status 4, refused: its policy"),
    (watchdog.watchdog, lambda b: b.watchdog_unit(ActiveState="activating", SubState="auto-restart", NRestarts="7"),
     Status.FAILED, "the watchdog ends again and again (7 restarts)"),
    (watchdog.watchdog, lambda b: b.unit_states.pop("appliance-watchdog.service"), Status.FAILED, "is not-found"),
    (watchdog.watchdog, lambda b: b.paths.watchdog_state.unlink(), Status.FAILED, "has not run since this host booted"),
    (watchdog.watchdog, lambda b: b.watchdog(breaker="3 GPUs failed within 600 s"), Status.FAILED,
     "automation is stopped: 3 GPUs failed"),
    (watchdog.watchdog, lambda b: b.watchdog(maintenance={"reason": "kernel", "since": 1.0}), Status.DEGRADED,
     "in maintenance, it does nothing: kernel"),
    (watchdog.watchdog, lambda b: b.watchdog(saved=False), Status.FAILED, "gpus.json cannot be written"),
    (watchdog.watchdog, lambda b: b.watchdog({"state": "QUARANTINED", "needs": "rma", "reason": "xid:79"}),
     Status.FAILED, "watchdog: gpu 1 is quarantined and needs rma: xid:79"),
    (watchdog.watchdog, lambda b: b.watchdog({"probed_at": time.time() - 185}), Status.FAILED,
     "gpu 1 was last probed 3m05s"),
    (watchdog.watchdog, lambda b: b.watchdog({"probed_at": None}), Status.FAILED, "gpu 1 was never probed"),
    (install.units, lambda b: b.unit_states["appliance.target"].update(NeedDaemonReload="yes"), Status.DEGRADED,
     "changed on disk"),
    (install.config, lambda b: b.paths.config.write_text('[gateway]\nhost = "0.0.0.0"\nauth = "none"'),
     Status.DEGRADED, "answers everybody"),
    (install.state_files, lambda b: put(b.root, "var/lib/appliance/holds/gpu0.json", "{"), Status.FAILED,
     "gpu0.json is not JSON"),
    (install.code, lambda b: (b.paths.lib / "current").unlink(), Status.FAILED, "does not lead to an installed version"),
    (releases.releases, lambda b: (b.paths.release("a") / "model/config.json").write_text("{ }"), Status.FAILED,
     "release a: model/config.json: 3 bytes, its manifest says 2"),
    (releases.releases, lambda b: (b.paths.release("a") / "model/config.json").unlink(), Status.FAILED, "No such file"),
    (releases.releases, lambda b: (add_release(b.paths, "b") / "manifest.json").unlink(), Status.DEGRADED,
     "release b: manifest.json is missing"),
    (releases.slots, lambda b: b.paths.slot_pointer("stable").unlink(), Status.FAILED, "nothing is served"),
    (releases.slots, lambda b: shutil.rmtree(b.paths.release("a")), Status.FAILED, "points at a, which is not there"),
    (releases.golden, lambda b: shutil.rmtree(b.paths.release("a") / "golden"), Status.DEGRADED, "NVIDIA-H200"),
]  # fmt: skip


@pytest.mark.parametrize("check, damage, status, words", BROKEN)
def test_each_fault_is_found_and_comes_with_its_fix(
    box: Box, check: Any, damage: Break, status: Status, words: str
) -> None:
    assert {finding.status for finding in _all(check(box.host))} == {Status.OK}  # before
    damage(box)
    found = [finding for finding in _all(check(box.host)) if finding.status is not Status.OK]
    assert found and found[0].status is status and words in found[0].text, found
    assert found[0].fix or status is Status.UNKNOWN


def _all(found: Finding | list[Finding]) -> list[Finding]:
    return found if isinstance(found, list) else [found]


def test_both_names_of_major_195_are_known(box: Box) -> None:
    """nvidia-frontend up to driver 550.40 (nvidia-container-toolkit#324); nvidia-caps-imex-channels is no nvidia-caps."""
    put(box.root, "proc/devices", OLD_DEVICES)
    assert only(nvidia.nodes(box.host)) == ok("4 nodes, majors 195 and 510 (nvidia-uvm)")
    majors = nvidia.character_majors(DEVICES)
    assert majors["nvidia-caps"] == {237} and "not-a-character-device" not in majors


def test_gpus_of_another_driver_are_named(box: Box) -> None:
    (box.root / "proc/driver/nvidia/version").unlink()
    put(box.root, "sys/bus/pci/drivers/nouveau/bind", "")
    for device in (box.root / "sys/bus/pci/devices").iterdir():
        (device / "driver").symlink_to("../../drivers/nouveau")
    assert "belong to nouveau" in only(nvidia.driver(box.host)).text


def test_without_systemd_the_watchdogs_own_word_counts(box: Box) -> None:
    """In a container: unknown, and failed where its process is gone."""
    box.commands.answers.clear()
    assert only(watchdog.watchdog(box.host)).status is Status.UNKNOWN
    box.watchdog(pid=2**22 + 1)  # above PID_MAX_LIMIT
    assert only(watchdog.watchdog(box.host)).status is Status.FAILED
    box.watchdog({"probed_at": None}, since=time.time())  # it has just started
    assert only(watchdog.watchdog(box.host)).status is Status.UNKNOWN
    box.watchdog({"probed_at": None}, nvml="off")  # backend cpu: nothing to probe
    assert only(watchdog.watchdog(box.host)).status is Status.UNKNOWN


def test_a_restart_long_ago_is_forgotten(box: Box) -> None:
    box.unit_states["appliance-canary.service"].update(NRestarts="1", ActiveEnterTimestampMonotonic="99000000000")
    assert only(install.units(box.host)).status is Status.OK


@pytest.mark.parametrize("how", ["", "drop-in", "sysctl"])
def test_a_low_port_is_fine_where_it_may_be_bound(box: Box, how: str) -> None:
    box.paths.config.write_text("[gateway]\nport = 443")
    if not how:
        [line] = run_checks({"install": {"config": install.config}}, box.host)
        assert line.finding.status is Status.FAILED and "gateway.port: 443 is below 1024" in line.finding.text
        assert "low-port.conf" in (line.finding.fix or "")
        return
    if how == "sysctl":
        put(box.root, "proc/sys/net/ipv4/ip_unprivileged_port_start", "80\n")
    else:  # as systemctl 252 prints it
        box.commands.answers = {"systemctl show --property=AmbientCapabilities": "cap_net_bind_service\n"}
    assert install.config(box.host).status is Status.OK


def test_real_device_nodes_are_read() -> None:
    host = Host(Paths(), None)
    assert host.device(Path("/dev/null")) == Device(1, 3, os.stat("/dev/null").st_mode & 0o7777)
    assert host.device(Path("/etc/hostname")) is None and host.device(Path("/dev/nope")) is None
    usage = shutil.disk_usage("/")
    assert host.space(Path("/")).total_bytes == usage.total


# -- ports


def socket_line(address: str, port: int, inode: int, state: str = "0A") -> str:
    return f"   0: {address}:{port:04X} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000   870        0 {inode} 1 0000 100 0 0 10 0\n"


def owner(box: Box, pid: int, name: str, inode: int, cgroup: str) -> None:
    put(box.root, f"proc/{pid}/comm", f"{name}\n")
    put(box.root, f"proc/{pid}/cgroup", f"0::{cgroup}\n")
    (box.root / f"proc/{pid}/fd").mkdir()
    (box.root / f"proc/{pid}/fd/5").symlink_to(f"socket:[{inode}]")


def test_a_port_that_another_program_has_is_named(box: Box) -> None:
    put(box.root, "proc/net/tcp", TCP_HEAD + socket_line("0100007F", 8000, 77))
    assert only(install.ports(box.host)).status is Status.UNKNOWN  # not root: whose it is cannot be seen
    owner(box, 321, "nginx", 77, "/system.slice/nginx.service")
    found = only(install.ports(box.host))
    assert found.status is Status.FAILED and "gateway.port 127.0.0.1:8000 is taken by nginx (PID 321)" in found.text
    put(box.root, "proc/321/cgroup", "0::/appliance.slice/appliance-gateway@stable.service\n")
    assert only(install.ports(box.host)).status is Status.OK


@pytest.mark.parametrize(
    "host, table, address, taken",
    [
        ("127.0.0.1", "tcp", "0100007F", True),
        ("127.0.0.1", "tcp", "00000000", True),  # 0.0.0.0
        ("127.0.0.1", "tcp", "0200007F", False),  # 127.0.0.2
        ("0.0.0.0", "tcp", "0101A8C0", True),  # 192.168.1.1
        ("127.0.0.1", "tcp6", "0" * 32, True),  # [::] takes IPv4 as well
        ("127.0.0.1", "tcp6", "00000000000000000000000001000000", False),  # [::1]
        ("::1", "tcp6", "00000000000000000000000001000000", True),
        ("::", "tcp", "0100007F", True),
    ],
)
def test_addresses_that_exclude_each_other(box: Box, host: str, table: str, address: str, taken: bool) -> None:
    box.config = parse_config(f'[gateway]\nhost = "{host}"\nauth = "none"'.encode(), where="f")
    put(box.root, f"proc/net/{table}", TCP_HEAD + socket_line(address, 8000, 77))
    put(box.root, "proc/net/tcp6" if table == "tcp" else "proc/net/tcp", TCP_HEAD)
    owner(box, 321, "nginx", 77, "/system.slice/nginx.service")
    assert (only(install.ports(box.host)).status is Status.FAILED) == taken


def test_this_machines_own_listeners_are_parsed() -> None:
    """The oracle is the kernel: a socket of ours must be found at its address, port and inode."""
    for family, address, table in ((socket.AF_INET, "127.0.0.1", "tcp"), (socket.AF_INET6, "::1", "tcp6")):
        with socket.socket(family) as listener:
            try:
                listener.bind((address, 0))
            except OSError:
                continue  # no IPv6 here
            listener.listen()
            port, inode = listener.getsockname()[1], os.fstat(listener.fileno()).st_ino
            found = list(install.listening(Path(f"/proc/net/{table}").read_text()))
            assert [str(a) for a, p, i in found if p == port and i == inode] == [address]


def test_connections_are_no_listeners(box: Box) -> None:
    put(box.root, "proc/net/tcp", TCP_HEAD + socket_line("0100007F", 8000, 77, state="01"))
    assert only(install.ports(box.host)).status is Status.OK


# -- the command


def run(box: Box, capsys: pytest.CaptureFixture[str], **given: Any) -> tuple[int, str]:
    args = argparse.Namespace(**({"only": None, "wait": 0.0, "quiet": False, "json": False} | given))
    code = doctor.run(args, lambda: box.host)
    return code, capsys.readouterr().out


def test_exit_codes_text_and_json(box: Box, capsys: pytest.CaptureFixture[str]) -> None:
    box.commands.answers.pop("timedatectl")
    code, out = run(box, capsys, only=["system"])
    assert code == 0 and "unknown   clock" in out and out.splitlines()[-1].endswith("1 unknown")  # shown, never failed
    box.nodes.clear()
    code, out = run(box, capsys)
    assert code == 1 and "failed    nodes" in out and "fix: `systemctl start appliance-gpu-nodes`" in out
    code, out = run(box, capsys, json=True, only=["nvidia"])
    document = json.loads(out)
    assert code == 1 and document["schema"] == 1 and document["ok"] is False and document["counts"]["failed"] == 4
    assert {check["group"] for check in document["checks"]} == {"nvidia"}
    code, out = run(box, capsys, quiet=True, only=["nvidia"])
    assert "ok        driver" not in out and out.count("failed    nodes") == 4


def test_a_check_that_breaks_is_unknown_and_the_others_go_on(box: Box) -> None:
    def breaks(host: Host) -> Finding:
        raise ZeroDivisionError("oops")

    lines = run_checks({"g": {"one": breaks, "two": lambda host: ok("fine")}}, box.host)
    assert [line.finding.status for line in lines] == [Status.UNKNOWN, Status.OK] and "oops" in lines[0].finding.text


def test_a_broken_configuration_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("APPLIANCE_ROOT", str(tmp_path))
    put(tmp_path, "etc/appliance/appliance.toml", "[gateway]\nprot = 1")
    args = argparse.Namespace(only=["install"], wait=0.0, quiet=False, json=False)
    assert doctor.run(args) == 1
    assert "gateway.prot: unknown key; did you mean port?" in capsys.readouterr().out


def test_without_a_configuration_nobody_knows_whether_it_is_an_nvidia_host(box: Box) -> None:
    """A CPU host must not be told that its GPU fell off the bus."""
    shutil.rmtree(box.root / "proc/driver")
    shutil.rmtree(box.root / "sys/bus")
    box.nodes, box.config, box.log = {}, None, "NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.\n"
    box.paths.gpus.unlink()
    bind_slots(box.paths.gpus, ["CPU-0"])
    groups = {"nvidia": nvidia.CHECKS, "kernel": kernel_log.CHECKS, "releases": {"golden": releases.golden}}
    lines = run_checks(groups, box.host)
    assert {line.finding.status for line in lines} <= {Status.OK, Status.UNKNOWN}
    found = {line.check: line.finding for line in lines}
    for check, words in (("driver", "with backend cuda: the NVIDIA driver is not loaded"), ("gpus", "CPU-0 is bound"),
                         ("golden", "which devices serve")):  # fmt: skip
        assert found[check].status is Status.UNKNOWN and words in found[check].text
        assert found[check].text.startswith("the configuration cannot be read")
    box.config = HostConfig()
    assert nvidia.driver(box.host).status is Status.FAILED


def test_wait_for_the_nodes_at_boot(box: Box, capsys: pytest.CaptureFixture[str]) -> None:
    """llama.cpp#27923: started before nvidia-uvm was ready, served on the CPU for ever."""
    uvm, looks = box.nodes.pop("nvidia-uvm"), []
    real = box.host

    def make() -> Host:
        looks.append(1)
        if len(looks) == 2:
            box.nodes["nvidia-uvm"] = uvm
        return replace(real)

    args = argparse.Namespace(only=["nvidia"], wait=30.0, quiet=False, json=True)
    assert doctor.run(args, make) == 0 and len(looks) == 3
    capsys.readouterr()
    box.nodes.pop("nvidia-uvm")
    began = time.monotonic()
    assert doctor.run(argparse.Namespace(**(vars(args) | {"wait": 0.6})), lambda: real) == 1
    assert 0.6 <= time.monotonic() - began < 20


def test_text_fits_and_is_plain_where_nobody_looks() -> None:
    lines = [Line("g", "check", Finding(Status.FAILED, "x\x1b[2J" * 100, "do this"))]
    out = list(doctor.text(lines, io.StringIO(), quiet=False))
    assert out[0].startswith("failed    check  x\\x1b[2J") and out[1] == "          fix: do this"
    assert out[2] == "0 ok, 0 degraded, 1 failed, 0 unknown"


def test_systemctl_that_answers_less_is_unknown(box: Box) -> None:
    box.commands.answers["systemctl show"] = Result(("systemctl",), 0, b"Id=appliance.target\n", b"")
    assert only(install.units(box.host)).status is Status.UNKNOWN


def test_a_canary_toml_that_nobody_can_read_is_found(box: Box, tmp_path: Path) -> None:
    check: dict[str, dict[str, Any]] = {"install": {"canary": install.canary_settings}}
    for text, status in (
        ("", "ok"),
        ("[policy]\nalpha = 0.01\n", "ok"),
        ("[policy\n", "failed"),
        ("[policy]\nx = 1", "failed"),
    ):
        put(tmp_path, "etc/appliance/canary.toml", text)
        [line] = run_checks(check, box.host)
        assert line.finding.status == status and "canary.toml" in line.finding.text, text
    assert line.finding.fix is not None


@pytest.mark.parametrize(
    ("days", "status", "says"),
    [((-1, 60), "ok", "can start"), ((-30, -2), "failed", "expired on 20"), ((-1, 5), "degraded", "in 5 days")],
)
def test_the_days_of_the_certificate(box: Box, tmp_path: Path, days: tuple[int, int], status: str, says: str) -> None:
    certificate, key = make_certificate(tmp_path / "made", days=days)
    put(tmp_path, "etc/appliance/credentials/tls-cert", certificate.read_text())
    put(tmp_path, "etc/appliance/credentials/tls-key", key.read_text())
    host = replace(box.host, config=HostConfig(gateway=Gateway(tls=True)))
    [line] = run_checks({"install": {"credentials": install.credentials}}, host)
    assert line.finding.status == status and says in line.finding.text
    assert (line.finding.fix is None) == (status == "ok")


def test_a_host_open_to_all_by_either_address_is_degraded(box: Box, tmp_path: Path) -> None:
    for key in ("host", "canary_host"):
        put(tmp_path, "etc/appliance/appliance.toml", f"[gateway]\nauth = 'none'\n{key} = '0.0.0.0'")
        found = install.config(box.host)
        assert found.status == "degraded" and "answers everybody" in found.text
