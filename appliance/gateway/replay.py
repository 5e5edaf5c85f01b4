"""A stream that was cut goes on: the same request to an engine of the same release, which computes it again (the same
bits, the design's exactness), leaves out what the client has, and continues."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from appliance.gateway.stream import StreamCut, shutting_down
from appliance.gateway.upstream import UpstreamError
from appliance.gateway.withdrawn import withdrawn
from engine.api.errors import ApiError
from engine.log import log_event

if TYPE_CHECKING:
    from appliance.gateway.engines import Engine
    from appliance.gateway.relay import Relay
    from appliance.gateway.stream import Stream
    from appliance.gateway.upstream import Exchange, Head

GONE_SECONDS = 0.5
logger = logging.getLogger(__name__)


class GaveUp(Exception):
    """The stream cannot go on."""

    def __init__(self, outcome: str, error: ApiError) -> None:
        super().__init__(error.message)
        self.outcome, self.error = outcome, error


class Replay:
    """Use as `await Replay(...).run(cut)`; when it returns the stream has ended, whole or with an error event."""

    _whole = False

    def __init__(self, relay: Relay, stream: Stream, engine: Engine) -> None:
        self._relay, self._stream = relay, stream
        self._engines, self._settings, self._call = relay.engines, relay.settings, relay.call
        self._engine, self._release = engine, engine.release
        self._deadline = 0.0
        self._loop = asyncio.get_running_loop()

    async def run(self, cut: StreamCut) -> None:
        stream, metrics = self._stream, self._relay.gateway.metrics
        stream.start_waiting()
        try:
            await self._go_on_or_end(cut)
            outcome = "done"
        except GaveUp as gave_up:
            outcome = gave_up.outcome
            log_event(
                logger, logging.ERROR, "stream_failed", str(gave_up), req_id=self._call.request_id, outcome=outcome,
                release=self._release,
            )  # fmt: skip
            await stream.fail(gave_up.error)
        finally:
            stream.stop_waiting()
        metrics.replays.inc(self._settings.slot, self._release, outcome)

    async def _go_on_or_end(self, cut: StreamCut | None) -> None:
        try:
            await self._go_on(cut)
        except asyncio.CancelledError:
            if not self._call.take_abort():
                raise
            raise GaveUp("failed", shutting_down()) from None

    async def _go_on(self, cut: StreamCut | None) -> None:
        """Attempts until the stream is whole; GaveUp."""
        while True:
            if cut is not None:
                self._note(cut)
                self._deadline = self._loop.time() + self._settings.gateway.replay_timeout
            engine = await self._next_engine()
            try:
                with engine.busy():
                    cut = await self._attempt(engine)
            except StreamCut as again:
                cut = again
            if self._whole:
                return

    def _note(self, cut: StreamCut) -> None:
        """Count a cut; GaveUp when there were enough or the stream cannot be resumed."""
        engine, stream = self._engine, self._stream
        log_event(
            logger, logging.WARNING, "stream_cut", str(cut), req_id=self._call.request_id, kind=cut.kind,
            gpu=engine.gpu, release=self._release,
        )  # fmt: skip
        if cut.kind == "closed":
            self._engines.suspect(engine)
        else:
            self._engines.rest(engine)
        if cut.kind == "shutdown":
            raise GaveUp("failed", shutting_down())
        if not stream.resumable:
            raise self._give_up("failed", f"the engine failed in the middle of this stream: {cut}")
        self._call.replays += 1
        if self._call.replays > self._settings.gateway.retries:
            raise self._give_up("failed", f"the engines of {self._release} failed {self._call.replays} times: {cut}")
        stream.start_waiting()

    def _give_up(self, outcome: str, message: str) -> GaveUp:
        return GaveUp(outcome, ApiError(502, message, code="stream_failed"))

    async def _next_engine(self) -> Engine:
        gone_since: float | None = None
        while (engine := self._engines.pick(self._release)) is None:
            left = self._deadline - self._loop.time()
            if left <= 0:
                seconds = self._settings.gateway.replay_timeout
                raise self._give_up("timeout", f"no engine of {self._release} could go on within {seconds:g} s")
            gone_since = self._gone_since(gone_since)
            await self._engines.changed(left)
            if self._relay.gateway.aborting:
                raise GaveUp("failed", shutting_down())
        return engine

    def _gone_since(self, since: float | None) -> float | None:
        """Since when the release has been gone from this host; None: it is not. GaveUp once that lasts: pointer and
        launchers' states are files of several writers, and seen one after another."""
        if not withdrawn(self._settings.paths, self._engines.launchers.values(), self._release):
            return None
        now = self._loop.time()
        if since is not None and now - since >= GONE_SECONDS:
            raise self._give_up("withdrawn", f"{self._release} was taken out of service, with all of its engines")
        return now if since is None else since

    async def _attempt(self, engine: Engine) -> StreamCut | None:
        """One engine; a StreamCut is raised or returned when it broke with the request in work."""
        try:
            exchange, head = await self._relay.open(engine, *self._stream.resume_headers())
        except UpstreamError as error:
            if error.kind == "connect":
                self._engines.suspect(engine)
                return None
            self._engine = engine
            return StreamCut(error.kind, str(error))
        try:
            if head.status == 200:
                self._engine = engine
                self._call.answered_by(engine)
                await self._stream.follow(exchange)
                self._whole = True
                return None
            return await self._refused(engine, exchange, head)
        finally:
            exchange.close()

    async def _refused(self, engine: Engine, exchange: Exchange, head: Head) -> StreamCut | None:
        verdict = head.get("x-appliance-error") or ""
        if head.status in (429, 503):
            self._engines.rest(engine)
            return None
        if head.status == 502 or verdict.endswith(" retry"):
            self._engine = engine
            return StreamCut("error", f"the engine answered {head.status} {verdict}")
        code = verdict.partition(" ")[0]
        if code == "resume_diverged":  # two devices that should agree bit for bit do not: one computes wrongly
            log_event(
                logger, logging.CRITICAL, "resume_diverged", req_id=self._call.request_id, gpu=engine.gpu,
                first_gpu=self._engine.gpu, release=self._release,
            )  # fmt: skip
        raise self._give_up("diverged" if code == "resume_diverged" else "failed", f"the engine of GPU {engine.gpu} "
            f"could not go on with this stream: {head.status} {code}")  # fmt: skip
