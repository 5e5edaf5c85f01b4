"""The two parsers of the relay: whatever way bytes are cut, the same comes out; and nothing but their own error."""

from __future__ import annotations

import asyncio
import os

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from appliance.gateway import metrics, sse, upstream
from appliance.gateway.sse import EventError, Events, resume_value
from appliance.gateway.upstream import Connection, UpstreamError, parse_head


class Wire:
    """A transport that only takes notes."""

    def __init__(self) -> None:
        self.closed = self.paused = False
        self.pauses = 0

    def write(self, data: bytes) -> None: ...
    def writelines(self, data: list[bytes]) -> None: ...
    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True

    close = abort

    def pause_reading(self) -> None:
        assert not self.paused
        self.paused, self.pauses = True, self.pauses + 1

    def resume_reading(self) -> None:
        assert self.paused
        self.paused = False


def receive(pieces: list[bytes], *, eof: bool = False, attach_late: bool = False) -> tuple[int, bytes, bool]:
    """(status, body, whether the connection can be used again) of a response in these pieces; UpstreamError."""

    async def run() -> tuple[int, bytes, bool]:
        idle: list[Connection] = []
        connection, wire = Connection(idle.append, lambda _: None), Wire()
        connection.connection_made(wire)  # type: ignore[arg-type]
        exchange = connection.send(b"x", b"")
        body, attached = bytearray(), attach_late
        for piece in pieces:
            if not wire.closed:
                connection.data_received(piece)
            if not attached and exchange.head.done() and exchange.head.exception() is None:
                exchange.attach(body.extend)
                attached = True
        if eof:
            connection.connection_lost(None)
        if exchange.head.done() and exchange.head.exception() is None:
            exchange.attach(body.extend)
        if not exchange.ended.done():
            raise UpstreamError("unfinished", "")
        exchange.ended.result()
        return exchange.head.result().status, bytes(body), bool(idle)

    return asyncio.run(run())


def cut(data: bytes, places: list[int]) -> list[bytes]:
    at = sorted({place % (len(data) + 1) for place in places})
    return [data[a:b] for a, b in zip([0, *at], [*at, len(data)]) if a != b]


bounded = hypothesis_settings(deadline=None, max_examples=2000 if os.environ.get("APPLIANCE_FULL") else 60)
BODY = st.binary(max_size=300)
BEGINNINGS = [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"]
PLACES = st.lists(st.integers(0, 2000), max_size=12)


@bounded
@given(BODY, PLACES, st.lists(st.integers(1, 40), min_size=1, max_size=20), st.booleans())
def test_chunks_come_out_whole_however_they_were_cut(body, places, sizes, late):
    framed, at, turn = b"", 0, 0
    while at < len(body):
        size = min(sizes[turn % len(sizes)], len(body) - at)
        framed += b"%X\r\n%b\r\n" % (size, body[at : at + size])
        at, turn = at + size, turn + 1
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert receive(cut(head + framed + b"0\r\n\r\n", places), attach_late=late) == (200, body, True)


@bounded
@given(BODY, PLACES, st.booleans())
def test_a_body_with_a_length_comes_out_whole(body, places, late):
    head = b"HTTP/1.1 404 Not Found\r\ncontent-length: %d\r\n\r\n" % len(body)
    assert receive(cut(head + body, places), attach_late=late) == (404, body, True)


@bounded
@given(BODY, PLACES)
def test_a_body_without_a_length_ends_with_the_connection(body, places):
    assert receive(cut(b"HTTP/1.1 200 OK\r\nX: y\r\n\r\n" + body, places), eof=True) == (200, body, False)


@bounded
@given(BODY.filter(bool), st.integers(0, 10_000), st.booleans())
def test_a_body_that_is_cut_short_is_an_error(body, place, chunked):
    if chunked:
        data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    else:
        data = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    with pytest.raises(UpstreamError) as error:
        receive([data[: place % len(data)]] if place % len(data) else [], eof=True)
    assert error.value.kind == "closed"


@bounded
@given(BODY)
def test_bytes_behind_a_response_close_the_connection(extra):
    data = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" + extra
    assert receive([data]) == (200, b"ok", not extra)


@bounded
@given(st.binary(max_size=400), PLACES, st.sampled_from(BEGINNINGS))
def test_nothing_but_its_own_error_comes_of_garbage(data, places, prefix):
    try:
        receive(cut(prefix + data, places), eof=True)
    except UpstreamError:
        pass


@pytest.mark.parametrize("head", ["HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 1", "HTTP/1.1 200",
    "HTTP/1.1 200 \r\nX-A: b"])  # fmt: skip
def test_heads_at_the_edge(head):
    if head.count("Content-Length") == 2:
        with pytest.raises(UpstreamError):
            parse_head(head.encode())
    else:
        assert parse_head(head.encode()).status == 200


def test_a_body_that_nobody_takes_pauses_the_connection():
    async def run() -> None:
        connection, wire = Connection(lambda _: None, lambda _: None), Wire()
        connection.connection_made(wire)  # type: ignore[arg-type]
        exchange = connection.send(b"x", b"")
        connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        connection.data_received(b"x" * (upstream.MAX_EARLY_BYTES + 1))
        assert wire.paused
        body = bytearray()
        exchange.attach(body.extend)
        assert not wire.paused
        exchange.pause()
        exchange.pause()
        assert wire.paused
        exchange.resume()
        connection.data_received(b"x" * (1_000_000 - upstream.MAX_EARLY_BYTES - 1))
        assert exchange.ended.done() and len(body) == 1_000_000
        exchange.close()  # complete: nothing is closed
        assert not wire.closed

    asyncio.run(run())


# ---- events --------------------------------------------------------------------------------------------------------

EVENTS = st.lists(
    st.sampled_from([
        b'id: 0:1.0.1.-.aa\ndata: {"a":1}\n\n', b"id: 0:2.0.1.-.ab\ndata: {}\n\n", b"id: 12:9.0.1.5.ac\ndata: {}\n\n",
        b": ping\n\n", b'data: {"x":"id: 3:4"}\n\n', b": error nan final\ndata: {}\n\n",
    ]),
    max_size=30,
)  # fmt: skip


@bounded
@given(EVENTS, PLACES, st.booleans())
def test_events_are_passed_on_whole_and_ids_are_those_of_what_was_passed_on(events, places, done):
    data = b"".join(events) + (b"data: [DONE]\n\n" if done else b"")
    ids: dict[bytes, bytes] = {}
    reader = Events(ids)
    out = b""
    for piece in cut(data, places):
        got = reader.feed(piece)
        assert not got or got.endswith(b"\n\n")
        out += got
        seen = [line for line in out.split(b"\n") if line.startswith(b"id: ")]
        assert ids == {line[4:].split(b":")[0]: line[4:] for line in seen}
    assert out == data
    assert reader.done == done
    assert reader.error == ("nan" if b": error nan final\ndata: {}\n\n" in events else None)


@bounded
@given(EVENTS, PLACES, EVENTS)
def test_an_error_that_can_be_mended_is_kept_back_with_all_behind_it(events, places, behind):
    error = b': error engine_dead retry\ndata: {"error":{}}\n\n'
    reader = Events({})
    out = b"".join(map(reader.feed, cut(b"".join(events) + error + b"".join(behind), places)))
    assert (reader.broken, reader.broken_event) == ("engine_dead", error)
    # What came in a read of its own behind the error is the engine's mistake; nobody listens by then.
    assert out.startswith(b"".join(events))


def test_an_event_without_end_is_an_error(monkeypatch):
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 1000)
    reader = Events({})
    with pytest.raises(EventError):
        for _ in range(100):
            assert reader.feed(b"x" * 100) == b""


@pytest.mark.parametrize("entry", [b"0:1\r\nX-A: b", b"0:1,1:2", b"0:", b":1", b"0:1 2", b"0:" + b"1" * 100, b"x:1"])
def test_an_id_that_is_no_state_never_becomes_a_header(entry):
    assert resume_value({b"0": b"0:1.0.1.-.aa", b"1": entry}) is None
    assert resume_value({b"0": b"0:1.0.1.-.aa"}) == "0:1.0.1.-.aa"


# ---- metrics -------------------------------------------------------------------------------------------------------


@bounded
@given(st.lists(st.tuples(st.sampled_from(["a", 'b"\\\n', "ü"]), st.floats(0, 100)), max_size=40), st.integers(1, 4))
def test_the_sum_of_workers_is_what_one_would_have_counted(values, workers):
    from prometheus_client.parser import text_string_to_metric_families

    def make() -> list[metrics.Metric]:
        return [metrics.Counter("c_total", "a", ["x"]), metrics.Histogram("h", "b\nc", ["x"], [1.0, 0.5, 50.0])]

    parts = [make() for _ in range(workers)]
    for number, (label, value) in enumerate(values):
        counter, histogram = parts[number % workers]
        assert isinstance(counter, metrics.Counter) and isinstance(histogram, metrics.Histogram)
        counter.inc(label)
        histogram.observe(value, label)
    total = make()
    metrics.merge(total, [metrics.snapshot(part) for part in parts])
    families = {f.name: f for f in text_string_to_metric_families(metrics.render(total).decode())}
    for label in {label for label, _ in values}:
        mine = [value for name, value in values if name == label]
        samples = {
            (s.name, s.labels.get("le")): s.value
            for f in families.values()
            for s in f.samples
            if s.labels["x"] == label
        }
        assert samples["c_total", None] == samples["h_count", None] == samples["h_bucket", "+Inf"] == len(mine)
        assert samples["h_sum", None] == pytest.approx(sum(mine))
        for edge in ("0.5", "1", "50"):
            assert samples["h_bucket", edge] == sum(value <= float(edge) for value in mine)
