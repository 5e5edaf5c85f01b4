"""The channel between the two engine processes: nothing lost, nothing torn, a full ring pushes back."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import _ring
from engine.ring import Ring


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=300), st.none()), max_size=200))
def test_fifo_with_backpressure(operations: list[bytes | None]) -> None:
    """Bytes push, None pops: the ring behaves as a queue that refuses when full."""
    memory = bytearray(192 + 1024)
    assert _ring.format(memory) == 1024
    queue: list[bytes] = []
    for operation in operations:
        if operation is None:
            assert _ring.pop(memory) == (queue.pop(0) if queue else None)
        elif _ring.push(memory, operation):
            queue.append(operation)
        else:
            used = sum((8 + len(frame) + 7) // 8 * 8 for frame in queue)
            assert used + (8 + len(operation) + 7) // 8 * 8 > 1024, "refused although there was room"
    for frame in queue:
        assert _ring.pop(memory) == frame
    assert _ring.pop(memory) is None


def test_light_traffic_reuses_the_same_memory() -> None:
    """2,000 frames of 10 kB, each taken before the next: 20 MB went through, less than 1 MB may have been touched."""
    ring = Ring.create("t", 32 << 20)
    try:
        for i in range(2000):
            frame = bytes([i % 251]) * 10_000
            assert ring.push(frame)
            assert ring.pop() == frame
        assert os.fstat(ring.memory_fd).st_blocks * 512 < 1 << 20
    finally:
        ring.close()


def test_frame_that_can_never_fit_is_an_error() -> None:
    memory = bytearray(192 + 1024)
    _ring.format(memory)
    with pytest.raises(ValueError, match="can never fit"):
        _ring.push(memory, b"x" * 1024)


@settings(max_examples=300, deadline=None)
@given(st.binary(min_size=192, max_size=192 + 512))
def test_damaged_memory_is_an_error_never_a_crash(garbage: bytes) -> None:
    for keep_header in (False, True):
        memory = bytearray(192 + 512)
        _ring.format(memory)
        memory[16 if keep_header else 0 : len(garbage)] = garbage[16 if keep_header else 0 :]
        try:
            _ring.pop(memory)
            _ring.push(memory, b"abc")
        except (ValueError, RuntimeError):
            pass


def test_two_processes_exchange_every_byte() -> None:
    """A child echoes 20,000 frames of random sizes through a second ring; order and bytes must survive."""
    there, back = Ring.create("t", 1 << 16), Ring.create("b", 1 << 16)
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent("""
            import select, sys
            from engine.ring import Ring
            a, b, c, d = map(int, sys.argv[1:])
            inbox, outbox = Ring.attach((a, b)), Ring.attach((c, d))
            poll = select.poll(); poll.register(inbox.bell_fd, select.POLLIN)
            done = False
            while not done:
                poll.poll(1000)
                inbox.clear_bell()
                while (frame := inbox.pop()) is not None:
                    if not frame: done = True
                    while not outbox.push(frame): pass
                outbox.ring_bell()
        """), *map(str, [*there.fds(), *back.fds()])],
        pass_fds=[*there.fds(), *back.fds()],
    )  # fmt: skip
    for fd in [*there.fds(), *back.fds()]:
        os.set_inheritable(fd, False)
    rng = random.Random(7)
    frames = [rng.randbytes(rng.choice([1, 8, 100, 5000])) for _ in range(20_000)]
    sent, received = 0, []
    while len(received) < len(frames):
        if sent < len(frames) and there.push(frames[sent]):
            sent += 1
            there.ring_bell()
        if (frame := back.pop()) is not None:
            received.append(frame)
        assert child.poll() is None or back.pop() is not None, "the child died"
    assert received == frames
    assert there.push(b"")
    there.ring_bell()
    assert child.wait(10) == 0
    there.close()
    back.close()
