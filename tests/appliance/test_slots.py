"""The slot pointers: old or new at every instant, and never a silent nothing."""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_helpers import run_and_die

from appliance import slots
from appliance.log import BusyError, UsageError
from appliance.paths import Paths
from appliance.slots import SlotError, read_slot, set_slot, slots_of


@pytest.fixture
def paths() -> Iterator[Paths]:
    """In memory where there is such a place: fsync is slow on a shared disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as directory:
        yield make_paths(Path(directory))


def make_paths(root: Path) -> Paths:
    paths = Paths.under(root)
    for name in ("v1", "v2"):
        paths.release(name).mkdir(parents=True)
        (paths.release(name) / "release.json").write_text("{}")
    return paths


def test_life_of_a_pointer(paths: Paths) -> None:
    assert read_slot(paths, "stable") is None and read_slot(paths, "canary") is None
    set_slot(paths, "stable", "v1")
    set_slot(paths, "canary", "v1")
    assert (read_slot(paths, "stable"), slots_of(paths, "v1")) == ("v1", ["stable", "canary"])
    set_slot(paths, "stable", "v2")
    set_slot(paths, "canary", None)
    set_slot(paths, "canary", None)
    assert (read_slot(paths, "stable"), read_slot(paths, "canary")) == ("v2", None)


def test_it_is_the_link_of_the_contract(paths: Paths) -> None:
    """Launchers and gateways follow the link themselves: ../releases/NAME, from the slots' directory."""
    set_slot(paths, "stable", "v1")
    assert os.readlink(paths.slot_pointer("stable")) == "../releases/v1"
    assert paths.slot_pointer("stable").resolve() == paths.release("v1").resolve()


def test_a_release_that_is_not_there_is_an_error_not_an_empty_slot(paths: Paths) -> None:
    set_slot(paths, "stable", "v1")
    os.rename(paths.release("v1"), paths.release("moved"))
    with pytest.raises(SlotError, match="'v1', which is not in"):
        read_slot(paths, "stable")
    with pytest.raises(SlotError, match="no release 'nope'"):
        set_slot(paths, "stable", "nope")
    assert os.readlink(paths.slot_pointer("stable")) == "../releases/v1"


@pytest.mark.parametrize("target", ["/etc", "../releases/", "../releases/../v1", "v1", "../releases/v1/model"])
def test_foreign_links_are_refused(paths: Paths, target: str) -> None:
    paths.slot_pointer("stable").parent.mkdir(parents=True)
    paths.slot_pointer("stable").symlink_to(target)
    with pytest.raises(SlotError, match="which is no release"):
        read_slot(paths, "stable")


def test_a_file_or_directory_in_the_way_is_named(paths: Paths) -> None:
    paths.slot_pointer("canary").mkdir(parents=True)
    paths.slot_pointer("stable").write_text("v1")
    for slot in ("stable", "canary"):
        with pytest.raises(SlotError, match="no slot pointer"):
            read_slot(paths, slot)


def test_slots_have_two_names(paths: Paths) -> None:
    for call in (lambda: read_slot(paths, "../x"), lambda: set_slot(paths, "beta", "v1")):
        with pytest.raises(UsageError, match="no slot"):
            call()


def test_readers_never_see_it_absent(paths: Paths) -> None:
    set_slot(paths, "stable", "v1")
    seen, done = set(), threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.add(read_slot(paths, "stable"))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(200):
        set_slot(paths, "stable", f"v{1 + number % 2}")
    done.set()
    reader.join(10)
    assert seen <= {"v1", "v2"}


@pytest.mark.parametrize("new", ["v2", None])
def test_killed_at_every_step(paths: Paths, new: str | None) -> None:
    """The old release or the new one, and the next writer is not disturbed by what is left."""
    outcomes = []
    for at in range(1, 30):
        set_slot(paths, "stable", "v1")
        finished = run_and_die(lambda _: set_slot(paths, "stable", new), paths.state, at)
        outcomes.append(read_slot(paths, "stable"))
        assert outcomes[-1] in ("v1", new)
        if finished:
            break
    assert finished and len(outcomes) > 3 and outcomes[0] == "v1" and outcomes[-1] == new
    set_slot(paths, "stable", "v1")
    assert sorted(os.listdir(paths.slot_pointer("stable").parent)) == [".lock", "stable"]


def test_two_writers_do_not_mix(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    set_slot(paths, "stable", "v1")
    monkeypatch.setattr(slots, "_LOCK_SECONDS", 0.1)
    fd = os.open(paths.slot_pointer("stable").parent / ".lock", os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(BusyError):
            set_slot(paths, "stable", "v2")
    finally:
        os.close(fd)
    assert read_slot(paths, "stable") == "v1"


def test_who_may_only_read_cannot_hold_up_a_change(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    """flock(2) takes any descriptor: everything that others can open is locked by a stranger here."""
    monkeypatch.setattr(slots, "_LOCK_SECONDS", 0.1)
    set_slot(paths, "stable", "v1")
    directory = paths.slot_pointer("stable").parent
    readable = [item for item in (directory, directory / ".lock") if item.stat().st_mode & 0o044]
    assert readable == [directory]
    fd = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        set_slot(paths, "stable", "v2")
    finally:
        os.close(fd)
    assert read_slot(paths, "stable") == "v2"
