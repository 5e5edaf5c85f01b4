"""The namespace box does what the tests that use it rely on, and leaves nothing behind."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.host import plugin
from tests.host.box import Box
from tests.host.roots import HostError, cache_directory

CHECKOUT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.box

SCOPE = """
import subprocess, time
from pydbus import SystemBus
from gi.repository import GLib
child = subprocess.Popen(["sleep", "60"]).pid
manager = SystemBus().get("org.freedesktop.systemd1")
properties = [("PIDs", GLib.Variant("au", [child])), ("DevicePolicy", GLib.Variant("s", "closed"))]
manager.StartTransientUnit("test-a.scope", "fail", properties, [], timeout=10)
deadline = time.monotonic() + 10
while "test-a.scope" not in open(f"/proc/{child}/cgroup").read() and time.monotonic() < deadline:
    time.sleep(0.02)
print(open(f"/proc/{child}/cgroup").read())
"""
SERVER = """
import http.server, socket
class Server(http.server.HTTPServer):
    address_family = socket.AF_INET6
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"inside")
Server(("::", 8000), Handler).serve_forever()
"""


def eventually(condition: Callable[[], bool], what: str, seconds: float = 15.0) -> None:
    """The kernel frees namespaces and cgroups shortly after their last process has gone."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_boots_a_systemd_of_its_own(box: Box) -> None:
    assert box.read("/proc/1/comm").strip() == "systemd"
    assert box.run(["systemctl", "is-system-running"]).stdout.strip() == "running"
    assert box.run(["systemctl", "--failed", "--quiet"]).stdout == ""
    for kind in ("pid", "mnt", "net", "ipc", "uts", "cgroup"):
        assert box.run(["readlink", f"/proc/1/ns/{kind}"]).stdout.strip() != os.readlink(f"/proc/self/ns/{kind}")


def test_commands_are_in_its_cgroup(box: Box) -> None:
    assert "0::/init.scope" in box.read("/proc/self/cgroup").splitlines()


def test_is_reached_from_outside_and_has_netfilter(box: Box) -> None:
    box.write("/srv/server.py", SERVER)
    box.run(["systemd-run", "--unit=server", "python3", "/srv/server.py"])
    box.run(
        ["iptables", "-t", "nat", "-A", "PREROUTING", "-p", "tcp", "--dport", "80", "-j", "REDIRECT", "--to", "8000"]
    )
    urls = [f"http://{box.address}:8000/", f"http://{box.address}/"]
    urls += [f"http://[{box.address6}]:8000/"] if box.address6 else []
    for url in urls:
        deadline = time.monotonic() + 20
        while True:
            try:
                with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5) as answer:
                    assert answer.read() == b"inside"
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
    if shutil.which("iptables-save"):
        ours = subprocess.run(["iptables-save", "-t", "nat"], capture_output=True, text=True).stdout
        assert "--to-ports 8000" not in ours


def test_has_no_way_out(new_box: plugin.NewBox) -> None:
    alone = new_box(network=False)
    links = alone.run(["ip", "-o", "link"]).stdout
    assert links.count("\n") == 1 and "lo:" in links and "LOOPBACK,UP" in links
    assert new_box().run(["ip", "route", "show", "default"]).stdout == ""


def test_scopes_through_pydbus_and_busctl(box: Box) -> None:
    assert "/test-a.scope" in box.run(["python3", "-"], input=SCOPE).stdout
    busctl = ["busctl", "call", "org.freedesktop.systemd1", "/org/freedesktop/systemd1"]
    unit = box.run([*busctl, "org.freedesktop.systemd1.Manager", "GetUnit", "s", "test-a.scope"]).stdout
    assert unit.startswith('o "/org/freedesktop/systemd1/unit/')
    assert box.show("test-a.scope", "ActiveState", "DevicePolicy") == {
        "ActiveState": "active",
        "DevicePolicy": "closed",
    }


def test_device_filters_bite(box: Box) -> None:
    """The node is the kernel log's under another name: nothing that DevicePolicy=closed lets through anyway."""
    for minor, name in ((11, "granted"), (4, "other")):
        box.run(["mknod", f"/dev/{name}", "c", "1", str(minor)])
    read = ["dd", "count=0", "of=/dev/null", "status=none"]
    scope = ["systemd-run", "--scope", "--quiet", "-p", "DevicePolicy=closed"]
    box.run([*read, "if=/dev/granted"])  # without a filter
    box.run([*scope, "-p", "DeviceAllow=/dev/granted rw", *read, "if=/dev/granted"])
    for denied in (
        [*scope, *read, "if=/dev/granted"],
        [*scope, "-p", "DeviceAllow=/dev/granted rw", *read, "if=/dev/other"],
    ):
        done = box.run(denied, check=False)
        assert done.returncode != 0 and "Operation not permitted" in done.stderr


def test_memory_max_kills(box: Box) -> None:
    if "memory" not in box.controllers:
        pytest.skip("this machine's memory controller is not in cgroup v2 (tested in the qemu machine)")
    hog = ["systemd-run", "--scope", "--quiet", "-p", "MemoryMax=50M", "-p", "MemorySwapMax=0"]
    assert box.run([*hog, "python3", "-c", "bytearray(200 << 20)"], check=False).returncode in (137, -9)


def test_binds_are_read_only_unless_asked(new_box: plugin.NewBox, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "file").write_text("outside")
    box = new_box(bind=[tmp_path, (tmp_path, "/srv/rw", "rw"), (tmp_path / "file", "/etc/one-file")])
    assert box.read("/etc/one-file") == box.read(f"{tmp_path}/file") == "outside"
    assert box.run(["touch", f"{tmp_path}/new"], check=False).returncode != 0
    box.run(["touch", "/srv/rw/new"])
    assert (tmp_path / "new").exists()
    with pytest.raises(HostError, match="must exist"):
        new_box(bind=["/no/such/path"])


def test_the_machine_outside_is_not_touched(box: Box, box_root: Path) -> None:
    """Also not by what follows absolute symlinks, chowns nodes or sets sysctls."""
    marker = f"appliance-test-{os.getpid()}"
    box.write(f"/var/run/{marker}", "x")
    box.run(["ln", "-s", "/run", "/srv/link"])
    box.write(f"/srv/link/{marker}-2", "x")
    assert not any(Path("/run").glob(f"{marker}*"))
    before = os.stat("/dev/null")
    box.run(["chown", "daemon", "/dev/null"])
    assert os.stat("/dev/null").st_uid == before.st_uid == 0
    assert box.run(["sh", "-c", "echo 1 > /proc/sys/kernel/pid_max"], check=False).returncode != 0
    box.run(["sysctl", "-qw", "net.ipv4.ip_forward=1"])
    box.write("/etc/hostname", "changed")
    assert (box_root / "etc/hostname").read_text() == "box\n"


def test_files_commands_and_users(box: Box, tmp_path: Path) -> None:
    box.write("/srv/a/b", "text\n", mode=0o640, owner="root:daemon")
    assert box.read("/srv/a/b") == "text\n" and box.exists("/srv/a/b") and not box.exists("/srv/a/c")
    assert box.run(["stat", "-c", "%a %U %G", "/srv/a/b"]).stdout == "640 root daemon\n"
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/run.sh").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "tree/run.sh").chmod(0o755)
    box.copy(tmp_path / "tree", "/opt/copied")
    assert box.run(["/opt/copied/run.sh"]).stdout == "ran\n"
    assert box.run(["id", "-un"], user="daemon").stdout == "daemon\n"
    assert box.run(["sh", "-c", 'pwd; echo "$X"'], cwd="/srv", env={"X": "y z"}).stdout == "/srv\ny z\n"
    with pytest.raises(HostError, match=r"status 3\n(.|\n)*reason"):
        box.run(["sh", "-c", "echo reason >&2; exit 3"])


def test_a_command_that_is_killed_dies_inside(box: Box) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        box.run(["sleep", "1234"], timeout=0.5)
    eventually(lambda: box.run(["pgrep", "-x", "sleep"], check=False).returncode == 1, "sleep runs on")


def test_waiting_for_a_unit_says_why_it_did_not_come(box: Box) -> None:
    box.run(["systemd-run", "--unit=good", "sleep", "60"])
    box.wait_for("good.service")
    box.run(["systemd-run", "--unit=bad", "sh", "-c", "echo the-reason; exit 7"])
    with pytest.raises(HostError, match=r"bad.service is failed(.|\n)*the-reason"):
        box.wait_for("bad.service")
    box.wait_for("bad.service", "failed")


def test_a_box_that_cannot_boot_says_why(tmp_path: Path, new_box: plugin.NewBox) -> None:
    (tmp_path / "root").mkdir()
    with pytest.raises(HostError, match=r"could not be made(.|\n)*No such file"):
        new_box(root=tmp_path / "root")


# -- nothing stays behind
def traces(number: int, cgroup: Path) -> list[str]:
    found = [
        f"mount {line}" for line in Path("/proc/self/mountinfo").read_text().splitlines() if f"boxes/{number} " in line
    ]
    found += [str(path) for path in (cgroup, cache_directory() / "boxes" / str(number)) if path.exists()]
    found += [path.name for path in Path("/sys/class/net").iterdir() if path.name == f"apbox{number}"]
    return found


def gone(pid: int) -> bool:
    return not Path("/proc", str(pid)).exists()


def check_nothing_left(box: Box, *pids: int) -> None:
    eventually(lambda: all(map(gone, (box.pid, *pids))), "a process lives on")
    eventually(lambda: not traces(box.number, box.cgroup), str(traces(box.number, box.cgroup)))


def test_nothing_is_left_after_stop(box_root: Path) -> None:
    with Box(box_root) as box:
        box.run(["systemd-run", "--unit=sleeper", "sleep", "1000"])
        inner = int((box.cgroup / "system.slice/sleeper.service/cgroup.procs").read_text())  # as counted out here
        sleeper = box.popen(["sleep", "1000"])
        assert traces(box.number, box.cgroup)
    check_nothing_left(box, inner)
    assert sleeper.wait(10) != 0
    box.stop()  # a second time: nothing to do


def test_nothing_is_left_after_an_exception(box_root: Path) -> None:
    with pytest.raises(KeyError), Box(box_root) as box:
        raise KeyError
    check_nothing_left(box)


def test_nothing_is_left_when_its_systemd_ends(box_root: Path) -> None:
    with Box(box_root) as box:
        box.run(["systemctl", "--no-block", "poweroff"], check=False)
        eventually(lambda: not box.alive(), "the box lives on")
        check_nothing_left(box)


HOLDER = """
import sys, time
from pathlib import Path
from tests.host.box import Box
box = Box(Path(sys.argv[1])).start()
box.run(["systemd-run", "--unit=sleeper", "sleep", "1000"])
print(box.number, box.cgroup, box.pid, box._parent.pid, flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize("victim", ["test process", "box parent"])
def test_nothing_is_left_after_sigkill(box_root: Path, victim: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(box_root)], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout and select.select([holder.stdout], [], [], 60)[0]
        number, cgroup, pid, parent = holder.stdout.readline().split()
        os.kill(holder.pid if victim == "test process" else int(parent), signal.SIGKILL)
        eventually(lambda: gone(int(pid)), "systemd lives on")
        holder.kill()
    eventually(lambda: gone(int(parent)), "the box's parent lives on")
    if victim == "box parent":  # nobody was there to clean up; the next box does
        with Box(box_root) as box:
            pass
        check_nothing_left(box)
    eventually(lambda: not traces(int(number), Path(cgroup)), str(traces(int(number), Path(cgroup))))


# -- what pytest shows
def run_pytest(tmp_path: Path, test: str, **environ: str) -> str:
    (tmp_path / "test_it.py").write_text(textwrap.dedent(test))
    command = [sys.executable, "-m", "pytest", "-p", "tests.host.plugin", "-p", "no:cacheprovider", "-rs"]
    command += ["-c", "/dev/null", "--rootdir", str(tmp_path), str(tmp_path / "test_it.py")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | environ
    return subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=250).stdout


@pytest.mark.parametrize("how", ["fixture", "with"])
def test_a_failed_test_shows_the_journal(tmp_path: Path, box_root: Path, how: str) -> None:
    use = {"fixture": "box = new_box()", "with": "with Box(box_root) as box:"}[how]
    body = (
        'box.run(["systemd-cat", "-t", "engine", "echo", "what-happened"]); box.run(["journalctl", "--sync"]); assert 0'
    )
    indent = "    " if how == "with" else ""
    test = f"from tests.host.box import Box\n\ndef test_it(new_box, box_root):\n    {use}\n    {indent}{body}\n"
    assert "what-happened" in run_pytest(tmp_path, test).partition("journal of the box")[2]


def test_missing_hosts_are_a_reason_to_skip_and_a_failure_where_they_are_wanted(tmp_path: Path) -> None:
    test = """
    from tests.host import plugin

    def test_it():
        plugin.require("nsenter is missing: apt-get install util-linux")
    """
    skipped = run_pytest(tmp_path, test, APPLIANCE_REQUIRE_HOSTS="")
    assert "1 skipped" in skipped and "nsenter is missing: apt-get install util-linux" in skipped
    assert "1 failed" in run_pytest(tmp_path, test, APPLIANCE_REQUIRE_HOSTS="1")


def test_one_is_held_by_hand_and_gone_with_its_shell() -> None:
    command = [sys.executable, "-m", "tests.host.box", "shell"]
    script = "cat /etc/hostname; systemctl is-system-running; exit 7\n"
    done = subprocess.run(command, input=script, capture_output=True, text=True, cwd=CHECKOUT, timeout=200)
    assert (done.returncode, done.stdout) == (7, "box\nrunning\n"), done.stderr
    number = int(done.stderr.partition("box ")[2].partition(",")[0])
    eventually(lambda: not (cache_directory() / "boxes" / str(number)).exists(), "the box is left behind")


def test_the_shell_of_a_person_has_a_terminal(tmp_path: Path) -> None:
    ours, its = os.openpty()
    command = ["setsid", "--ctty", "--wait", sys.executable, "-m", "tests.host.box", "shell"]
    shown = b""
    with subprocess.Popen(command, stdin=its, stdout=its, stderr=its, cwd=CHECKOUT) as shell:
        os.close(its)
        os.write(ours, b"tty; set -o | grep monitor; sleep 60 & kill %1; exit 5\n")
        while select.select([ours], [], [], 200)[0]:
            try:
                shown += os.read(ours, 4096)
            except OSError:  # EIO: nobody holds the other end any more
                break
        assert shell.wait(60) == 5, shown.decode()
    os.close(ours)
    text = shown.decode()
    assert "/dev/pts/" in text and "job control" not in text
    assert any(line.split() == ["monitor", "on"] for line in text.splitlines()), text
