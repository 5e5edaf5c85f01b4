"""What the workers of one gateway share: the public listener, taken in turns, and how busy each GPU is."""

from __future__ import annotations

import asyncio
import errno
import logging
import mmap
import os
import socket
import ssl
from collections.abc import Callable

from engine.log import log_event

logger = logging.getLogger(__name__)

MAX_GPUS = 1023
_ROW = MAX_GPUS + 1  # and the number of client connections
_SLACK = 2  # connections that a worker may have more than the one with the fewest ...
_YIELD_SECONDS = 0.002  # ... before it lets the others go first, for so long
_REST_SECONDS = 0.5  # without accepting, when there are no file descriptors left


class Acceptor:
    """Takes one connection each time the loop comes round, and gives way where others have fewer. asyncio's server
    would take all that wait, and after a burst one worker would have most of them (42 of 64 with four workers)."""

    def __init__(
        self,
        listener: socket.socket,
        factory: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext | None,
        handshake_seconds: float,
        load: Load,
    ) -> None:
        self._load = load
        self._listener, self._factory, self._context = listener, factory, context
        self._handshake = handshake_seconds if context is not None else None
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._listen()

    def close(self) -> None:
        self._closed = True
        self._loop.remove_reader(self._listener)

    def _listen(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        if self._load.ahead(_SLACK):
            self._loop.remove_reader(self._listener)
            self._loop.call_later(_YIELD_SECONDS, self._take)
        else:
            self._take_one()

    def _take(self) -> None:
        """It is still there: the others are busy."""
        if not self._closed:
            self._take_one()
            self._listen()

    def _take_one(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # another worker was faster, or the client has left again
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                raise
            log_event(logger, logging.ERROR, "cannot_accept", error.strerror or str(error))
            self._loop.call_soon(self._loop.remove_reader, self._listener)
            self._loop.call_later(_REST_SECONDS, self._listen)
            return
        sock.setblocking(False)
        task = self._loop.create_task(self._begin(sock))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _begin(self, sock: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._factory, sock, ssl=self._context, ssl_handshake_timeout=self._handshake
            )
        except (OSError, ssl.SSLError) as error:  # a handshake that failed: the client's affair
            log_event(logger, logging.DEBUG, "handshake_failed", str(error))
            sock.close()


class Load:
    """Requests in flight by GPU and client connections of every worker, in memory that all of them map: a row a worker,
    so nobody waits for a lock. Without it each worker would spread only its own requests."""

    def __init__(self, fd: int, workers: int, index: int | None) -> None:
        """`index`: our row; None only looks (and clears)."""
        self._map = mmap.mmap(fd, self.size(workers))
        self._cells = memoryview(self._map).cast("I")
        self._workers, self._index = workers, index

    @staticmethod
    def size(workers: int) -> int:
        return workers * _ROW * 4

    @classmethod
    def create(cls, workers: int) -> tuple[int, Load]:
        """The descriptor to hand down, and a view of it."""
        fd = os.memfd_create("gateway-load")
        os.ftruncate(fd, cls.size(workers))
        return fd, cls(fd, workers, None)

    def add(self, gpu: int, change: int) -> None:
        assert self._index is not None
        self._cells[self._index * _ROW + gpu % MAX_GPUS] += change

    def of(self, gpu: int) -> int:
        """Of all workers."""
        return sum(self._cells[worker * _ROW + gpu % MAX_GPUS] for worker in range(self._workers))

    def in_flight(self, index: int) -> int:
        """Requests that a worker's engines have from it: what is cut when it dies."""
        return sum(self._cells[index * _ROW : index * _ROW + MAX_GPUS])

    def set_connections(self, number: int) -> None:
        assert self._index is not None
        self._cells[self._index * _ROW + MAX_GPUS] = number

    def ahead(self, slack: int) -> bool:
        """Whether we have more connections than some other worker, by more than `slack`."""
        assert self._index is not None
        numbers = [self._cells[worker * _ROW + MAX_GPUS] for worker in range(self._workers)]
        return numbers[self._index] > min(numbers) + slack

    def clear(self, index: int) -> None:
        """A worker died."""
        self._cells[index * _ROW : (index + 1) * _ROW] = memoryview(bytes(_ROW * 4)).cast("I")
