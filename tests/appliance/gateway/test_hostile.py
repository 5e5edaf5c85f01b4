"""Engines, state files and workers that do what they never should: nothing of it reaches a client, another engine, or
the gateway's own life."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import os
import socket
import struct
import time
from pathlib import Path

import pytest

from appliance.gateway import relay, workers
from appliance.gateway.server import BACKLOG
from appliance.gateway.sse import MAX_CHOICES, Events, resume_value
from appliance.gateway.upstream import UpstreamError, parse_head

from .world import DONE, STREAM_HEAD, Received, answer, chunk, counting, event, fronted, settings_for

PIPELINED = b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def heads_and_rest(data: bytes) -> tuple[list[bytes], bytes]:
    """Splits two answers, the first without a body, as a client of a HEAD request reads them."""
    first, _, rest = data.partition(b"\r\n\r\n")
    second, _, body = rest.partition(b"\r\n\r\n")
    return [first, second], body


# ---- answers that are no answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", [b"X:" + b" " * 32_000 + b"\x01", b"X:" + b" \t" * 16_000 + b"\x7f", b"X" * 32_000])
def test_a_bad_header_costs_linear_time(line):
    """Seconds with two repetitions that both match blanks; well under a millisecond without."""
    began = time.process_time()
    with pytest.raises(UpstreamError):
        parse_head(b"HTTP/1.1 200 OK\r\n" + line)
    assert time.process_time() - began < 1


async def test_an_error_without_end_is_bounded_and_another_engine_answers(host, front):
    async def endless(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 503 X\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(chunk(b"x" * 100_000))
            await writer.drain()

    bad = await host.engine(0, script=endless)
    await host.engine(1)
    gateway = await front()
    for _ in range(60):
        assert (await gateway.post())[0] == 200
        if bad.requests:
            break
    assert bad.requests


@pytest.mark.parametrize("status", [200, 500, 503])
async def test_an_answer_that_stops_in_the_middle_is_silence(host, front, status):
    async def stops(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 %d X\r\nX-Appliance-Error: a retry\r\nContent-Length: 9\r\n\r\nhalf" % status)
        await asyncio.sleep(60)

    bad = await host.engine(0, script=stops)
    await host.engine(1)
    gateway = await front(silence_timeout=0.2)
    for _ in range(60):
        assert (await gateway.post())[0] == 200
        if bad.requests:
            break
    assert bad.requests


@pytest.mark.parametrize("kind", ["stream", "large", "chunked"])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_head_never_has_a_body(host, front, monkeypatch, kind, version):
    """What came behind the head of a HEAD's answer would be taken for the next answer."""
    monkeypatch.setattr(relay, "MAX_WHOLE_BYTES", 100)

    async def large(request: Received, writer: asyncio.StreamWriter) -> None:
        chunked = kind == "chunked"
        length = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 300"
        writer.write(b"HTTP/1.1 200 X\r\nContent-Type: application/json\r\n" + length + b"\r\n\r\n")
        for _ in range(2):
            writer.write(chunk(b"a" * 150) if chunked else b"a" * 150)
            await writer.drain()
            await asyncio.sleep(0.05)
        if chunked:
            writer.write(b"0\r\n\r\n")

    await host.engine(0, script=counting(4, delay=0.02) if kind == "stream" else large)
    gateway = await front()
    request = b"HEAD /v1/models HTTP/%b\r\nHost: x\r\nConnection: keep-alive\r\n\r\n" % version
    (first, second), body = heads_and_rest(await gateway.raw(request + PIPELINED))
    assert first.startswith(b"HTTP/%b 200" % version)
    assert second.startswith(b"HTTP/1.1 200")
    assert json.loads(body) == {"status": "ok"}


async def test_engines_that_say_503_slowly_are_bounded_by_wait_timeout(host, front):
    async def slow(request: Received, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.3)
        writer.write(answer(503))

    for gpu in range(4):  # by the time the last one has answered, the first one rests no more
        await host.engine(gpu, script=slow)
    gateway = await front(wait_timeout=1.0)
    async with asyncio.timeout(6):
        status, body = await gateway.post()
    assert (status, body["error"]["code"]) == (503, "no_engine")


async def test_an_answer_that_has_begun_is_never_followed_by_a_second_head(host, front, monkeypatch):
    """Whatever breaks in us in the middle of a stream."""
    await host.engine(0, script=counting(3, cut_after=1))
    gateway = await front()

    async def broken(self, *further):
        raise ValueError("a bug of ours")

    monkeypatch.setattr("appliance.gateway.replay.Replay._next_engine", broken)
    raw = await gateway.raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
    assert raw.count(b"HTTP/1.1") == 1
    assert not raw.endswith(b"0\r\n\r\n"), "it looks whole"
    metrics = gateway.worker.gateway.metrics
    assert metrics.errors.values == {("stable", "r1", "cut"): 1}
    assert not metrics.disconnects.values


async def test_an_engine_that_answers_early_and_reads_no_more_leaves_no_connection(host, front):
    """A close that waits for the rest of the body to be taken would wait for ever."""

    class Early(asyncio.Protocol):
        taken = 0
        gone = asyncio.Event()

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            Early.taken += len(data)
            if b"HTTP/1.1\r\n" in data:
                self.transport.write(answer())  # type: ignore[attr-defined]
                if b"/livez" not in data:
                    self.transport.pause_reading()  # type: ignore[attr-defined]
                    asyncio.get_running_loop().call_later(0.3, self.transport.resume_reading)  # type: ignore[attr-defined]

        def connection_lost(self, exc: Exception | None) -> None:
            if Early.taken > 1000:
                self.gone.set()

    path = host.paths.engine_socket(0, "r1")
    path.parent.mkdir(parents=True, exist_ok=True)
    server = await asyncio.get_running_loop().create_unix_server(Early, os.fspath(path))
    host.report(0)
    gateway = await front()
    assert (await gateway.post(body=b"x" * 3_000_000))[0] == 200
    async with asyncio.timeout(5):
        await Early.gone.wait()
    assert Early.taken < 3_000_000
    server.close()


# ---- event streams ---------------------------------------------------------------------------------------------------


def test_an_empty_piece_changes_nothing():
    """The end of a chunk's line comes as an empty piece."""
    events = Events({})
    assert [events.feed(piece) for piece in (b"data: [DONE]\n", b"", b"\n")] == [b"", b"", b"data: [DONE]\n\n"]
    assert events.done


def test_ids_without_end_cost_no_memory():
    events = Events({})
    for index in range(MAX_CHOICES + 500):
        events.feed(b"id: %d:%b\ndata: {}\n\n" % (index, b"9" * 10_000))
    assert len(events.ids) <= MAX_CHOICES + 1
    assert sum(map(len, events.ids.values())) < 200 * MAX_CHOICES
    assert resume_value(events.ids) is None


# ---- state files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entry",
    [
        {"restarts": 10**400}, {"restarts": -1}, {"release": "r\udcff1"}, {"release": "../r1"}, {"release": 'x"\n'},
        {"state": "\udcff"}, {"last_exit": "\ud800"}, {"progress": 1e308}, {"pid": 2**80}, {"socket": "/x\0y"},
        {"socket": ""}, {"socket": "/" + "a" * 200},
    ],
    ids=str,
)  # fmt: skip
async def test_whatever_a_state_file_says_everything_is_answered(host, front, entry):
    await host.engine(0)
    await host.engine(1)
    gateway = await front()
    host.report(1, **entry)
    await asyncio.sleep(0.3)
    for path in ("/readyz", "/health", "/metrics"):
        assert (await gateway.get(path))[0] == 200, path
    assert [(await gateway.post())[0] for _ in range(8)] == [200] * 8
    json.loads(json.dumps(await gateway.worker.gateway.describe()).encode())  # what a worker says to its supervisor


@pytest.mark.parametrize("hold", [{"reason": "\udcff"}, {"reason": {"a": [[[[[]]]]]}}, {"reason": 1e999}])
async def test_a_reason_that_cannot_be_shown_hides_nothing(host, front, hold):
    await host.engine(0)
    await host.engine(1)
    gateway = await front()
    host.drain("stray \udcff byte")
    path = host.paths.launcher_state(1)
    state = json.loads(path.read_text()) | {"holds": {"operator": hold}}
    path.with_name("new").write_text(json.dumps(state))
    path.with_name("new").rename(path)
    await gateway.until(lambda: gateway.worker.gateway.engines.draining)
    assert (await gateway.get("/readyz"))[0] == 503
    assert (await gateway.get("/health"))[0] == 503
    assert (await gateway.get("/metrics"))[0] == 200


async def test_a_state_file_that_leads_in_circles_hides_no_other_gpu(host, front):
    await host.engine(0)
    loop = host.paths.launcher_state(7)
    loop.parent.mkdir(parents=True)
    loop.symlink_to(loop)
    gateway = await front()
    await host.engine(1)
    await gateway.until(lambda: len(gateway.worker.gateway.engines.admitted) == 2)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("call", ["listdir", "stat", "readlink", "open"])
async def test_what_cannot_be_looked_at_is_not_gone_and_is_looked_at_again(host, front, monkeypatch, call, number):
    """No file descriptors left, for example: an idle GPU is no lost GPU, and a drain in that moment is not missed."""
    await host.engine(0)
    await host.engine(1)
    gateway = await front()
    engines = gateway.worker.gateway.engines
    real, root = getattr(os, call), str(host.paths.run.parent.parent)

    def fails(path, *arguments, **options):
        if str(path).startswith(root):
            raise OSError(number, os.strerror(number))
        return real(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        if call == "open":  # the new file cannot be read in the one moment in which it is new
            patch.undo()
            host.hold(1, operator={"reason": "x"})
            host.drain("x")
            patch.setattr(os, call, fails)
        engines.poll()
        assert (len(engines.admitted), engines.release, engines.not_ready()) == (2, "r1", None)
    if call == "open":
        await gateway.until(lambda: len(engines.admitted) == 1 and engines.draining)


# ---- the end ---------------------------------------------------------------------------------------------------------


async def test_answers_that_are_not_there_when_the_gateway_has_to_go_are_503(host):
    """Not a cut connection, and not counted as a client that left."""
    bodies: list[asyncio.StreamWriter] = []

    async def hangs(request: Received, writer: asyncio.StreamWriter) -> None:
        bodies.append(writer)
        await asyncio.sleep(60)

    await host.engine(0, script=hangs)
    async with fronted(host, drain_timeout=0.2) as gateway:
        asked = [asyncio.create_task(gateway.post()) for _ in range(3)]
        await gateway.until(lambda: len(bodies) == 3)
        gateway.worker.leave()
        for status, body in await asyncio.gather(*asked):
            assert (status, body["error"]["code"]) == (503, "shutting_down")
        metrics = gateway.worker.gateway.metrics
        assert metrics.errors.values == {("stable", "r1", "shutting_down"): 3}
        assert not metrics.disconnects.values


async def test_a_replay_under_way_when_the_gateway_has_to_go_ends_with_an_error_event(host):
    """While the engine that is to go on has not answered yet."""
    asked = asyncio.Event()

    async def hangs(request: Received, writer: asyncio.StreamWriter) -> None:
        if request.get("X-Appliance-Resume") is not None:
            asked.set()
            await asyncio.sleep(60)
        writer.write(STREAM_HEAD + chunk(event(0, 1)))
        await writer.drain()
        writer.transport.abort()

    await host.engine(0, script=hangs)
    await host.engine(1, script=hangs)
    async with fronted(host, drain_timeout=0.2) as gateway:
        stream = asyncio.create_task(gateway.stream())
        await asyncio.wait_for(asked.wait(), 5)
        gateway.worker.leave()
        data = await stream
        assert data.startswith(event(0, 1))
        assert b"shutting_down" in data
        assert DONE not in data
        inside = gateway.worker.gateway
        assert inside.metrics.errors.values == {("stable", "r1", "stream"): 1}
        assert (inside.active, inside.buffered_bytes, inside.calls) == (0, 0, {})


# ---- workers ---------------------------------------------------------------------------------------------------------


class Process:
    pid, killed = 1, False

    def kill(self) -> None:
        self.killed = True


@pytest.mark.parametrize("last", [b'{"answer": 1, "metr', b"\xff\n", b"[" * 100_000 + b"\n", b"x" * (17 << 20)])
async def test_a_worker_that_dies_or_babbles_in_a_line_ends_nobody_else(last):
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    process = Process()
    child = workers.Child(process, ours)  # type: ignore[arg-type]
    listening = asyncio.create_task(child.listen())
    loop = asyncio.get_running_loop()
    theirs.setblocking(False)
    await loop.sock_sendall(theirs, b'{"ready": true}\n')
    try:
        await asyncio.wait_for(loop.sock_sendall(theirs, last), 5)
    except (ConnectionError, TimeoutError):
        pass
    theirs.close()
    await asyncio.wait_for(listening, 5)
    assert child.ready.is_set()
    assert process.killed == (last[-1:] == b"\n" or len(last) > workers.MAX_LINE)


async def test_a_worker_that_cannot_be_started_now_is_started_later(host, monkeypatch):
    """No processes or descriptors left: the other workers serve on, and the supervisor tries again."""
    supervisor = object.__new__(workers.Supervisor)
    supervisor.worker = type("W", (), {"stop": asyncio.Event()})()  # type: ignore[assignment]
    supervisor._children = []
    tried = 0

    async def start(self: workers.Supervisor, index: int) -> workers.Child:
        nonlocal tried
        tried += 1
        if tried > 2:
            supervisor.worker.stop.set()
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(workers.Supervisor, "_start", start)
    monkeypatch.setattr(workers, "RESTART_SECONDS", 0.01)
    await asyncio.wait_for(supervisor._keep(0), 5)
    assert tried == 3


# ---- the admin listeners, and the queue before the public one --------------------------------------------------------


async def test_admin_connections_that_say_nothing_are_few_and_closed(host, front, monkeypatch):
    """They would take the file descriptors that clients need."""
    monkeypatch.setattr("appliance.gateway.server.MAX_ADMIN_CONNECTIONS", 5)
    settings = settings_for(host.paths, port=0)
    quick = dataclasses.replace(settings.api, timeouts=dataclasses.replace(settings.api.timeouts, header=0.3))
    await front(api=quick)
    path = str(host.paths.gateway_socket("stable"))
    opened = [await asyncio.open_unix_connection(path) for _ in range(7)]
    for _, writer in opened[:2]:
        writer.write(b"GET /metr")
    async with asyncio.timeout(5):
        said = [await reader.read() for reader, _ in opened]
    assert sum(b" 503 " in answer for answer in said) == 2
    assert sum(b" 408 " in answer for answer in said) == 5
    for _, writer in opened:
        writer.close()
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(b"GET /livez HTTP/1.0\r\n\r\n")
    assert b" 200 " in await reader.read()
    writer.close()


async def test_a_burst_of_clients_fits_into_the_queue(host, front):
    """tcp(7), TCP_INFO of a listening socket: tcpi_sacked is the length of its queue."""
    await host.engine(0)
    gateway = await front()
    somaxconn = int(Path("/proc/sys/net/core/somaxconn").read_text())
    ours = [int(fd) for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")]
    lengths = [length for fd in ours if (length := _queue_length(fd, gateway.port)) is not None]
    assert lengths == [min(BACKLOG, somaxconn)] * len(lengths)
    assert lengths, "the listener was not found"


def _queue_length(fd: int, port: int) -> int | None:
    if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
        return None
    with socket.socket(fileno=os.dup(fd)) as sock:
        listens = sock.family == socket.AF_INET and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if not listens or sock.getsockname()[1] != port:
            return None
        return int(struct.unpack_from("I", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 28)[0])
