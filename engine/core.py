"""engine-core: the process that owns the model. Its loop: take messages, run one step, send what it produced.

No asyncio and no tokenizer here, so that Python work for thousands of streams never delays a step. It ends when told
to, when the other side of its life line closes, or when it cannot go on; it never restarts itself.
"""

from __future__ import annotations

import collections
import ctypes
import faulthandler
import logging
import os
import select
import signal
import sys
import time

import msgspec

from engine.core_config import CoreConfig
from engine.engine import Engine
from engine.errors import DeviceLost, EngineError
from engine.log import log_event, setup_logging
from engine.messages import Abort, ApiMessage, Control, CoreMessage, Fatal, Generate, Loading, LoadPhase
from engine.ring import Ring

log = logging.getLogger("appliance.core")

HEARTBEAT_SECONDS = 0.5
MAX_UNSENT_FRAMES = 64
"""Frames waiting for room in the ring before stepping pauses: engine-api is behind, more tokens do not help it."""


class CoreProcess:
    """Moves messages between the rings and the Engine. `run()` returns the exit status."""

    def __init__(self, config: CoreConfig, inbox: Ring, outbox: Ring, alive_fd: int) -> None:
        self.config, self.inbox, self.outbox = config, inbox, outbox
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ApiMessage)
        self._unsent: collections.deque[bytes] = collections.deque()
        self._stopping = False
        self._poll = select.poll()
        self._poll.register(inbox.bell_fd, select.POLLIN)
        self._poll.register(alive_fd, 0)  # POLLHUP is always reported
        self._alive_fd = alive_fd

    def run(self) -> int:
        engine: Engine | None = None
        status = 0
        try:
            engine = Engine.load(self.config, progress=self._report_loading)
            self._send([engine.ready])
            self._send([engine.stats()])
            while not self._stopping:
                idle = not engine.has_work
                self._wait(HEARTBEAT_SECONDS if idle else 0.0)
                self._receive(engine)
                if len(self._unsent) > MAX_UNSENT_FRAMES:
                    time.sleep(0.001)
                else:
                    self._send(engine.step())
                self._flush()
        except EngineError as error:
            log_event(log, logging.ERROR, "core_fatal", error.message, hint=error.hint)
            lost = engine.abandon(error) if engine is not None and isinstance(error, DeviceLost) else []
            self._last_words([*lost, Fatal(error=error.message, hint=error.hint, exit_code=error.exit_code)])
            status = error.exit_code
        except Exception as error:  # the last line of defence: say what it was, then die, never limp on
            log_event(log, logging.ERROR, "core_fatal", "engine-core failed", exc_info=True)
            self._last_words([Fatal(error=f"{type(error).__name__}: {error}")])
            status = 1
        if engine is not None:
            try:
                engine.close()
            except EngineError as error:  # everything was said and answered: what is left is the process's end
                log_event(log, logging.ERROR, "close_failed", error.message)
                status = status or error.exit_code
        return status

    def _last_words(self, messages: list[CoreMessage]) -> None:
        """Say why before leaving, ahead of anything unsent; give a full ring a second to make room."""
        self._unsent.clear()
        self._send(messages)
        for _ in range(100):
            if not self._unsent:
                break
            time.sleep(0.01)
            self._flush()

    def _report_loading(self, phase: LoadPhase, done: int, total: int) -> None:
        self._send([Loading(phase=phase, done=done, total=total)])
        self._wait(0.0)

    def _wait(self, seconds: float) -> None:
        """Sleep until there is a message, or the time is over; exit at once when engine-api is gone."""
        if self._unsent:
            seconds = min(seconds, 0.002)
        for fd, event in self._poll.poll(seconds * 1000):
            if fd == self._alive_fd and event & (select.POLLHUP | select.POLLERR):
                log_event(log, logging.ERROR, "core_orphaned", "engine-api is gone, leaving")
                logging.shutdown()
                os._exit(3)

    def _receive(self, engine: Engine) -> None:
        self.inbox.clear_bell()
        while (frame := self.inbox.pop()) is not None:
            message = self._decoder.decode(frame)
            match message:
                case Generate():
                    self._send(engine.add(message))
                case Abort():
                    engine.abort(message.request_id, message.index)
                case Control(op="stop"):
                    self._stopping = True
                case Control(op="cancel"):
                    engine.cancel_control(message.control_id)
                case Control():
                    self._send(engine.control(message.control_id, message.op, message.args))

    def _send(self, messages: list[CoreMessage]) -> None:
        if messages:
            self._unsent.append(self._encoder.encode(messages))
            self._flush()

    def _flush(self) -> None:
        pushed = False
        while self._unsent and self.outbox.push(self._unsent[0]):
            self._unsent.popleft()
            pushed = True
        if pushed:
            self.outbox.ring_bell()


def main() -> int:
    """Started by EngineClient only: argv[1] is JSON {"core": CoreConfig, "fds": [in, bell, out, bell, alive]}."""
    arguments = msgspec.json.decode(sys.argv[1])
    setup_logging(identifier="engine-core")
    faulthandler.enable()  # a crash in compiled code leaves a traceback in the journal
    # systemd sends SIGTERM to the whole scope: engine-api decides when we stop, after the requests in flight.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no orphan even in the middle of a long step
    fds: list[int] = arguments["fds"]
    config = msgspec.convert(arguments["core"], CoreConfig)
    process = CoreProcess(config, Ring.attach((fds[0], fds[1])), Ring.attach((fds[2], fds[3])), fds[4])
    return process.run()


if __name__ == "__main__":
    sys.exit(main())
