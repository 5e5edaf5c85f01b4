"""`appliance release` with the real launchers and the real engine, both placements; only systemd is replaced.

What the fake launchers of the other tests promise is checked here: the two must not drift apart.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from release_helpers import LIGHT, paths_fixture, release_command  # noqa: F401  # fixtures

from appliance.gpus import bind_slots
from appliance.paths import Paths
from appliance.slots import read_slot
from engine.spawn import python_env

pytest.importorskip("appliance.launcher.launcher", reason="the launcher is not part of this checkout")

SCRIPT = Path(__file__).with_name("launcher_process.py")
CONFIG = """
schema = 1
[gpus]
backend = "cpu"
cpu_slots = 2
[engine]
drain_timeout = 2
placement = "{placement}"
"""


@contextmanager
def launchers(paths: Paths, placement: str) -> Iterator[None]:
    for directory in (paths.etc, paths.state / "slots", paths.run):
        directory.mkdir(parents=True)
    paths.config.write_text(CONFIG.format(placement=placement))
    bind_slots(paths.gpus, ["CPU-0", "CPU-1"])
    root = str(paths.etc.parents[1])
    children = [
        subprocess.Popen([sys.executable, str(SCRIPT), root, str(gpu)], env=python_env(), stderr=subprocess.DEVNULL)
        for gpu in (0, 1)
    ]
    try:
        deadline = time.monotonic() + 30
        while not all(paths.launcher_state(gpu).exists() for gpu in (0, 1)):
            assert time.monotonic() < deadline and all(child.poll() is None for child in children)
            time.sleep(0.05)
        yield
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.wait(60)


def running(paths: Paths) -> list[dict[str, str]]:
    states = [json.loads(paths.launcher_state(gpu).read_text()) for gpu in (0, 1)]
    return [{engine["release"]: engine["state"] for engine in state["engines"]} for state in states]


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["shared", "exclusive"])
def test_life_of_a_release(paths: Paths, capsys: pytest.CaptureFixture[str], placement: str) -> None:
    with launchers(paths, placement):
        code, added = release_command(capsys, "add", "v1", "--model", "tiny", *LIGHT)
        assert (code, added.get("golden")) == (0, ["cpu"]), added
        assert running(paths) == [{}, {}]
        code, used = release_command(capsys, "use", "v1")
        assert (code, used.get("changed"), used.get("warnings")) == (0, True, []), used
        assert running(paths) == [{"v1": "ready"}] * 2
        assert release_command(capsys, "use", "v1")[1]["changed"] is False
        assert release_command(capsys, "check", "v1")[1]["verdict"] == "same"

        command = ("add", "v2", "--model", "tiny", "--model-name", "other", *LIGHT)
        if placement == "exclusive":  # every GPU serves: there is no room to record on
            code, refused = release_command(capsys, *command)
            assert code == 4 and "engine.placement is exclusive" in str(refused)
            command += ("--golden", "displace")
        assert release_command(capsys, *command)[0] == 0
        assert running(paths) == [{"v1": "ready"}] * 2
        code, used = release_command(capsys, "use", "v2")
        assert (code, used.get("previous")) == (0, "v1"), used
        assert running(paths) == [{"v2": "ready"}] * 2 and read_slot(paths, "stable") == "v2"
        assert release_command(capsys, "remove", "v2")[0] == 4

        code, failed = release_command(capsys, "add", "v3", "--model", "tiny", "--argument=--kv-tokens=4096",
                                       "--golden", "skip")  # fmt: skip
        (paths.release("v3") / "model" / "tokenizer.json").write_text("{}" + " " * 10)
        code, failed = release_command(capsys, "use", "v3")
        assert code == 4 and "damaged: model/tokenizer.json" in str(failed)  # before an engine was touched
        weights = paths.release("v3") / "model" / "model.safetensors"
        size = weights.stat().st_size
        assert release_command(capsys, "remove", "v3")[0] == 0
        assert release_command(capsys, "add", "v3", "--model", "tiny", *LIGHT, "--golden", "skip")[0] == 0
        weights.chmod(0o644)
        weights.write_bytes(b"\xff" * size)  # the right size: only the engine can tell
        code, failed = release_command(capsys, "use", "v3")
        assert code == 1 and "v3 does not start on GPU" in str(failed) and "undone: stable is still v2" in str(failed)
        deadline = time.monotonic() + 60
        while running(paths) != [{"v2": "ready"}] * 2:
            assert time.monotonic() < deadline, running(paths)
            time.sleep(0.1)
        assert release_command(capsys, "use", "v1")[0] == 0
        assert running(paths) == [{"v1": "ready"}] * 2
        assert release_command(capsys, "remove", "v2")[0] == 0
