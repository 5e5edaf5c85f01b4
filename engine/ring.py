"""One direction of the channel between engine-api and engine-core: a byte ring in a memfd, and an eventfd as its bell.

Exactly one process pushes and exactly one pops. A full ring is back-pressure, never loss: `push` says False and the
sender keeps the frame. The bell is level-triggered for epoll and asyncio; ring it once after a group of pushes.
"""

from __future__ import annotations

import mmap
import os

from engine import _ring


class Ring:
    """Create with `Ring.create()`, hand `fds()` to the child (pass_fds), reopen there with `Ring.attach(fds)`."""

    def __init__(self, memory_fd: int, bell_fd: int) -> None:
        self.memory_fd, self.bell_fd = memory_fd, bell_fd
        self._map = mmap.mmap(memory_fd, os.fstat(memory_fd).st_size)

    @classmethod
    def create(cls, name: str, capacity_bytes: int) -> Ring:
        """`capacity_bytes` is rounded down to a power of two; memory is only used as far as it was ever filled."""
        memory_fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(memory_fd, capacity_bytes + mmap.PAGESIZE)
        ring = cls(memory_fd, os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        _ring.format(ring._map)
        return ring

    @classmethod
    def attach(cls, fds: tuple[int, int]) -> Ring:
        return cls(*fds)

    def fds(self) -> tuple[int, int]:
        return self.memory_fd, self.bell_fd

    def push(self, frame: bytes | bytearray | memoryview) -> bool:
        """False when there is no room now. ValueError when the frame can never fit."""
        return _ring.push(self._map, frame)

    def pop(self) -> bytes | None:
        """The oldest frame, or None. RuntimeError when the other side damaged the ring: treat it as dead."""
        return _ring.pop(self._map)

    def ring_bell(self) -> None:
        try:
            os.eventfd_write(self.bell_fd, 1)
        except BlockingIOError:
            pass  # the counter is at its maximum: the bell is ringing already

    def clear_bell(self) -> None:
        """Call before popping until empty: a push after this rings again, so no wake-up is lost."""
        try:
            os.eventfd_read(self.bell_fd)
        except BlockingIOError:
            pass

    def close(self) -> None:
        self._map.close()
        os.close(self.memory_fd)
        os.close(self.bell_fd)
