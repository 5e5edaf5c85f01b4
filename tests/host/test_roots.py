"""The cache of roots and disks: complete or absent, whoever builds at the same time or dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.host import roots
from tests.host.roots import HostError, Recipe, cached, digest

CHECKOUT = Path(__file__).resolve().parents[2]
BUILDER = """
import sys, time
from pathlib import Path
from tests.host.roots import cached

def build(directory):
    (directory / "half").write_text("x")
    print("building", flush=True)
    time.sleep(float(sys.argv[1]))
    (directory / "whole").write_text("x")
    with open(sys.argv[2], "a") as log:
        log.write("built\\n")

print((cached("thing", "k" * 16, build) / "whole").read_text(), flush=True)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "cache"
    monkeypatch.setenv("APPLIANCE_TEST_CACHE", str(directory))
    return directory


def builder(seconds: float, log: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILDER, str(seconds), str(log)]
    return subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True)


def test_two_at_once_build_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with builder(0.5, log) as first, builder(0.5, log) as second:
        texts = [process.communicate(timeout=30)[0] for process in (first, second)]
    assert sorted(texts) == ["building\nx\n", "x\n"]
    assert log.read_text() == "built\n"


def test_a_killed_builder_leaves_nothing_that_counts(tmp_path: Path, cache: Path) -> None:
    log = tmp_path / "log"
    with builder(60, log) as first:
        assert first.stdout and first.stdout.readline() == "building\n"
        assert not (cache / ("thing-" + "k" * 16)).exists()
        first.send_signal(signal.SIGKILL)
    with builder(0, log) as second:
        assert second.communicate(timeout=30)[0] == "building\nx\n"


def test_a_failed_build_is_tried_again() -> None:
    def fail(directory: Path) -> None:
        (directory / "half").touch()
        raise HostError("no mirror")

    with pytest.raises(HostError, match="no mirror"):
        cached("thing", "a" * 16, fail)
    entry = cached("thing", "a" * 16, lambda directory: (directory / "whole").touch())
    assert [path.name for path in entry.iterdir()] == ["whole"]


def test_old_entries_of_a_name_go_and_others_stay(cache: Path) -> None:
    def make(name: str, key: str) -> Path:
        return cached(name, key * 16, lambda directory: None)

    old, used, other = make("thing", "a"), make("thing", "b"), make("thing-up", "a")
    past = time.time() - roots.KEEP_SECONDS - 60
    for entry in (old, other):
        os.utime(entry, (past, past))
    make("thing", "c")
    assert not old.exists() and used.exists() and other.exists()


def test_the_digest_says_what_is_inside() -> None:
    recipe = Recipe("r", ("a", "b"), ("true",))
    assert recipe.digest() == Recipe("r", ("b", "a"), ("true",)).digest()
    others = [Recipe("r", ("a",), ("true",)), Recipe("r", ("a", "b")), Recipe("r", ("a", "b"), ("true",), suite="sid")]
    assert len({recipe.digest(), *(other.digest() for other in others), digest("")}) == 5


def test_a_cache_that_others_may_write_to_is_refused(cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)  # a root made by somebody else would be booted as root
    with pytest.raises(HostError, match="nobody else may write"):
        roots.cache_directory()
