"""Linters are tests: what they say is part of the product's quality, so CI holds it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_MODULE_LINES = 420


def tracked(*patterns: str) -> list[Path]:
    out = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in out.stdout.split("\0") if name]


@pytest.mark.parametrize(
    "command", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]], ids=" ".join
)
def test_python_linters(command: list[str]) -> None:
    result = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("script", [".ci/run", ".ci/setup", ".ci/lock", ".ci/build-pycuda", "tests/host/bare"])
def test_shell_scripts_parse(script: str) -> None:
    result = subprocess.run(["bash", "-n", script], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    if shutil.which("shellcheck"):
        result = subprocess.run(["shellcheck", script], cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout


def test_modules_stay_small() -> None:
    """A module that needs a scroll map has two owners; generated tables and tests are exempt."""
    too_long = {
        str(path.relative_to(ROOT)): lines
        for path in tracked("*.py")
        if not path.is_relative_to(ROOT / "tests") and (lines := len(path.read_text().splitlines())) > MAX_MODULE_LINES
    }
    assert not too_long


def test_every_package_is_listed() -> None:
    """An unlisted package works from the checkout and is missing from the wheel."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        str(path.parent.relative_to(ROOT)).replace("/", ".")
        for path in tracked("*/__init__.py")
        if not path.is_relative_to(ROOT / "tests")
    }
    assert found == set(listed)
    for shadow in ("systemd", "ansible"):  # an __init__.py here would hide the real python-systemd and ansible
        assert not (ROOT / shadow / "__init__.py").exists()


def test_locked_requirements_cover_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for wanted, lock in (
        (project["dependencies"], "run"),
        (project["optional-dependencies"]["dev"], "dev"),
        (project["optional-dependencies"]["gpu"], "gpu"),
    ):
        locked = (ROOT / f".ci/requirements/{lock}.txt").read_text()
        for requirement in wanted:
            name = re.split(r"[<>=\[; ]", requirement)[0]
            assert re.search(rf"^{re.escape(name)}==\S+ .*\\$", locked, re.M | re.I), (
                f"{name} is not locked in {lock}.txt"
            )
        assert locked.count("--hash=sha256:") >= locked.count("==")


def test_no_engine_import_of_cuda_on_the_control_plane() -> None:
    for path in tracked("appliance/*.py", "canary/*.py", "healthcheck/*.py"):
        assert not re.search(r"^\s*(import|from) (pycuda|cuda)\b", path.read_text(), re.M), path


MAY_START_PROCESSES = {
    "appliance/command.py": "every command of the host: argv lists, a time limit, a limit of output",
    "appliance/catalogue.py": "pip, minutes long, with progress",
    "appliance/demo.py": "the demo's own server",
    "appliance/oracle.py": "the CPU engine that golden answers are compared with",
    "appliance/gateway/workers.py": "the gateway's own workers",
    "appliance/launcher/trampoline.py": "becomes the engine, once it is in its scope",
    "appliance/serve.py": "becomes the engine, in the foreground",
}


def test_commands_of_the_host_have_one_door() -> None:
    """A shell, or a call without a time limit, must be impossible to add unseen."""
    starts = re.compile(
        r"^\s*(import|from) (subprocess|pty|multiprocessing)\b|create_subprocess|os\.(system|popen|spawn|exec)", re.M
    )
    users = {
        str(path.relative_to(ROOT))
        for path in tracked("appliance/*.py", "canary/*.py", "healthcheck/*.py")
        if starts.search(path.read_text())
    }
    assert users == set(MAY_START_PROCESSES)
