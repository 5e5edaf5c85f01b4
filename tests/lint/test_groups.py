"""Tests that share a host must have one worker: what runs them is checked, not our marks.

pytest 9.2 with xdist 3.8 ran them at the same time on all workers and said nothing.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SUITE = """
import os
from pathlib import Path

import pytest

pytestmark = [pytest.mark.xdist_group("host")]


@pytest.mark.parametrize("number", range(8))
def test_of_the_group(number):
    Path(__file__).with_name(os.environ["PYTEST_XDIST_WORKER"]).touch()
"""


def test_a_group_has_one_worker(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(tmp_path.glob("gw*"))) == 1
