"""engine-api's side of the channel: starts engine-core, sends requests, hands its messages to the right request.

Everything here runs on the event loop of engine-api; nothing blocks. When engine-core dies every request in flight gets
EngineDead and `on_death` is set; restarting is the launcher's business, never ours.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

import msgspec

from engine.core_config import CoreConfig
from engine.errors import AdmissionError, EngineDead, EngineError, QueueFull
from engine.messages import (
    Abort,
    ApiMessage,
    Control,
    ControlReply,
    CoreMessage,
    Fatal,
    Fault,
    Generate,
    Loading,
    Ready,
    Stats,
    Tokens,
)
from engine.ring import Ring
from engine.spawn import python_env, python_module

RING_BYTES = 64 << 20
"""Room for the largest message (a prompt's logprobs); memory is used only as far as it was ever filled."""

State = Literal["loading", "ready", "draining", "dead"]


class RequestHandle:
    """The answers to one Generate: iterate Tokens messages of all choices until each has a finish reason.

    Use `async with`: leaving the block aborts whatever is unfinished, so a client that left frees its pages.
    """

    def __init__(self, client: EngineClient, message: Generate) -> None:
        self.request_id = message.request_id
        self.prompt_tokens = len(message.prompt_ids)
        self.submitted_at = time.monotonic()
        self.first_token_at: float | None = None
        self._client = client
        self._open = set(range(message.n))  # choices without a finish reason yet
        self._inbox: collections.deque[Tokens] = collections.deque()
        self._wake = asyncio.Event()
        self._error: EngineError | None = None

    def __aiter__(self) -> AsyncIterator[Tokens]:
        return self

    async def __anext__(self) -> Tokens:
        while not self._inbox:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._inbox.popleft()

    def abort(self, index: int | None = None) -> None:
        """Stop one choice or all of them. Idempotent; nothing more is delivered for an aborted choice."""
        gone = set(self._open) if index is None else self._open & {index}
        if not gone:
            return
        self._open -= gone
        self._client._send(Abort(request_id=self.request_id, index=index))
        self._finish_if_closed()
        self._wake.set()

    async def __aenter__(self) -> RequestHandle:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self.abort()

    def _deliver(self, message: Tokens) -> None:
        if message.index not in self._open:
            return  # aborted meanwhile
        if self.first_token_at is None:
            self.first_token_at = time.monotonic()
            self._client._left_queue(self)
        if message.finish_reason is not None:
            self._open.discard(message.index)
        self._inbox.append(message)
        self._finish_if_closed()
        self._wake.set()

    def _fail(self, error: EngineError) -> None:
        self._error = error
        self._open.clear()
        self._wake.set()

    def _finish_if_closed(self) -> None:
        if not self._open:
            self._client._forget(self)


MAX_FAULTS = 16  # that /admin/state shows


class EngineClient:
    """Owner of the engine-core process and of every open RequestHandle."""

    def __init__(self, core: CoreConfig, *, max_queued_requests: int = 256, max_queued_prompt_tokens: int = 262_144):
        self.core_config = core
        self.max_queued_requests = max_queued_requests
        self.max_queued_prompt_tokens = max_queued_prompt_tokens
        self.state: State = "loading"
        self.loading: Loading | None = None
        self.ready: Ready | None = None
        self.stats: Stats | None = None
        self.last_stats_at = 0.0
        self.last_step_at: float | None = None  # when a Stats first told of the newest step
        self.queued_requests = 0
        self.queued_prompt_tokens = 0
        self.fatal: Fatal | None = None
        self.faults: collections.deque[Fault] = collections.deque(maxlen=MAX_FAULTS)  # the newest, oldest first
        self.on_death = asyncio.Event()
        self._ready_or_dead = asyncio.Event()
        self._handles: dict[str, RequestHandle] = {}
        self._queued: set[str] = set()
        self._outbox: collections.deque[bytes] = collections.deque()
        self._controls: dict[int, asyncio.Future[ControlReply]] = {}
        self._control_ids = itertools.count(1)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[CoreMessage])
        self._process: subprocess.Popen[bytes] | None = None
        self._retry: asyncio.TimerHandle | None = None

    # ---- life of the process ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Fork engine-core and return at once; `wait_ready()` waits for the model."""
        loop = asyncio.get_running_loop()
        self._to_core = Ring.create("appliance-to-core", RING_BYTES)
        self._to_api = Ring.create("appliance-to-api", RING_BYTES)
        alive_here, alive_there = os.pipe()  # engine-core exits when our end closes, however we end
        fds = (*self._to_core.fds(), *self._to_api.fds(), alive_here)
        arguments = msgspec.json.encode({"core": self.core_config, "fds": fds}).decode()
        # engine-core leaves when we say so, never by a signal meant for the whole terminal or scope: it starts with
        # them blocked (a mask survives exec) and ignores them once it runs.
        ours = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
        try:
            self._process = subprocess.Popen(
                [*python_module("engine.core"), arguments], env=python_env(), pass_fds=fds, stdin=subprocess.DEVNULL
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, ours)
        os.close(alive_here)
        self._alive_fd = alive_there
        self._pid_fd = os.pidfd_open(self._process.pid)
        loop.add_reader(self._to_api.bell_fd, self._receive)
        loop.add_reader(self._pid_fd, self._on_exit)

    async def wait_ready(self) -> Ready:
        await self._ready_or_dead.wait()
        if self.ready is None:
            raise EngineDead(
                self.fatal.error if self.fatal else f"engine-core ended with status {self._exit_status()}",
                hint=self.fatal.hint if self.fatal else None,
            )
        return self.ready

    @property
    def open_requests(self) -> int:
        """Requests that were handed to engine-core and have not ended, whether it has begun them or not."""
        return len(self._handles)

    @property
    def core_pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def stop(self, grace_seconds: float = 5.0) -> int:
        """Ask engine-core to end, wait, then insist. Requests still open fail. Returns its exit status."""
        process = self._process
        if process is None:  # never started
            return 0
        if process.poll() is None:
            self._send(Control(control_id=0, op="stop"))
            try:
                await asyncio.wait_for(self.on_death.wait(), grace_seconds)
            except TimeoutError:
                process.send_signal(signal.SIGKILL)
                await self.on_death.wait()
        return process.wait()

    def _exit_status(self) -> str:
        code = self._process.poll() if self._process else None
        return f"signal {-code}" if code is not None and code < 0 else str(code)

    def _on_exit(self) -> None:
        assert self._process is not None
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pid_fd)
        os.close(self._pid_fd)
        try:
            self._receive()  # what it said last
        except EngineDead:
            pass
        loop.remove_reader(self._to_api.bell_fd)
        self._process.wait()
        if self.fatal is None and self._process.returncode:
            self.fatal = Fatal(
                error=f"engine-core ended with {self._exit_status()}",
                hint="killed from outside, often for want of memory: see the kernel's log"
                if self._process.returncode == -signal.SIGKILL
                else "its own log lines come before this one",
            )
        self._die(self.fatal.error if self.fatal else f"engine-core ended with {self._exit_status()}")
        os.close(self._alive_fd)
        self._to_core.close()
        self._to_api.close()

    def _die(self, reason: str) -> None:
        self.state = "dead"
        for handle in list(self._handles.values()):
            handle._fail(EngineDead(f"the engine stopped: {reason}"))
            self._forget(handle)
        for future in self._controls.values():
            if not future.done():
                future.set_exception(EngineDead(f"the engine stopped: {reason}"))
        self._controls.clear()
        self._outbox.clear()
        self._ready_or_dead.set()
        self.on_death.set()

    # ---- requests --------------------------------------------------------------------------------------------------

    def check_capacity(self, num_requests: int, num_tokens: int) -> None:
        """May these requests with `num_tokens` prompt tokens together be queued now, all of them? Nothing can change
        between this and their submits if nothing is awaited. AdmissionError when they never will fit, QueueFull when
        not now, EngineDead when there is no engine. A single request is bounded by the context alone."""
        if self.state == "dead":
            raise EngineDead("the engine is not running", hint="see its log; the launcher restarts it")
        if self.state != "ready":
            raise QueueFull(f"the engine is {self.state}", retry_after_seconds=5)
        if num_requests > self.max_queued_requests:
            raise AdmissionError(
                f"{num_requests} prompts at once are more than this server queues ({self.max_queued_requests})"
            )
        if num_requests > 1 and num_tokens > self.max_queued_prompt_tokens:
            raise AdmissionError(
                f"{num_requests} prompts of {num_tokens} tokens together are more than this server queues "
                f"({self.max_queued_prompt_tokens})"
            )
        if self.queued_requests + num_requests > self.max_queued_requests:
            raise QueueFull(
                f"{self.queued_requests} requests are waiting and this one adds {num_requests}; "
                f"the limit is {self.max_queued_requests}"
            )
        if self.queued_requests and self.queued_prompt_tokens + num_tokens > self.max_queued_prompt_tokens:
            raise QueueFull(
                f"{self.queued_prompt_tokens} prompt tokens are waiting and this request adds {num_tokens}; "
                f"the limit is {self.max_queued_prompt_tokens}"
            )

    def submit(self, message: Generate) -> RequestHandle:
        """Queue a request; errors as check_capacity's."""
        tokens = len(message.prompt_ids)
        self.check_capacity(1, tokens)
        if message.request_id in self._handles:
            raise ValueError(f"request id {message.request_id} is in use")
        handle = RequestHandle(self, message)
        self._handles[message.request_id] = handle
        self._queued.add(message.request_id)
        self.queued_requests += 1
        self.queued_prompt_tokens += tokens
        self._send(message)
        return handle

    async def control(self, op: str, *, timeout_seconds: float = 60.0, **args: Any) -> dict[str, Any]:
        """An operator's question to engine-core (golden, checksum, ...). AdmissionError when the arguments are wrong,
        EngineError when it cannot answer."""
        if self.state in ("dead", "loading"):
            raise EngineDead(f"the engine is {self.state}")
        control_id = next(self._control_ids)
        future: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()
        self._controls[control_id] = future
        self._send(Control(control_id=control_id, op=op, args=args))
        try:
            reply = await asyncio.wait_for(future, timeout_seconds)
        except TimeoutError:
            raise EngineError(f"{op}: no answer from engine-core in {timeout_seconds:.0f} s") from None
        finally:
            self._controls.pop(control_id, None)
            if not future.done() or future.cancelled():  # nobody waits any more
                self._send(Control(control_id=control_id, op="cancel"))
        if not reply.ok:
            raise (AdmissionError if reply.refused else EngineError)(f"{op}: {reply.error}")
        return reply.result

    def _left_queue(self, handle: RequestHandle) -> None:
        if handle.request_id in self._queued:
            self._queued.discard(handle.request_id)
            self.queued_requests -= 1
            self.queued_prompt_tokens -= handle.prompt_tokens

    def _forget(self, handle: RequestHandle) -> None:
        self._left_queue(handle)
        self._handles.pop(handle.request_id, None)

    # ---- the channel -----------------------------------------------------------------------------------------------

    def _send(self, message: ApiMessage) -> None:
        if self.state == "dead":
            return
        self._outbox.append(self._encoder.encode(message))
        self._flush()

    def _flush(self) -> None:
        pushed = False
        while self._outbox and self._to_core.push(self._outbox[0]):
            self._outbox.popleft()
            pushed = True
        if pushed:
            self._to_core.ring_bell()
        if self._outbox and self._retry is None:  # full: engine-core is behind; order is kept, nothing is dropped
            self._retry = asyncio.get_running_loop().call_later(0.005, self._flush_again)

    def _flush_again(self) -> None:
        self._retry = None  # one timer at a time, however many messages come meanwhile
        self._flush()

    def _receive(self) -> None:
        self._to_api.clear_bell()
        try:
            while (frame := self._to_api.pop()) is not None:
                for message in self._decoder.decode(frame):
                    self._dispatch(message)
        except (RuntimeError, msgspec.DecodeError) as error:
            # A damaged channel cannot be trusted again: end the process, which fails every request honestly.
            self.fatal = Fatal(error=f"damaged channel: {error}")
            assert self._process is not None
            self._process.send_signal(signal.SIGKILL)

    def _dispatch(self, message: CoreMessage) -> None:
        match message:
            case Tokens():
                if (handle := self._handles.get(message.request_id)) is not None:
                    handle._deliver(message)
            case Fault():
                self.faults.append(message)
            case Stats():
                now = time.monotonic()
                if message.steps and (self.stats is None or message.steps != self.stats.steps):
                    self.last_step_at = now
                self.stats, self.last_stats_at = message, now
            case ControlReply():
                future = self._controls.get(message.control_id)
                if future is not None and not future.done():
                    future.set_result(message)
            case Loading():
                self.loading = message
            case Ready():
                self.ready = message
                self.state = "ready"
                self.last_stats_at = time.monotonic()
                self._ready_or_dead.set()
            case Fatal():
                self.fatal = message
