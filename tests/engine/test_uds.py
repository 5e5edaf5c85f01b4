"""The engine as a launcher's child: a Unix socket and nothing else, an unprivileged user, a read-only file system."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine import __version__
from engine.spawn import python_env, python_module
from tests.engine.streams import session
from tests.serving import MODEL
from tests.tiny import make_tiny_model

pytestmark = pytest.mark.xdist_group("processes")
USER = 64701
LOGIT_FREE = {"model": MODEL, "prompt": "abc", "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / MODEL)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Short, as a socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="eng") as path:
        yield Path(path)


def command(model_dir: Path, path: Path, *options: str) -> list[str]:
    backend = os.environ.get("APPLIANCE_TEST_BACKEND", "cpu")
    return [*python_module("engine"), "--uds", str(path), "--model-dir", str(model_dir), "--backend", backend,
            "--kv-tokens", "16384", *options]  # fmt: skip


@contextmanager
def engine(arguments: list[str], log: Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """No terminal, stdin closed as systemd closes it; killed at the end if it still runs."""
    with open(log, "wb") as stderr:
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stderr=stderr, start_new_session=True,
            **({"env": python_env()} | options),
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def wait_ready(http: aiohttp.ClientSession, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        try:
            async with http.get("http://engine/readyz") as response:
                if response.status == 200:
                    return
        except aiohttp.ClientConnectorError:
            pass
        await asyncio.sleep(0.02)


async def get_state(http: aiohttp.ClientSession) -> dict[str, Any]:
    async with http.get("http://engine/admin/state") as response:
        state: dict[str, Any] = await response.json()
        return state


async def test_socket_only_and_a_drain(model_dir: Path, run_dir: Path) -> None:
    """Mode 0660, no TCP listener, SIGTERM lets what is in flight finish, the socket is gone after that, status 0."""
    path, log = run_dir / "s", run_dir / "log"
    with engine(command(model_dir, path), log) as process:
        async with session(path) as http:
            await wait_ready(http, process, log)
            assert stat.S_IMODE(path.lstat().st_mode) == 0o660
            inodes = {os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{process.pid}/fd")}
            for table in ("tcp", "tcp6"):
                for line in Path(f"/proc/{process.pid}/net/{table}").read_text().splitlines()[1:]:
                    assert f"socket:[{line.split()[9]}]" not in inodes, "a TCP socket is open"
            body = LOGIT_FREE | {"max_tokens": 600}
            asking = asyncio.create_task(http.post("http://engine/v1/completions", json=body))
            while (await get_state(http))["progress"]["running"] == 0:
                await asyncio.sleep(0.005)
            process.send_signal(signal.SIGTERM)
            async with await asking as response:
                assert (await response.json())["usage"]["completion_tokens"] == 600
        assert process.wait(30) == 0
    assert not path.exists()


def refused(model_dir: Path, path: Path) -> tuple[int, str]:
    result = subprocess.run(
        command(model_dir, path), env=python_env(), capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )
    assert "Traceback" not in result.stderr
    return result.returncode, result.stderr


async def test_a_stale_socket_is_replaced(model_dir: Path, run_dir: Path) -> None:
    """Left behind by kill -9, so that a restart needs no cleaning up."""
    path, log = run_dir / "s", run_dir / "log"
    for _ in range(2):
        with engine(command(model_dir, path), log) as process:
            async with session(path) as http:
                await wait_ready(http, process, log)
            os.killpg(process.pid, signal.SIGKILL)
        assert path.exists()


def test_a_live_socket_is_not_replaced_even_with_a_full_backlog(model_dir: Path, run_dir: Path) -> None:
    path = run_dir / "s"
    with (
        socket.socket(socket.AF_UNIX) as live,
        socket.socket(socket.AF_UNIX) as one,
        socket.socket(socket.AF_UNIX) as two,
    ):
        live.bind(str(path))
        live.listen(0)
        assert refused(model_dir, path)[0] == 5  # this probe now fills the backlog
        for waiting in (one, two):
            waiting.setblocking(False)
            waiting.connect_ex(str(path))
        status, errors = refused(model_dir, path)
        assert status == 5 and str(path) in errors
        live.settimeout(5)
        live.accept()[0].close()  # it still is the one that the path leads to
        assert path.exists()


def test_what_is_no_socket_or_cannot_be_bound_is_refused(model_dir: Path, run_dir: Path) -> None:
    (run_dir / "file").write_text("keep")
    for path in (run_dir / "file", run_dir / "missing" / "s", run_dir / ("x" * 110)):
        status, errors = refused(model_dir, path)
        assert status == 4 and '"hint":"' in errors
    assert (run_dir / "file").read_text() == "keep"


SANDBOX = """
set -e
mount --make-rprivate /
mount --bind "$1" "$1"
awk '{print $5}' /proc/self/mountinfo | while read -r point; do
    case "$point" in "$1"|/proc|/proc/*|/dev|/dev/*|/sys|/sys/*) ;; *) mount -o remount,bind,ro "$point" || true ;; esac
done 2>/dev/null
if touch "$2" 2>/dev/null; then exit 77; fi
shift 2
exec setpriv --reuid {user} --regid {user} --clear-groups --no-new-privs --inh-caps=-all,+dac_read_search \
    --ambient-caps=-all,+dac_read_search --bounding-set=-all,+dac_read_search "$@"
"""
"""Read-only everywhere but in $1; then no privilege but to read (the interpreter of a developer is often in a home)."""


@pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("unshare") and shutil.which("setpriv")), reason="needs root and util-linux"
)
async def test_unprivileged_without_home_on_a_read_only_file_system(model_dir: Path, run_dir: Path) -> None:
    """All an engine may write to is the directory of its socket; its rings are memory without a name."""
    allowed, log = run_dir / "run", run_dir / "log"
    allowed.mkdir()
    os.chown(allowed, USER, USER)
    path = allowed / "s"
    script = SANDBOX.replace("{user}", str(USER))
    shell = ["unshare", "--mount", "sh", "-c", script, "sh", str(allowed), str(run_dir / "probe")]
    env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "PYTHONPATH": python_env().get("PYTHONPATH", "")}
    with engine([*shell, *command(model_dir, path)], log, env=env, cwd="/") as process:
        async with session(path) as http:
            await wait_ready(http, process, log)
            status = Path(f"/proc/{process.pid}/status").read_text()
            assert f"Uid:\t{USER}\t{USER}" in status and "NoNewPrivs:\t1" in status
            async with http.post("http://engine/v1/completions", json=LOGIT_FREE | {"max_tokens": 8}) as response:
                assert (await response.json())["usage"]["completion_tokens"] == 8
        assert os.listdir(allowed) == ["s"]
        process.terminate()
        assert process.wait(30) == 0
    assert os.listdir(allowed) == []


async def test_state_tells_a_launcher_what_it_needs(tmp_path: Path, run_dir: Path) -> None:
    """Before the load, while it runs (a number that only rises), and after it: device, checksum, steps."""
    model = make_tiny_model(tmp_path / MODEL, num_hidden_layers=8, hidden_size=512, intermediate_size=1024)
    path, log = run_dir / "s", run_dir / "log"
    seen: list[dict[str, Any]] = []
    with engine(command(model, path), log) as process:
        async with session(path) as http:
            deadline = time.monotonic() + 60
            while not seen or seen[-1]["status"] == "loading":
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                try:
                    seen.append(await get_state(http))
                except aiohttp.ClientConnectorError:
                    await asyncio.sleep(0.005)
            loading = [state["loading"] for state in seen]
            assert loading == sorted(loading) and loading[0] < 1 and loading[-1] == 1.0
            assert len(set(loading)) > 3, "the load did not tell how far it was"
            assert seen[0]["device"] is seen[0]["weights_checksum"] is None
            ready = seen[-1]
            if ready["engine"]["backend"] == "cpu":
                assert ready["device"] == {"backend": "cpu", "uuid": "CPU", "name": "cpu"}
            else:
                assert ready["device"]["uuid"].startswith("GPU-")
            assert ready["progress"] == {
                "steps": 0, "queued": 0, "waiting": 0, "running": 0, "last_step_age_seconds": None
            }  # fmt: skip
            async with http.post("http://engine/admin/checksum", json={}) as response:
                assert (await response.json())["result"]["actual"] == ready["weights_checksum"]
            async with http.post("http://engine/v1/completions", json=LOGIT_FREE | {"max_tokens": 8}) as response:
                assert response.status == 200
            after = (await get_state(http))["progress"]
            assert after["steps"] >= 8 and after["queued"] == 0 and after["last_step_age_seconds"] < 5
    assert "/admin/state" not in log.read_text()  # a launcher asks all the time: that is no news


async def test_golden_is_the_same_before_and_under_traffic(model_dir: Path, run_dir: Path) -> None:
    path, log = run_dir / "s", run_dir / "log"
    question = {"args": {"prompt_ids": [1, 2, 3, 4] * 60}}
    with engine(command(model_dir, path), log) as process:
        async with session(path) as http:
            await wait_ready(http, process, log)

            async def golden() -> dict[str, Any]:
                async with http.post("http://engine/admin/golden", json=question) as response:
                    assert response.status == 200
                    answer: dict[str, Any] = await response.json()
                    return answer

            before = await golden()
            assert before["result"]["finite"] and before["result"]["positions"] == 240
            assert before["engine_version"] == __version__
            assert before["device"] == (await get_state(http))["device"]
            traffic = [
                asyncio.create_task(http.post("http://engine/v1/completions", json=LOGIT_FREE | {"max_tokens": 300}))
                for _ in range(6)
            ]
            while (await get_state(http))["progress"]["running"] < 6:
                await asyncio.sleep(0.005)
            assert [await golden() for _ in range(3)] == [before] * 3
            assert not all(task.done() for task in traffic), "golden waited for the traffic"
            for task in traffic:
                async with await task as response:
                    assert response.status == 200


def test_version_is_one() -> None:
    import appliance

    result = subprocess.run([*python_module("engine"), "--version"], env=python_env(), capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, f"{__version__}\n")
    assert appliance.__version__ == __version__
    ours = "[name for name in sys.modules if name.split('.')[0] == 'appliance']"  # not an editable install's finder
    code = f"import sys, engine.serve, engine.core; print(json.dumps({ours}))"
    result = subprocess.run(
        [sys.executable, "-c", f"import json; {code}"], env=python_env(), capture_output=True, text=True, check=True
    )
    assert json.loads(result.stdout) == []
