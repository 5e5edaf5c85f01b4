"""gateway.workers > 1: this process listens, starts as many workers, watches over them and adds up what they count.

A worker is `python -m appliance.gateway --worker LISTENER:CHANNEL:LOAD:INDEX`, with the public listener, one end of a
socket pair and the shared load (sharing.py) inherited. On the channel, one JSON object a line: the worker says
{"ready": true}; asked {"ask": N} it answers {"answer": N, "metrics": ..., "state": ...}. A worker that ends is started
again; one whose loop does not answer for STUCK_SECONDS is killed. When this process dies the channel closes and its
workers end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from appliance.gateway import probes
from appliance.gateway.counts import counts
from appliance.gateway.metrics import GatewayMetrics, Metric, Snapshot, merge, snapshot
from appliance.gateway.server import Worker, admin_listeners, public_socket, shown
from appliance.gateway.settings import Settings
from appliance.gateway.sharing import Load
from appliance.gateway.upstream import Pool, UpstreamError
from appliance.notify import Notifier
from engine.api.errors import unavailable
from engine.log import log_event
from engine.spawn import python_env, python_module

logger = logging.getLogger(__name__)

STUCK_SECONDS = 20.0
ASK_SECONDS = 2.0
PING_SECONDS = 5.0
RESTART_SECONDS = 1.0
MAX_LINE = 16 << 20


async def watch(notifier: Notifier) -> None:
    """WATCHDOG=1 for as long as this loop turns."""
    if notifier.watchdog_seconds is None:
        return
    while True:
        notifier.send(WATCHDOG=1)
        await asyncio.sleep(notifier.watchdog_seconds / 3)


# ---- a worker ------------------------------------------------------------------------------------------------------


async def run_worker(settings: Settings, inherited: str) -> int:
    """Serve on the inherited listener until SIGTERM or until the supervisor is gone."""
    listener_fd, channel_fd, load_fd, index = (int(part) for part in inherited.split(":"))
    worker = Worker(settings)
    worker.gateway.engines.load = Load(load_fd, settings.gateway.workers, index)
    worker.gateway.gather = lambda: _ask_supervisor(settings)
    with socket.socket(fileno=listener_fd) as listener:
        reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=channel_fd), limit=MAX_LINE)
        talking: list[asyncio.Task[None]] = []

        def ready() -> None:
            _say(writer, {"ready": True})
            talking.append(asyncio.create_task(_answer(worker, reader, writer)))

        try:
            status = await worker.run(listener, ready=ready, draining=lambda: None)
            with contextlib.suppress(ConnectionError):  # nobody is there to be told
                _say(writer, {"answer": -1, **_report(worker)})
                await writer.drain()
            return status
        finally:
            for task in talking:
                task.cancel()
            writer.close()


async def _answer(worker: Worker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while line := await reader.readline():
            _say(writer, {"answer": msgspec.json.decode(line)["ask"], **_report(worker)})
    worker.leave()  # the supervisor died


def _report(worker: Worker) -> dict[str, Any]:
    gateway = worker.gateway
    metrics: list[Metric] = [*gateway.metrics.all(), *probes.gauges(gateway)]
    clients = gateway.canary.clients
    return {
        "metrics": snapshot(metrics), "state": probes.state(gateway),
        "clients": {"run": clients.run, "keys": clients.keys},
    }  # fmt: skip


def _say(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    writer.write(msgspec.json.encode(message) + b"\n")


async def _ask_supervisor(settings: Settings) -> bytes:
    """The sum of all workers, for a scrape of the public listener."""
    pool = Pool(os.fspath(settings.paths.gateway_socket(settings.slot)))
    body = bytearray()
    try:
        connection = await pool.acquire()
        exchange = connection.send(b"GET /metrics HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\n\r\n", b"")
        async with asyncio.timeout(2 * ASK_SECONDS):
            await exchange.head
            exchange.attach(body.extend)
            await exchange.ended
    except (UpstreamError, TimeoutError) as error:
        raise unavailable(f"the supervisor of this gateway does not answer: {error}", "supervisor", 1) from None
    finally:
        pool.close()
    return bytes(body)


# ---- the supervisor ------------------------------------------------------------------------------------------------


class Child:
    """One worker process."""

    def __init__(self, process: asyncio.subprocess.Process, channel: socket.socket) -> None:
        self.process = process
        self.ready = asyncio.Event()
        self.metrics: Snapshot = {}
        self.state: dict[str, Any] = {}
        self.clients: dict[str, Any] = {"run": None, "keys": []}
        self.heard = asyncio.get_running_loop().time()
        self._channel = channel
        self._asked = 0
        self._answers: dict[int, asyncio.Future[None]] = {}
        self._writer: asyncio.StreamWriter | None = None

    async def listen(self) -> None:
        """Read what it says until its end of the channel closes."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._channel, limit=MAX_LINE)
        try:
            while (line := await reader.readline()).endswith(b"\n"):  # without: it died in the middle of one
                self._heard(msgspec.json.decode(line))
        except ConnectionError:
            pass  # it died as we asked it something
        except (
            ValueError,
            RecursionError,
        ) as error:  # no JSON, or over MAX_LINE
            log_event(logger, logging.ERROR, "worker_babbles", str(error), worker_pid=self.process.pid)
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
        finally:
            self._writer.close()
            for future in self._answers.values():
                if not future.done():
                    future.set_result(None)

    def _heard(self, message: dict[str, Any]) -> None:
        self.heard = asyncio.get_running_loop().time()
        if message.get("ready"):
            self.ready.set()
        if "metrics" in message:
            self.metrics = {
                name: [(tuple(labels), value) for labels, value in samples]
                for name, samples in message["metrics"].items()
            }
            self.state, self.clients = message["state"], message["clients"]
            future = self._answers.pop(message["answer"], None)
            if future is not None and not future.done():
                future.set_result(None)

    async def ask(self) -> bool:
        """Renew `metrics` and `state`; what it said last stays where it does not answer in time (then: False)."""
        if self._writer is None or self._writer.is_closing() or not self.ready.is_set():
            return True  # it has not begun, or has ended
        self._asked += 1
        future = self._answers[self._asked] = asyncio.get_running_loop().create_future()
        _say(self._writer, {"ask": self._asked})
        try:
            async with asyncio.timeout(ASK_SECONDS):
                await future
        except TimeoutError:
            log_event(logger, logging.WARNING, "worker_silent", worker_pid=self.process.pid)
            return False
        return True


class Supervisor:
    """Workers on one listener. Its own Worker object serves nobody: it sees the engines, for /readyz and /metrics."""

    def __init__(self, settings: Settings, argv: Sequence[str], listener: socket.socket) -> None:
        self.settings, self._argv, self._listener = settings, argv, listener
        self.worker = Worker(settings)  # also checks keys and certificate before anything is started
        self.gateway = self.worker.gateway
        self.gateway.gather, self.gateway.describe_workers = self.metrics, self.describe
        self.gateway.count_workers = self.count
        self._children: list[Child] = []
        self._past: list[Snapshot] = []  # what workers that ended had counted
        self._notifier = Notifier()
        self._load_fd, self._load = Load.create(settings.gateway.workers)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        gateway = self.gateway
        gateway.poll()
        tasks = [loop.create_task(gateway.keep_up())]
        keepers = [loop.create_task(self._keep(index)) for index in range(self.settings.gateway.workers)]
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._forward, number)
        try:
            tasks += [loop.create_task(self._announce()), loop.create_task(self._ping())]
            stopping = loop.create_task(self.worker.stop.wait())
            await asyncio.wait((stopping, *tasks, *keepers), return_when=asyncio.FIRST_COMPLETED)
            if not stopping.done():  # none of the others ends by itself
                broken = [task.exception() for task in (*tasks, *keepers) if task.done()]
                log_event(logger, logging.CRITICAL, "supervisor_failed", f"{broken[0]!r}")
                return 1
            gateway.stopping = True
            seconds = self.settings.gateway.drain_timeout + 10
            self._notifier.send(STOPPING=1, STATUS="draining", EXTEND_TIMEOUT_USEC=int(seconds * 1e6))
            await asyncio.wait(keepers, timeout=seconds)
        finally:
            for task in (*tasks, *keepers):
                task.cancel()
            for child in self._children:
                if child.process.returncode is None:
                    child.process.kill()
            gateway.engines.close()
            gateway.engine_metrics.close()
        return 0

    def _forward(self, number: signal.Signals) -> None:
        if number != signal.SIGHUP:
            self.worker.leave()
        else:
            self.worker.reload_aside()  # the listener for /metrics is ours
        for child in self._children:
            # One that still starts reads the new files anyway, and has no handler for SIGHUP yet.
            if child.process.returncode is None and (number != signal.SIGHUP or child.ready.is_set()):
                child.process.send_signal(number)

    async def _announce(self) -> None:
        wanted = self.settings.gateway.workers
        while sum(child.ready.is_set() for child in self._children) < wanted:  # one may die and be replaced meanwhile
            await asyncio.sleep(0.02)
        log_event(logger, logging.INFO, "listening", f"listening on {shown(self._listener)}")
        self._notifier.send(READY=1, STATUS=f"serving {self.settings.host}:{self.settings.port}")
        await watch(self._notifier)
        await self.worker.stop.wait()  # nobody wants a watchdog

    async def _ping(self) -> None:
        """Keep what the workers have counted, and kill one whose loop does not turn."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(PING_SECONDS)
            await self._ask_all()
            for child in self._children:
                if loop.time() - child.heard > STUCK_SECONDS and child.process.returncode is None:
                    log_event(logger, logging.ERROR, "worker_stuck", worker_pid=child.process.pid)
                    child.process.kill()

    async def _keep(self, index: int) -> None:
        """One worker after the other in one place, until we stop."""
        while not self.worker.stop.is_set():
            try:
                child = await self._start(index)
            except OSError as error:  # no process, no memory, no descriptors left now; the other workers go on
                log_event(logger, logging.ERROR, "worker_not_started", str(error))
                await asyncio.sleep(RESTART_SECONDS)
                continue
            self._children.append(child)
            if self.worker.stop.is_set():
                child.process.terminate()  # it came too late for the signal to the others
            await child.listen()
            status = await child.process.wait()
            self._children.remove(child)
            self._bury(child, cut=self._load.in_flight(index))
            self._load.clear(index)
            if not self.worker.stop.is_set():
                log_event(logger, logging.ERROR, "worker_ended", worker_pid=child.process.pid, status=status)
                await asyncio.sleep(RESTART_SECONDS)

    async def _start(self, index: int) -> Child:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            command = [*python_module("appliance.gateway"), *self._argv]
            inherited = (self._listener.fileno(), theirs.fileno(), self._load_fd)
            command += ["--worker", ":".join(map(str, (*inherited, index)))]
            environment = {k: v for k, v in python_env().items() if k not in ("NOTIFY_SOCKET", "WATCHDOG_USEC")}
            try:
                process = await asyncio.create_subprocess_exec(
                    *command, env=environment, pass_fds=inherited, stderr=sys.stderr
                )
            except OSError:
                ours.close()
                raise
        ours.setblocking(False)
        return Child(process, ours)

    # ---- sums ------------------------------------------------------------------------------------------------------

    async def _ask_all(self) -> list[int]:
        """Renew what is known of the workers; the pids of those that did not answer."""
        asked = list(self._children)
        answered = await asyncio.gather(*(child.ask() for child in asked))
        for child in asked:
            self.gateway.canary.clients.merge(child.clients["run"], child.clients["keys"])
        return [child.process.pid for child, answer in zip(asked, answered, strict=True) if not answer]

    def _bury(self, child: Child, cut: int) -> None:
        """Keep what a worker that ended had counted, and count the requests that it took along."""
        total = self._total()
        merge(total.all(), [*self._past, _counted(child.metrics)])
        if cut:
            total.errors.inc(self.settings.slot, self.gateway.engines.serving() or "", "cut", by=cut)
        self._past = [snapshot(total.all())]

    def _total(self) -> GatewayMetrics:
        return GatewayMetrics(self.settings.slot, self.settings.gateway.metrics_buckets_seconds)

    async def count(self) -> dict[str, Any]:
        """For /counts: of all workers, those that ended too."""
        silent = await self._ask_all()
        total = self._total()
        merge(total.all(), [*self._past, *(_counted(child.metrics) for child in self._children)])
        states = [child.state for child in self._children if child.state]
        return counts(
            self.gateway, total.all(), connections=sum(state["connections"] for state in states),
            in_flight=sum(state["in_flight"] for state in states), silent=silent,
        )  # fmt: skip

    async def metrics(self) -> bytes:
        theirs, _ = await asyncio.gather(self.gateway.engine_metrics.collect(), self._ask_all())
        total = self._total()
        gauges = probes.gauges(self.gateway)
        everything: list[Metric] = [*total.all(), *gauges]
        merge(everything, [*self._past, *(child.metrics for child in self._children)])
        return probes.render_all(everything, self.gateway, theirs)

    async def describe(self) -> dict[str, Any]:
        """Of the whole gateway: in flight and the like added up, per worker below."""
        await self._ask_all()
        states = [child.state for child in self._children if child.state]
        whole = probes.state(self.gateway)
        for key in ("in_flight", "waiting", "connections", "buffered_bytes"):
            whole[key] = sum(state[key] for state in states)
        for gpu in whole["gpus"]:
            for engine in gpu["engines"]:
                engine["in_flight"] = sum(_in_flight(state, gpu["gpu"], engine["release"]) for state in states)
        whole["workers"] = [
            {"pid": child.process.pid, "in_flight": child.state.get("in_flight")} for child in self._children
        ]
        return whole


_COUNTED = frozenset(metric.name for metric in GatewayMetrics("").all())


def _counted(metrics: Snapshot) -> Snapshot:
    """Without what is only of the moment."""
    return {name: value for name, value in metrics.items() if name in _COUNTED}


def _in_flight(state: dict[str, Any], gpu: int, release: str) -> int:
    return sum(
        int(engine["in_flight"])
        for entry in state["gpus"]
        for engine in entry["engines"]
        if entry["gpu"] == gpu and engine["release"] == release
    )


async def run_supervisor(settings: Settings, argv: Sequence[str]) -> int:
    with public_socket(settings) as listener:
        supervisor = Supervisor(settings, argv, listener)
        async with admin_listeners(supervisor.worker):
            return await supervisor.run()
