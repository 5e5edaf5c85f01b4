"""The event loop: timers, children, signals."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from appliance.launcher.loop import READ, Loop


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


def test_timers_in_their_order_and_cancelled_ones_not(loop: Loop) -> None:
    seen: list[str] = []
    loop.later(0.03, lambda: seen.append("late"))
    loop.later(0.01, lambda: seen.append("early"))
    cancelled = loop.later(0.02, lambda: seen.append("cancelled"))
    cancelled.cancel()
    cancelled.cancel()
    assert loop.run(until=lambda: "late" in seen, timeout=5)
    assert seen == ["early", "late"]


def test_cancelled_timers_are_not_kept_until_their_time(loop: Loop) -> None:
    kept = [loop.later(0.01 * (n % 3), lambda: None) for n in range(100)]
    for _ in range(5000):
        loop.later(86_400, lambda: None).cancel()
    assert len(loop._timers) <= 2 * len(kept) + 1
    ran: list[int] = []
    for number in (2, 0, 1):
        loop.later(0.03 + number / 1000, functools.partial(ran.append, number))
    loop.run(until=lambda: len(ran) == 3, timeout=5)
    assert ran == [0, 1, 2]


def test_a_child_is_reaped_once_with_its_status(loop: Loop) -> None:
    ended: list[int] = []
    pids = []
    for script in ("raise SystemExit(7)", "import os; os.kill(os.getpid(), 15)"):
        pids.append(os.posix_spawn(sys.executable, [sys.executable, "-S", "-c", script], {}))
        loop.watch_child(pids[-1], ended.append)
    assert loop.run(until=lambda: len(ended) == 2, timeout=10)
    assert sorted(ended) == [-15, 7]
    for pid in pids:  # and not -1: a worker of pytest may have children of other tests
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def test_signals_arrive_in_the_loop(loop: Loop) -> None:
    seen: list[str] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    try:
        loop.on_signal(signal.SIGHUP, lambda: seen.append("hup"))
        loop.on_signal(signal.SIGTERM, loop.stop)
        loop.later(0.01, lambda: os.kill(os.getpid(), signal.SIGHUP))
        loop.later(0.02, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert loop.run(timeout=5)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert seen == ["hup"]


def test_a_callback_may_close_what_is_ready_too(loop: Loop) -> None:
    (a, a_write), (b, b_write) = os.pipe(), os.pipe()
    seen: list[int] = []

    def on(fd: int, other: int) -> None:
        seen.append(fd)
        for each in (fd, other):
            loop.unwatch(each)

    loop.watch(a, READ, lambda: on(a, b))
    loop.watch(b, READ, lambda: on(b, a))
    os.write(a_write, b"x")
    os.write(b_write, b"x")
    loop.run(timeout=0.1)
    assert len(seen) == 1
    for fd in (a, a_write, b, b_write):
        os.close(fd)


def test_idle_it_sleeps(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[float] = []
    real = loop._select
    monkeypatch.setattr(loop, "_select", lambda seconds: (turns.append(seconds), real(seconds)))
    loop.later(0.2, lambda: None)
    loop.later(60, lambda: None)
    loop.run(timeout=0.3)
    assert len(turns) <= 4  # one for each thing that happens, not one a millisecond
