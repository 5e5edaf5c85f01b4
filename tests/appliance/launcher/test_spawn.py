"""Where the child's output goes, whatever descriptors the launcher happens to have open."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.launcher.last_words import VARIABLE, LastWords
from engine.spawn import python_env
from tests.tiny import make_tiny_model

# As a process of its own, so that the first descriptor after standard error is free or taken as the test says.
LAUNCHER = """
import json, os, sys
taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(int(sys.argv[2]))]
from pathlib import Path
from appliance.launcher import spawn
from appliance.launcher.last_words import LastWords
from appliance.launcher.scope import ScopePlan
from appliance.launcher.spec import EngineSpec
from appliance.launcher.trampoline import GO
connect = spawn.journal_stream
spawn.journal_stream = lambda identifier: connect(identifier, sys.argv[1])
plan = ScopePlan(0, "r1", memory_max=1 << 30, cpu_weight=100, tasks_max=100)
spec = EngineSpec(None, ["/no/such/engine"], {}, Path("/none"), plan, [])
words = LastWords()
pid, channel = spawn.spawn_trampoline(spec, os.getuid(), os.getgid(), words.fd)
channel.setblocking(True)
channel.send(b"no\\n")  # not GO: it ends, and its stream with it
os.waitpid(pid, 0)
print(json.dumps(channel.recv(1000).decode()))
"""
TRACE = "import sys; sys.stdout.write('said by the child\\n')\n"


@pytest.mark.parametrize("taken", [0, 1, 2, 5])
def test_output_goes_to_the_journal_and_the_channel_stays_quiet(tmp_path: Path, taken: int) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import os\nif 'SAY' in os.environ:\n    {TRACE}")
    path = tmp_path / "journal"
    with socket.socket(socket.AF_UNIX) as journal:
        journal.bind(str(path))
        journal.listen(1)
        journal.settimeout(30)
        env = python_env()
        env |= {"JOURNAL_STREAM": "1:1", "SAY": "1", "PYTHONPATH": f"{tmp_path}:{env.get('PYTHONPATH', os.getcwd())}"}
        done = subprocess.run(
            [sys.executable, "-P", "-c", LAUNCHER, path, str(taken)],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        stream, _ = journal.accept()
        with stream:
            text = b""
            while part := stream.recv(4096):
                text += part
    assert b"appliance-gpu0-r1" in text and b"said by the child" in text
    assert json.loads(done.stdout.splitlines()[-1]) == ""


def test_a_real_engine_says_why_it_refuses(tmp_path: Path) -> None:
    """Before its load, and without a word of it in what its own children inherit."""
    model = make_tiny_model(tmp_path / "model")
    words = LastWords()
    argv = [sys.executable, "-P", "-m", "engine", "--model-dir", str(model), "--max-model-len", "1"]
    done = subprocess.run(
        [*argv, "--uds", str(tmp_path / "s")], env=python_env() | {VARIABLE: str(words.fd)}, pass_fds=[words.fd],
        capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 4
    assert words.take().startswith("a context of 1 tokens holds no prompt and no answer; ")


def test_last_words_cannot_grow() -> None:
    words = LastWords()
    with pytest.raises(PermissionError):
        os.ftruncate(words.fd, 1 << 20)
    with pytest.raises(PermissionError):
        os.pwrite(words.fd, b"x" * 10, 1 << 20)
    assert words.take() == ""
