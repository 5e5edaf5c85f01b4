"""Commands of the host: bounded in time and output, never a shell."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from appliance import command
from appliance.command import NOT_FOUND, CommandError, CommandTimeout, check, run

pytestmark = pytest.mark.timeout(60)


def test_output_code_and_error_come_back() -> None:
    result = run(["sh", "-c", "echo out; echo err >&2; exit 3"], timeout=20)
    assert (result.code, result.stdout, result.stderr, result.ok) == (3, b"out\n", b"err\n", False)
    assert result.why() == "sh ended with exit code 3: err"
    assert run(["sh", "-c", "kill -9 $$"], timeout=20).why() == "sh ended with signal 9"
    assert run(["cat"], timeout=20).stdout == b""  # stdin is empty, not the terminal


def test_arguments_are_not_a_shell_line(tmp_path: Path) -> None:
    hostile = f"$(touch {tmp_path}/pwned); `touch {tmp_path}/pwned` * ~"
    assert run(["printf", "%s", hostile], timeout=20).text == hostile
    assert list(tmp_path.iterdir()) == []


def test_what_is_given_on_stdin_is_read_whole() -> None:
    data = bytes(range(256)) * 4096  # far more than a pipe holds, and the command writes while it reads
    assert run(["cat"], timeout=10, stdin=data).stdout == data
    assert run(["cat"], timeout=10).stdout == b"", "nothing given: nothing to wait for"
    assert run(["true"], timeout=10, stdin=data).ok


def test_a_missing_program_is_a_result() -> None:
    result = run(["no-such-program-here"], timeout=5)
    assert result.code == NOT_FOUND and result.why() == "no-such-program-here is not installed"
    with pytest.raises(CommandError, match="reading rules: no-such-program-here is not installed"):
        check(result, "reading rules")
    assert run(["/etc/hostname"], timeout=5).code == 126


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_timeout_kills_the_whole_group(tmp_path: Path) -> None:
    started = time.monotonic()
    result = run(["sh", "-c", f"sleep 50 & echo $! > {tmp_path}/pid; echo begun; wait"], timeout=0.7)
    assert result.timed_out and result.stdout == b"begun\n" and time.monotonic() - started < 20
    grandchild = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while alive(grandchild) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(grandchild)
    with pytest.raises(CommandTimeout) as caught:
        check(result, "waiting")
    assert caught.value.exit_code == 3


def test_a_command_that_closes_its_output_still_has_a_time_limit() -> None:
    assert run(["sh", "-c", "exec >&- 2>&-; exec sleep 50"], timeout=0.5).timed_out


def test_a_daemon_that_keeps_the_pipe_does_not_hang_us() -> None:
    assert run(["sh", "-c", "sleep 50 & exit 0"], timeout=0.7).timed_out


def test_output_is_bounded() -> None:
    result = run(["sh", "-c", "yes"], timeout=30, limit=100_000)
    assert result.truncated and len(result.stdout) == 100_000 and not result.ok
    assert "wrote too much" in result.why()
    exact = run(["head", "-c", "1000", "/dev/zero"], timeout=20, limit=1001)
    assert exact.ok and len(exact.stdout) == 1000


def test_one_that_does_not_even_hear_sigkill_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """As nvidia-smi in the kernel on a dead GPU."""
    monkeypatch.setattr(command, "_KILL_SECONDS", 0.1)
    monkeypatch.setattr(command.os, "killpg", lambda pid, number: None)
    began = time.monotonic()
    result = run(["sleep", "3"], timeout=0.1)
    assert result.timed_out and result.code == -9 and time.monotonic() - began < 2.5


def test_the_environment_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("HF_TOKEN", "secret")
    environ = run(["env"], timeout=20).text
    assert "LC_ALL=C.UTF-8" in environ and "secret" not in environ and f"PATH={os.environ['PATH']}" in environ


def test_become_replaces_this_process() -> None:
    code = "from appliance.command import become; become(['echo', '-n', 'a b'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "a b")
    with pytest.raises(CommandError, match="cannot run no-such-program-here: No such file"):
        command.become(["no-such-program-here"])
