"""Raw bytes on the socket: slow, lying, pipelining and half-dead clients, and readers that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct

import pytest

from engine.api.app import build_app
from engine.api.server import listening
from engine.api.service import SERVICE
from engine.log import JsonFormatter

from .conftest import FACTORIES, make_config
from .fakes import ByteTokenizer, FakeClient, Script
from .test_lifecycle import until

HOST = b"Host: x\r\n"


def post(path=b"/v1/completions", body=b'{"prompt": "x", "max_tokens": 2}', extra=b"", length=None):
    size = len(body) if length is None else length
    head = b"POST " + path + b" HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n" + extra
    if b"chunked" not in extra:
        head += b"Content-Length: %d\r\n" % size
    return head + b"\r\n" + body


LONG = json.dumps({"prompt": "x", "max_tokens": 500}).encode()


@contextlib.asynccontextmanager
async def connected(endpoint):
    reader, writer = await asyncio.open_connection(*endpoint.address[:2])
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def exchange(endpoint, data, timeout=5.0):
    """Send bytes, return everything until the server closes or the timeout."""
    async with connected(endpoint) as (reader, writer):
        writer.write(data)
        out = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(timeout):
                while piece := await reader.read(65536):
                    out += piece
        return out


def status_of(raw):
    return int(raw.split(b" ", 2)[1])


def error_of(raw):
    return json.loads(raw.split(b"\r\n\r\n", 1)[1])["error"]


async def alive(endpoint):
    assert (await endpoint.get("/livez"))[0] == 200
    assert (await endpoint.post("/v1/completions", {"prompt": "x", "max_tokens": 1}))[0] == 200


# ---- slow writers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [b"", b"GET /livez HT", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A: b"])
async def test_slow_headers_are_cut_off(make_endpoint, start):
    endpoint = await make_endpoint(timeouts={"header": 0.2})
    raw = await exchange(endpoint, start)
    assert status_of(raw) == 408
    assert error_of(raw)["code"] == "header_timeout"
    await alive(endpoint)


async def test_trickled_headers_are_cut_off(make_endpoint):
    """Slowloris: a header line every moment, never the end."""
    endpoint = await make_endpoint(timeouts={"header": 0.3})
    async with connected(endpoint) as (reader, writer):
        writer.write(b"GET /livez HTTP/1.1\r\n")
        answer = asyncio.create_task(reader.read())
        for number in range(100):
            if answer.done():
                break
            with contextlib.suppress(ConnectionError):
                writer.write(b"X-%d: a\r\n" % number)
            await asyncio.sleep(0.02)
        assert status_of(await answer) == 408
        assert number < 60
    await until(lambda: endpoint.service.connections == 0)


async def test_second_request_of_a_connection_has_a_header_timeout_too(make_endpoint):
    endpoint = await make_endpoint(timeouts={"header": 0.2})
    async with connected(endpoint) as (reader, writer):
        writer.write(b"GET /livez HTTP/1.1\r\n" + HOST + b"\r\n")
        await reader.readuntil(b'"ok"}')
        await asyncio.sleep(0.3)  # idle is not late
        writer.write(b"GET /livez HTT")
        assert status_of(await reader.read()) == 408


@pytest.mark.parametrize("early", [True, False])
async def test_half_a_head_in_the_first_segment_or_behind_a_request_is_late_too(make_endpoint, early):
    """Many sockets that say b"POST /v1" at once and then nothing held all connections for the keep-alive time (75 s):
    the bytes were there before the handler's task had started."""
    endpoint = await make_endpoint(timeouts={"header": 0.2})
    start = b"POST /v1" if early else b"GET /livez HTTP/1.1\r\n" + HOST + b"\r\nGET /livez HTTP/1.1\r\nX:"
    sockets = [socket.create_connection(endpoint.address) for _ in range(20)]
    try:
        for sock in sockets:
            sock.sendall(start)
            sock.setblocking(False)
        await until(lambda: endpoint.service.connections == len(sockets))
        await until(lambda: endpoint.service.connections == 0)
        for sock in sockets:
            assert b" 408 " in sock.recv(65536)
    finally:
        for sock in sockets:
            sock.close()
    await alive(endpoint)


async def test_a_head_begun_during_a_request_is_late_after_it(make_endpoint):
    endpoint = await make_endpoint(timeouts={"header": 0.3})
    async with connected(endpoint) as (reader, writer):
        writer.write(post())
        await asyncio.sleep(0.02)
        writer.write(b"GET /livez HTTP/1.1\r\nX:")
        async with asyncio.timeout(5):
            assert b" 408 " in await reader.read()


async def test_idle_connections_are_closed(make_endpoint):
    endpoint = await make_endpoint(timeouts={"keepalive": 0.2})
    async with connected(endpoint) as (reader, writer):
        writer.write(b"GET /livez HTTP/1.1\r\n" + HOST + b"\r\n")
        async with asyncio.timeout(5):
            assert (await reader.read()).endswith(b'"ok"}')


@pytest.mark.parametrize("chunked", [False, True])
async def test_slow_body_is_cut_off(make_endpoint, chunked):
    endpoint = await make_endpoint(timeouts={"body": 0.2})
    extra = b"Transfer-Encoding: chunked\r\n" if chunked else b""
    raw = await exchange(endpoint, post(body=b"5\r\n{" if chunked else b"{", extra=extra, length=100))
    assert status_of(raw) == 408
    assert error_of(raw)["code"] == "body_timeout"
    assert b"Connection: close" in raw
    await alive(endpoint)


# ---- lies about the length -------------------------------------------------------------------------------------------


async def test_content_length_over_the_limit_is_refused_before_the_body(make_endpoint):
    endpoint = await make_endpoint(limits={"max_body_bytes": 100})
    raw = await exchange(endpoint, post(body=b"", length=101), timeout=1)
    assert status_of(raw) == 413


async def test_expect_100_is_answered_after_the_checks(make_endpoint):
    endpoint = await make_endpoint(limits={"max_body_bytes": 100})
    extra = b"Expect: 100-continue\r\n"
    raw = await exchange(endpoint, post(body=b"", length=101, extra=extra), timeout=1)
    assert status_of(raw) == 413  # and not 100 first
    async with connected(endpoint) as (reader, writer):
        body = b'{"prompt": "x", "max_tokens": 1}'
        writer.write(post(body=b"", length=len(body), extra=extra))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
    raw = await exchange(endpoint, post(extra=b"Expect: miracles\r\n"), timeout=1)
    assert status_of(raw) == 417
    assert error_of(raw)["param"] == "Expect"


async def test_unknown_expectation_on_an_unknown_route(endpoint):
    raw = await exchange(endpoint, b"GET /nope HTTP/1.1\r\nExpect: miracles\r\n" + HOST + b"\r\n", timeout=1)
    assert status_of(raw) in (404, 417)
    assert error_of(raw)["message"]


async def test_endless_chunks_are_cut_at_the_limit(make_endpoint):
    endpoint = await make_endpoint(limits={"max_body_bytes": 10_000})
    async with connected(endpoint) as (reader, writer):
        writer.write(post(body=b"", extra=b"Transfer-Encoding: chunked\r\n"))
        answer = asyncio.create_task(reader.read(65536))
        for _ in range(2000):
            if answer.done():
                break
            with contextlib.suppress(ConnectionError):
                writer.write(b"3e8\r\n" + b" " * 1000 + b"\r\n")
                await writer.drain()
            await asyncio.sleep(0)
        raw = await answer
        assert status_of(raw) == 413
        assert error_of(raw)["code"] == "body_too_large"
    assert endpoint.service._buffered_bytes == 0
    await alive(endpoint)


@pytest.mark.parametrize("body", [b"zz\r\nabc\r\n0\r\n\r\n", b"-5\r\nabcde\r\n0\r\n\r\n", b"2\r\nabcdef\r\n0\r\n\r\n",
                                  b"ffffffffffffffffffff\r\nabc"])  # fmt: skip
async def test_broken_chunks(endpoint, body):
    raw = await exchange(endpoint, post(body=body, extra=b"Transfer-Encoding: chunked\r\n"), timeout=1)
    assert status_of(raw) == 400
    assert error_of(raw)["type"] == "invalid_request_error"
    await alive(endpoint)


async def test_both_lengths_are_refused(endpoint):
    """Content-Length with chunked is how requests are smuggled past a proxy (RFC 9112 6.1)."""
    raw = await exchange(
        endpoint,
        b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\nContent-Length: 5\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        timeout=1,
    )  # fmt: skip
    assert status_of(raw) == 400
    assert endpoint.client.submitted == []


async def test_more_body_than_announced_is_not_part_of_it(endpoint):
    async with connected(endpoint) as (reader, writer):
        writer.write(post(body=b'{"prompt": "x", "max_tokens": 2}', length=32))
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"garbage\r\n\r\n")  # a request of its own, and no good one
        assert b"400 Bad Request" in await reader.read()
    raw = await exchange(endpoint, post(body=b'{"prompt": "x", "max_tokens": 2}garbage', length=32), timeout=1)
    assert b"400 Bad Request" in raw
    assert len(endpoint.client.submitted) <= 2
    await alive(endpoint)


@pytest.mark.parametrize("data", [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET / HTTP/9.9\r\n\r\n",
    b"GET /livez HTTP/1.1\r\nBad Header: x\r\n\r\n",
    b"GET /livez HTTP/1.1\r\nA: \x00\r\n\r\n", b"G\r\n\r\n", b"GET  HTTP/1.1\r\n\r\n", b"\x00" * 100,
    b"POST /infer HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"POST /infer HTTP/1.1\r\nContent-Length: 1e3\r\n\r\n",
    b"GET /livez HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n", b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
    b"GET /livez HTTP/1.1\r\n" + b"".join(b"X-%d: a\r\n" % i for i in range(500)) + b"\r\n",
])  # fmt: skip
async def test_what_is_not_http(endpoint, data):
    raw = await exchange(endpoint, data, timeout=1)
    assert status_of(raw) in (400, 431)
    error = error_of(raw)
    assert error["code"] == "bad_http" and error["message"].rstrip(":") == error["message"]
    assert "bytearray" not in error["message"] and "aaaa" not in error["message"]
    await alive(endpoint)


# ---- leaving ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["close", "reset", "half_close"])
@pytest.mark.parametrize("queued", [False, True])
async def test_every_way_to_leave_frees_the_request(make_endpoint, stream, how, queued):
    endpoint = await make_endpoint(Script(never_answer=True) if queued else Script(token_delay=0.005))
    body = json.dumps({"prompt": "x", "max_tokens": 500, "stream": stream}).encode()
    reader, writer = await asyncio.open_connection(*endpoint.address[:2])
    writer.write(post(body=body))
    await until(lambda: endpoint.client.running)
    if how == "half_close":
        writer.write_eof()  # a client that only half closes counts as gone, see connection.py
    elif how == "reset":
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    else:
        writer.close()
    await until(lambda: not endpoint.client.running)
    await until(lambda: endpoint.service.connections == 0 and endpoint.service.active == 0)
    writer.close()
    del reader


async def test_leaving_in_the_middle_of_the_body(endpoint):
    _, writer = await asyncio.open_connection(*endpoint.address[:2])
    writer.write(post(body=b'{"prompt": "x', length=100))
    await until(lambda: endpoint.service.active == 1)
    writer.close()
    await until(lambda: endpoint.service.active == 0 and endpoint.service._buffered_bytes == 0)
    assert endpoint.client.submitted == []


# ---- pipelining ------------------------------------------------------------------------------------------------------


async def test_pipelined_requests_are_answered_in_order(endpoint):
    bodies = [json.dumps({"prompt": "x", "max_tokens": size, "seed": 1}).encode() for size in (3, 1, 2)]
    raw = await exchange(endpoint, b"".join(post(body=body) for body in bodies), timeout=0.7)
    sizes = [json.loads(part.split(b"\r\n\r\n", 1)[1])["usage"]["completion_tokens"]
             for part in raw.split(b"HTTP/1.1 200 OK")[1:]]  # fmt: skip
    assert sizes == [3, 1, 2]


@pytest.mark.parametrize("more", [b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n" * 200, post(body=b"x" * 2_000_000)])
async def test_pipelining_that_would_hide_a_disconnect_ends_the_request(make_endpoint, more):
    endpoint = await make_endpoint(Script(never_answer=True))
    _, writer = await asyncio.open_connection(*endpoint.address[:2])
    writer.write(post(body=LONG))
    await until(lambda: endpoint.client.running)
    writer.write(more)
    await until(lambda: not endpoint.client.running)
    writer.close()


# ---- readers that do not read ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "stream", "size"),
    [(socket.AF_INET, True, 30_000_000), (socket.AF_UNIX, True, 30_000_000), (socket.AF_UNIX, False, 1_000_000)],
)  # on a Unix socket the kernel's TCP_USER_TIMEOUT does not help
async def test_a_stalled_reader_is_cut_off(family, stream, size, tmp_path):
    reply = [97] * size
    client = FakeClient(Script(tokens_per_message=1000 if stream else size), max_model_len=40_000_000)
    client.script.reply = lambda msg, index: reply
    app = build_app(client, ByteTokenizer(), make_config(timeouts={"stall": 0.3}), **FACTORIES)
    unix, loop = tmp_path / "s", asyncio.get_running_loop()
    async with listening(app, host="127.0.0.1", unix_path=unix) as addresses:
        with socket.socket(family) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await loop.sock_connect(sock, addresses[0] if family == socket.AF_INET else str(unix))
            body = json.dumps({"prompt": "x", "max_tokens": len(reply), "stream": stream}).encode()
            await loop.sock_sendall(sock, post(body=body))
            await until(lambda: client.submitted)
            await until(lambda: not client.running and app[SERVICE].connections == 0, seconds=20)


async def test_connections_are_capped(make_endpoint):
    endpoint = await make_endpoint(limits={"max_connections": 3})
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(3):
            await stack.enter_async_context(connected(endpoint))
        await until(lambda: endpoint.service.connections == 3)
        raw = await exchange(endpoint, b"GET /livez HTTP/1.1\r\n\r\n", timeout=1)
        assert status_of(raw) == 503
        assert b"Retry-After: 1" in raw
    await until(lambda: endpoint.service.connections == 0)
    await alive(endpoint)


async def test_http_1_0_stream_ends_by_closing(endpoint):
    body = b'{"prompt": "x", "max_tokens": 2, "stream": true}'
    raw = await exchange(endpoint, post(body=body).replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert status_of(raw) == 200
    assert b"Transfer-Encoding" not in raw
    assert raw.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("data", [
    b"GET /\xff\xfe HTTP/1.1\r\n" + HOST + b"\r\n",
    b"GET /v1/models/%ff\xff HTTP/1.1\r\n" + HOST + b"\r\n",
    b"GET /livez HTTP/1.1\r\nX-Request-Id: \xff\r\n" + HOST + b"\r\n",
    b"GET /livez HTTP/1.1\r\nAuthorization: Bearer \xff\r\n" + HOST + b"\r\n",
    b"POST /infer HTTP/1.1\r\nContent-Type: \xff/json\r\nContent-Length: 2\r\n" + HOST + b"\r\n{}",
    b"POST /infer HTTP/1.1\r\nContent-Type: application/json; charset=\xff\r\nContent-Length: 2\r\n" + HOST + b"\r\n{}",
    b"POST /infer HTTP/1.1\r\nExpect: \xff\r\nContent-Type: application/json\r\nContent-Length: 2\r\nHost: x\r\n\r\n{}",
    b"GET /livez HTTP/1.1\r\nHost: \xff.\xff\r\n\r\n",
    b"\xff\xff /livez HTTP/1.1\r\n" + HOST + b"\r\n",
])  # fmt: skip
async def test_stray_bytes_in_the_head(endpoint, data, caplog):
    """They come to Python as lone surrogates, which neither JSON nor the log can carry as they are."""
    caplog.set_level("INFO")
    raw = await exchange(endpoint, data, timeout=0.5)
    assert status_of(raw) in (200, 400, 403, 404, 415, 417), raw
    json.loads(raw.split(b"\r\n\r\n", 1)[1])
    for entry in caplog.records:
        json.loads(JsonFormatter().format(entry))
    await alive(endpoint)


@pytest.mark.parametrize("upgrade", [b"websocket", b"h2c", b"foo"])
async def test_upgrade_headers_change_nothing(make_endpoint, upgrade):
    endpoint = await make_endpoint(timeouts={"body": 0.5})
    extra = b"Connection: Upgrade\r\nUpgrade: " + upgrade + b"\r\n"
    async with connected(endpoint) as (reader, writer):
        writer.write(post(extra=extra))
        status = status_of(await reader.readuntil(b"\r\n\r\n"))
        assert status in (200, 400, 408)
    await alive(endpoint)


async def test_a_client_that_leaves_behind_an_upgrade_is_seen(make_endpoint):
    endpoint = await make_endpoint(Script(never_answer=True), timeouts={"body": 0.5})
    _, writer = await asyncio.open_connection(*endpoint.address[:2])
    writer.write(post(body=LONG, extra=b"Connection: Upgrade\r\nUpgrade: websocket\r\n") + b"x" * 2_000_000)
    await asyncio.sleep(0.1)
    writer.close()
    await until(lambda: not endpoint.client.running and endpoint.service.connections == 0)


@pytest.mark.parametrize(("host", "status"), [
    (b"127.0.0.1:8000", 200), (b"localhost", 200), (b"LOCALHOST:1", 200), (b"[::1]:8000", 200), (b"[::1]", 200),
    (b"10.1.2.3", 200), (b"gpu7", 200), (b"a.localhost", 200), (b"", 200), (b"evil.example:8000", 403),
    (b"127.0.0.1.evil.example", 403), (b"localhost.evil.example.", 403), (b"EVIL.example", 403),
])  # fmt: skip
async def test_without_keys_foreign_host_names_are_refused(make_endpoint, host, status):
    endpoint = await make_endpoint()
    request = b"GET /v1/models HTTP/1.1\r\nConnection: close\r\nHost: " + host + b"\r\n\r\n"
    assert status_of(await exchange(endpoint, request)) == status
    written_out = await make_endpoint(auth="none")
    assert status_of(await exchange(written_out, request)) == 200


async def test_no_versions_are_told(endpoint):
    for request in (b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"nonsense\r\n\r\n"):
        raw = await exchange(endpoint, request)
        assert b"aiohttp" not in raw and b"Python" not in raw


async def test_a_stream_over_http_1_0_ends_with_its_connection(make_endpoint):
    """keep-alive or not: without chunks there is no other end, and the client waits for it."""
    endpoint = await make_endpoint()
    body = b'{"prompt": "x", "max_tokens": 2, "stream": true}'
    head = b"POST /v1/completions HTTP/1.0\r\n" + HOST + b"Connection: keep-alive\r\nContent-Type: application/json\r\n"
    raw = await exchange(endpoint, head + b"Content-Length: %d\r\n\r\n" % len(body) + body)  # reads to the end
    assert raw.endswith(b"data: [DONE]\n\n")
