"""The CPU oracle: the same release on the CPU backend, for a host with one GPU, to say whether that GPU is sane.

It is a child of the command that asks, for a minute, on a Unix socket in a private directory; no client reaches it. It
runs as the engine's user where there is one, and dies with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import grp
import os
import pwd
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from appliance.engine_calls import EngineCalls, EngineUnavailable
from appliance.fleet import FleetError, FleetTimeout
from appliance.log import Progress
from appliance.paths import Paths
from appliance.releases import Release
from engine.spawn import python_env

USER = "appliance"
KV_TOKENS = 1024  # the golden prompts one after another
STOP_SECONDS = 20.0
_PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def cpu_oracle(paths: Paths, release: Release, seconds: float, progress: Progress) -> Iterator[EngineCalls]:
    """The release on the CPU backend, ready; stopped at the end. FleetError, or FleetTimeout after `seconds`."""
    progress.stage("loading the release on the CPU backend, as the oracle")
    account = _account()
    with tempfile.TemporaryDirectory(prefix="appliance-oracle-") as directory, tempfile.TemporaryFile() as log:
        if account:
            os.chown(directory, account["user"], account["group"])
        socket = Path(directory) / "engine.sock"
        process = subprocess.Popen(
            _command(paths, release, socket), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=directory,
            env=_environment(), preexec_fn=_die_with_parent, **account,
        )  # fmt: skip
        try:
            engine = EngineCalls(socket)
            _wait_ready(process, engine, seconds, log)
            yield engine
        finally:
            _stop(process)


def _command(paths: Paths, release: Release, socket: Path) -> list[str]:
    options = release.options
    command = [
        str(release.engine_python(paths)), "-P", "-m", "engine", "--model-dir", str(release.model_dir(paths)),
        "--model-name", release.model_name, "--backend", "cpu", "--uds", str(socket), "--max-batch-seqs", "1",
        "--kv-tokens", str(KV_TOKENS), "--max-model-len", str(min(options.max_model_len or KV_TOKENS, KV_TOKENS)),
    ]  # fmt: skip
    return command


def _environment() -> dict[str, str]:
    kept = ("PATH", "LANG", "PYTHONPATH")
    environment = python_env()
    return {name: environment[name] for name in kept if name in environment} | {"CUDA_VISIBLE_DEVICES": ""}


def _account() -> dict[str, Any]:
    """Arguments of Popen that drop root's rights; nothing where we are not root."""
    if os.geteuid() != 0:
        return {}
    try:
        return {"user": pwd.getpwnam(USER).pw_uid, "group": grp.getgrnam(USER).gr_gid, "extra_groups": []}
    except KeyError:
        return {}  # a checkout: the package makes the user


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # prctl(2); after the change of user, which clears it
    os.nice(5)


def _wait_ready(process: subprocess.Popen[bytes], engine: EngineCalls, seconds: float, log: Any) -> None:
    deadline = time.monotonic() + seconds
    while True:
        if process.poll() is not None:
            log.seek(0)
            last = log.read()[-2000:].decode(errors="replace").strip().splitlines() or ["it said nothing"]
            raise FleetError(f"the CPU oracle ended with status {process.returncode}: {last[-1]}")
        with contextlib.suppress(EngineUnavailable):
            if engine.state().get("status") == "ready":
                return
        if time.monotonic() > deadline:
            raise FleetTimeout(f"the CPU oracle was not ready after {seconds:g} s", hint="raise engine.start_timeout")
        time.sleep(0.1)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_SECONDS)
