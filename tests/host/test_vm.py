"""The qemu machine does what the tests that use it rely on, and leaves nothing behind."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.host import plugin
from tests.host.roots import HostError
from tests.host.test_box import eventually, gone
from tests.host.vm import Machine, remove_abandoned

CHECKOUT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.vm, pytest.mark.xdist_group("vm")]


def test_is_a_whole_bare_server(vm: Machine) -> None:
    vm.wait_running()
    assert vm.run("systemd-detect-virt --container", check=False).stdout.strip() == "none"
    assert vm.read("/etc/debian_version").startswith("12.")
    controllers = set(vm.read("/sys/fs/cgroup/cgroup.controllers").split())
    assert {"cpu", "cpuset", "io", "memory", "pids"} <= controllers
    for absent in ("import gi", "import pydbus", "import ensurepip"):  # what our bundle has to bring
        assert vm.run(f"python3 -c '{absent}'", check=False).returncode != 0
    for program in ("iptables", "conntrack", "gcc", "pip3"):
        assert vm.run(f"command -v {program}", check=False).returncode != 0


def test_memory_max_kills_what_is_too_big(vm: Machine) -> None:
    scope = "systemd-run --scope --quiet --unit hog -p MemoryMax=64M -p MemorySwapMax=0 python3 -c"
    assert vm.run(f"{scope} 'bytearray(16 << 20)'", check=False).returncode == 0
    assert vm.run(f"{scope} 'bytearray(256 << 20)'", check=False).returncode == 137
    vm.wait_until(lambda: "oom-kill" in vm.run("journalctl --unit hog.scope").stdout, "the kill is in the journal")
    vm.run("systemctl reset-failed hog.scope", check=False)


def test_cpu_quota_bites(vm: Machine) -> None:
    """A ratio of the guest's own clocks, so that the speed of the emulation does not matter."""
    burn = (
        "from time import monotonic, process_time\nwall, used = monotonic(), process_time()\n"
        "while monotonic() < wall + 4: pass\nprint((process_time() - used) / (monotonic() - wall))"
    )
    share = vm.run(f"systemd-run --scope --quiet -p CPUQuota=25% python3 -c '{burn}'").stdout
    assert 0.05 < float(share) < 0.35


SERVER = """
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
ThreadingHTTPServer.request_queue_size = 64
ThreadingHTTPServer(("", 8000), SimpleHTTPRequestHandler).serve_forever()
"""


@contextmanager
def served(vm: Machine) -> Iterator[None]:
    """/file on port 8000 of the machine, soon."""
    vm.run("mkdir -p /srv/www && echo inside > /srv/www/file")
    vm.write("/srv/serve.py", SERVER)
    vm.run("systemd-run --unit www --working-directory=/srv/www python3 /srv/serve.py")
    try:
        yield
    finally:
        vm.run("systemctl stop www; rm -r /srv/www /srv/serve.py")


def test_ports_lead_in_and_nothing_leads_out(vm: Machine) -> None:
    with served(vm):
        url = f"http://127.0.0.1:{vm.port(8000)}/file"
        assert vm.port(8000) == vm.port(8000)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            reach = f'import socket; socket.create_connection(("10.0.2.2", {port}), 3)'  # qemu's name for this machine
            assert vm.run(f"python3 -c '{reach}'", check=False).returncode != 0
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10) as answer:
                    assert answer.read() == b"inside\n"
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.3)


def test_many_clients_at_once_lose_no_connection(vm: Machine) -> None:
    """Each with a port of its own; through a single one 2 of some 300 connections were reset on a busy machine."""
    ports = [vm.port(8000, number) for number in range(16)]
    assert len(set(ports)) == 16 and ports[0] == vm.port(8000)

    def ask(port: int) -> list[bytes]:
        answers = []
        for _ in range(4):
            connection = http.client.HTTPConnection("127.0.0.1", port, 120, source_address=("127.0.0.1", 0))
            connection.request("GET", "/file")
            answers.append(connection.getresponse().read())
            connection.close()
        return answers

    with served(vm), ThreadPoolExecutor(len(ports)) as pool:
        vm.run("until ss -ltn | grep -q :8000; do sleep 0.3; done", timeout=60)
        assert set(itertools.chain.from_iterable(pool.map(ask, ports))) == {b"inside\n"}


def test_files_and_users(vm: Machine, tmp_path: Path) -> None:
    vm.write("/srv/a/b c", "text\n", mode=0o600)
    assert vm.read("/srv/a/b c") == "text\n"
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/run.sh").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "tree/run.sh").chmod(0o755)
    vm.copy(tmp_path / "tree", "/srv/a/copied")
    assert vm.run("/srv/a/copied/run.sh").stdout == "ran\n"
    assert vm.run("id -un", user="admin").stdout == "admin\n"
    assert vm.run("sudo -n id -un", user="admin").stdout == "root\n"
    assert vm.run("cat", input="given").stdout == "given"
    with pytest.raises(HostError, match=r"status 3\n(.|\n)*reason"):
        vm.run("echo reason >&2; exit 3")
    vm.run("rm -r /srv/a")


def test_the_inventory_is_what_ssh_needs(vm: Machine, tmp_path: Path) -> None:
    """As Ansible calls ssh: its own options, then the arguments of the inventory."""
    inventory = json.loads(vm.write_inventory(tmp_path / "hosts.json", user="admin", marker=1).read_text())
    host = inventory["gpu_hosts"]["hosts"]["gpuhost"]
    assert host["marker"] == 1 and host["ansible_become"] is True
    command = f"ssh {host['ansible_ssh_args']} -o User={host['ansible_user']} {host['ansible_host']} id -un"
    assert subprocess.run(command, shell=True, capture_output=True, text=True, timeout=100).stdout == "admin\n"  # noqa: S602


BOX_IN_MACHINE = """
from pathlib import Path
from tests.host.box import Box
box = Box(Path("/"), network=False)
try:
    box.start(timeout=400)  # emulated, on a busy machine
    print(",".join(box.controllers))
    scope = ["systemd-run", "--scope", "--quiet", "-p", "MemoryMax=64M", "-p", "MemorySwapMax=0", "python3", "-c"]
    print(*(box.run([*scope, f"bytearray({size} << 20)"], check=False).returncode for size in (16, 256)))
finally:
    box.stop()
"""


def test_in_a_box_of_a_cgroup_v2_host_all_controllers_bite(vm: Machine) -> None:
    """On development machines the v1 hierarchies may own them. The box shows the machine's own root."""
    vm.write("/srv/tests/__init__.py", "")
    vm.copy(CHECKOUT / "tests/host", "/srv/tests/host")
    before = vm.run("cat /proc/mounts; ls /sys/fs/cgroup").stdout
    command = "cd /srv && APPLIANCE_TEST_CACHE=/srv/cache python3 -"
    box = vm.run(command, input=BOX_IN_MACHINE, timeout=500).stdout.splitlines()
    assert {"cpu", "cpuset", "io", "memory", "pids"} <= set(box[0].split(","))
    assert box[1] in ("0 -9", "0 137")
    assert vm.run("cat /proc/mounts; ls /sys/fs/cgroup").stdout == before
    vm.run("rm -r /srv/tests /srv/cache")


WRITER = """
import os
for name, sync in (("kept", True), ("loose", False)):
    fd = os.open(f"/srv/{name}", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"x" * 100_000)
    if sync:
        os.fsync(fd)
directory = os.open("/srv", os.O_RDONLY)
os.fsync(directory)
os.write(os.open("/srv/after", os.O_WRONLY | os.O_CREAT), b"y")
"""


@pytest.mark.slow
def test_power_cut_and_reboot(new_machine: plugin.NewMachine) -> None:
    """What was synced is there after a power cut, with whole contents; the disk and the ports stay the same."""
    machine = new_machine()
    port, boot = machine.port(8000), machine.boot_id()
    machine.write("/root/writer.py", WRITER)
    machine.run("python3 /root/writer.py")
    machine.kill()
    assert not machine.alive()
    with pytest.raises(HostError, match="switched off"):
        machine.port(8001)
    machine.boot()
    assert machine.boot_id() != boot and machine.port(8000) == port
    assert machine.run("tr -d x < /srv/kept | wc -c; stat -c %s /srv/kept").stdout.split() == ["0", "100000"]
    assert machine.run("dmesg --level=emerg,alert,crit,err | grep -i ext4", check=False).stdout == ""
    if os.environ.get("APPLIANCE_FULL") == "1":
        boot = machine.boot_id()
        machine.reboot()
        assert machine.boot_id() != boot and machine.run("stat -c %s /srv/kept").stdout == "100000\n"
    machine.power_off()
    assert not machine.alive()


HOLDER = """
import time
from tests.host.vm import Machine, remove_abandoned
machine = Machine().start()
machine.run("true")
qemu = (machine.directory / "pid").read_text()
print(machine._guard.pid, machine.directory, machine._sockets, qemu, flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize("victim", ["test process", "guard"])
def test_no_qemu_is_left_after_sigkill(vm: Machine, victim: str) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout and select.select([holder.stdout], [], [], 280)[0]
        guard, directory, sockets, qemu = holder.stdout.readline().split()
        os.kill(holder.pid if victim == "test process" else int(guard), signal.SIGKILL)
        eventually(lambda: gone(int(qemu)), "qemu lives on")
        holder.kill()
    eventually(lambda: gone(int(guard)), "the guard lives on")
    if victim == "guard":  # nobody was there to clean up; the next machine does
        assert Path(directory).exists()
        remove_abandoned()
    eventually(lambda: not Path(directory).exists() and not Path(sockets).exists(), "the machine's files stay")
    assert vm.alive()
