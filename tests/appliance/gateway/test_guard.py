"""What never gets through: strangers, other paths, too much, and requests that two parsers could read differently."""

from __future__ import annotations

import asyncio
import hashlib
import os
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.gateway import server
from appliance.gateway.routes import MODEL_PREFIX, OWN, RELAYED
from appliance.gateway.settings import Access, Refused, make_settings
from appliance.hostconfig import Gateway, HostConfig
from appliance.log import BusyError
from engine.api.routes import ROUTES
from engine.api.routes import Access as RouteAccess
from engine.spawn import python_env

from .world import STREAM_HEAD, Received, answer, chunk, counting, event


def key_lines(*keys: str) -> str:
    return "".join(f"{hashlib.sha256(key.encode()).hexdigest()} {key}-label\n" for key in keys)


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text(key_lines("alpha", "beta"))
    return path


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# ---- routes --------------------------------------------------------------------------------------------------------


def test_every_public_route_of_the_engine_is_relayed_and_nothing_else():
    """From the engine's own table, so that a new route there is not forgotten here."""
    public = {
        (route.path.partition("{")[0], route.method)
        for route in ROUTES
        if route.access is RouteAccess.KEY and route.path not in OWN
    }
    assert public == {*RELAYED.items(), (MODEL_PREFIX, "GET")}


@pytest.mark.parametrize(
    "target",
    ["/admin/state", "/admin", "/%61dmin/state", "//admin/state", "/v1/../admin/state", "/admin/state?x=/v1/models",
     "/ADMIN/state", "/admin%2Fstate", "/metrics/../admin/drain", "/v1/models/..%2f..%2fadmin%2fstate",
     "/v1/completions/", "/v1/completions%00", "http://engine/admin/state", "/.//admin/state"],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_no_spelling_of_admin_reaches_an_engine(host, front, target, method):
    engine = await host.engine()
    gateway = await front()
    request = f"{method} {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    status = (await gateway.raw(request.encode())).split(b" ")[1]
    assert status in (b"400", b"404", b"405")
    assert not engine.requests


async def test_trusted_headers_of_a_client_never_reach_an_engine(host, front, keys):
    engine = await host.engine()
    gateway = await front(keys=keys)
    sent = {
        "X-Appliance-Tenant": "root", "x-appliance-relay": "0", "X-APPLIANCE-SEED": "1", "X-Appliance-Created": "1",
        "X-Appliance-Resume": "0:1.0.1.-.0", "X-Appliance-New": "x", "X_Appliance_Tenant": "root",
        "Cookie": "a=b", "X-Forwarded-For": "1.2.3.4", "Host": "127.0.0.1",
    } | bearer("alpha")  # fmt: skip
    assert (await gateway.post(headers=sent))[0] == 200
    headers = {name.lower(): value for name, value in engine.requests[0].headers}
    ours = {name: value for name, value in headers.items() if "appliance" in name}
    assert ours == {"x-appliance-relay": "1", "x-appliance-tenant": "alpha-label"}
    assert not headers.keys() & {"authorization", "cookie", "x-forwarded-for"}
    assert headers["host"] == "engine"


async def test_the_request_id_is_the_clients_or_new_and_goes_both_ways(host, front):
    engine = await host.engine()
    gateway = await front()
    await gateway.post(headers={"X-Request-Id": "abc-1"})
    assert (gateway.headers["X-Request-Id"], engine.requests[-1].get("X-Request-Id")) == ("abc-1", "abc-1")
    await gateway.post()
    assert gateway.headers["X-Request-Id"] == engine.requests[-1].get("X-Request-Id") != "abc-1"
    status, body = await gateway.post(headers={"X-Request-Id": "a b"})
    assert (status, body["error"]["param"]) == (400, "X-Request-Id")
    assert len(engine.requests) == 2


# ---- keys ----------------------------------------------------------------------------------------------------------


async def test_keys_are_needed_everywhere_but_on_the_probes(host, front, keys):
    engine = await host.engine()
    gateway = await front(keys=keys)
    for path in (*RELAYED, "/v1/models/x", "/metrics", "/nothing", "/admin/state"):
        status, body = await gateway.get(path)
        assert (status, body["error"]["code"]) == (401, "invalid_api_key"), path
        assert gateway.headers["WWW-Authenticate"] == "Bearer"
    for wrong in ("", "gamma", "alpha ", "ALPHA", "alpha-label"):
        status, _ = await gateway.post(headers=bearer(wrong) if wrong.strip() == wrong else {"Authorization": wrong})
        assert status == 401, wrong
    assert not engine.requests
    assert (await gateway.get("/livez"))[0] == (await gateway.get("/readyz"))[0] == 200
    assert (await gateway.get("/health")) == (200, {"status": "ready", "reason": None})
    status, body = await gateway.get("/health", headers=bearer("beta"))
    assert body["gpus"][0]["engines"][0]["state"] == "ready"
    assert (await gateway.post(headers=bearer("beta")))[0] == 200
    assert (await gateway.get("/nothing", headers=bearer("beta")))[0] == 404


async def test_keys_reload_and_a_broken_file_changes_nothing(host, front, keys):
    await host.engine()
    gateway = await front(keys=keys)
    keys.write_text(key_lines("gamma"))
    gateway.worker.reload()
    assert (await gateway.post(headers=bearer("alpha")))[0] == 401
    assert (await gateway.post(headers=bearer("gamma")))[0] == 200
    keys.write_text("not a key\n")
    gateway.worker.reload()
    assert (await gateway.post(headers=bearer("gamma")))[0] == 200
    keys.write_text("\n")  # emptied: nobody, not everybody
    gateway.worker.reload()
    assert (await gateway.post())[0] == (await gateway.post(headers=bearer("gamma")))[0] == 401


async def test_an_empty_key_file_is_none_and_its_first_key_closes_the_door(host, front, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("\n")  # what the unit hands over where the admin gave no file
    await host.engine()
    gateway = await front(keys=keys)
    assert (await gateway.post())[0] == 200
    keys.write_text(key_lines("alpha"))
    gateway.worker.reload()
    assert (await gateway.post())[0] == 401


@pytest.mark.parametrize("label", ["a" * 300, "tab\there", "Grüße 🫠"])
async def test_any_label_makes_a_legal_tenant(host, front, tmp_path, label):
    keys = tmp_path / "keys"
    keys.write_text(f"{hashlib.sha256(b'k').hexdigest()} {label}\n")
    engine = await host.engine()
    gateway = await front(keys=keys)
    assert (await gateway.post(headers=bearer("k")))[0] == 200
    tenant = engine.requests[0].get("X-Appliance-Tenant")
    assert tenant and len(tenant) <= 256 and tenant.isprintable()
    assert (tenant == label) == (label == "Grüße 🫠")


@pytest.mark.parametrize(
    ("options", "with_keys", "allowed"),
    [
        ({"host": "0.0.0.0"}, False, False),
        ({"host": "::"}, False, False),
        ({"host": "0.0.0.0"}, True, True),
        ({"host": "0.0.0.0", "auth": "none"}, False, True),
        ({"host": "127.0.0.1"}, False, True),
        ({"host": "127.0.0.1", "auth": "keys"}, False, False),
        ({"host": "127.0.0.1", "auth": "keys"}, True, True),
        ({"canary_host": "0.0.0.0"}, False, True),  # not this slot's
    ],
)
def test_what_is_refused_at_the_start(host_paths, keys, options, with_keys, allowed):
    settings = make_settings(
        HostConfig(gateway=Gateway(**options)), "stable", host_paths, keys=keys if with_keys else None
    )
    if allowed:
        Access(settings)
    else:
        with pytest.raises(Refused) as refused:
            Access(settings)
        assert refused.value.exit_code == 4
        assert refused.value.hint


@pytest.fixture
def host_paths(tmp_path):
    from appliance.paths import Paths

    return Paths.under(tmp_path)


def test_credentials_of_the_unit_are_found(host_paths, tmp_path, monkeypatch, keys):
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(keys.parent))
    keys.rename(keys.with_name("api-keys"))
    settings = make_settings(HostConfig(gateway=Gateway(host="0.0.0.0")), "stable", host_paths)
    assert Access(settings).keys.match("alpha") == "alpha-label"
    with pytest.raises(Refused, match="certificate"):
        make_settings(HostConfig(gateway=Gateway(tls=True)), "stable", host_paths)
    (keys.parent / "tls-cert").write_text("\n")
    (keys.parent / "tls-key").write_text("\n")
    with pytest.raises(Refused, match="certificate"):  # the unit's stand-ins for files that are not there
        make_settings(HostConfig(gateway=Gateway(tls=True)), "stable", host_paths)


async def test_foreign_host_names_are_refused_without_keys(host, front, keys):
    engine = await host.engine()
    gateway = await front()
    for name in ("evil.example", "127.0.0.1.nip.io", "a.b:8000", "evil.example."):
        status, body = await gateway.post(headers={"Host": name})
        assert (status, body["error"]["code"]) == (403, "host"), name
    assert not engine.requests
    for name in ("127.0.0.1:80", "localhost", "gpuhost", "[::1]:8000", "x.localhost", "[::1]"):
        assert (await gateway.post(headers={"Host": name}))[0] == 200, name


async def test_with_keys_any_host_name_is_served(host, front, keys):
    await host.engine()
    gateway = await front(keys=keys)
    assert (await gateway.post(headers={"Host": "llm.example.org"} | bearer("alpha")))[0] == 200


# ---- limits --------------------------------------------------------------------------------------------------------


async def test_a_large_body_is_413_by_its_length_and_by_what_comes(host, front):
    engine = await host.engine()
    gateway = await front(max_body_bytes=5000)
    status, body = await gateway.post(body=b"x" * 5001)
    assert (status, body["error"]["code"]) == (413, "body_too_large")
    assert (await gateway.post(body=b"x" * 5000))[0] == 200

    async def pieces():
        for _ in range(100):
            yield b"x" * 100

    async with gateway.http.post(gateway.url + "/generate", data=pieces()) as response:
        assert response.status == 413
    assert [len(request.body) for request in engine.requests] == [5000]
    assert gateway.worker.gateway.buffered_bytes == 0


async def test_a_chunked_body_reaches_the_engine_with_its_length(host, front):
    engine = await host.engine()
    gateway = await front()

    async def pieces():
        for number in range(20):
            yield b"%d," % number

    async with gateway.http.post(gateway.url + "/generate", data=pieces()) as response:
        assert response.status == 200
    body = b"".join(b"%d," % n for n in range(20))
    assert (engine.requests[0].body, engine.requests[0].get("Content-Length")) == (body, str(len(body)))
    assert engine.requests[0].get("Transfer-Encoding") is None


async def test_many_large_bodies_at_once_stay_within_the_budget(host, front):
    """Each is legal; together they would be 40 MiB above what this process may keep."""
    release = asyncio.Event()

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.write(answer())

    engine = await host.engine(script=script)
    gateway = await front(max_body_bytes=16 << 20)
    service = gateway.worker.gateway
    body = b"x" * (8 << 20)
    tasks = [asyncio.create_task(gateway.post(body=body)) for _ in range(13)]
    await gateway.until(lambda: len(engine.requests) + sum(task.done() for task in tasks) == 13, 20)
    assert service.buffered_bytes <= service.config.limits.max_buffered_bytes == 64 << 20
    release.set()
    statuses = sorted([status for status, _ in await asyncio.gather(*tasks)])
    assert statuses == [200] * 8 + [429] * 5
    assert service.buffered_bytes == 0


async def test_more_than_max_in_flight_is_429(host, front):
    gate = asyncio.Event()

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        await gate.wait()
        writer.write(answer())

    engine = await host.engine(script=script)
    gateway = await front(max_in_flight=3)
    tasks = [asyncio.create_task(gateway.post()) for _ in range(3)]
    await gateway.until(lambda: len(engine.requests) == 3)
    status, body = await gateway.post()
    assert (status, body["error"]["type"]) == (429, "rate_limit_error")
    assert int(gateway.headers["Retry-After"]) >= 1
    assert (await gateway.get("/readyz"))[0] == 200  # probes are not counted
    gate.set()
    assert {status for status, _ in await asyncio.gather(*tasks)} == {200}
    assert (await gateway.post())[0] == 200


async def test_expect_100_continue(host, front):
    await host.engine()
    gateway = await front(max_body_bytes=2000)
    head = b"POST /infer HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    raw = await gateway.raw(head % 2 + b"{}")
    assert raw.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 ")
    raw = await gateway.raw(head % 5000, seconds=1)
    assert raw.startswith(b"HTTP/1.1 413 ")  # before the body was sent
    raw = await gateway.raw((head % 2).replace(b"100-continue", b"200-maybe") + b"{}", seconds=1)
    assert raw.startswith(b"HTTP/1.1 417 ")


# ---- requests that could be read in two ways (RFC 9112, 6.3 and 11.2) ----------------------------------------------

SMUGGLED = b"GET /admin/state HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /infer HTTP/1.1\r\nHost: x\r\n"
AMBIGUOUS = {
    "length and chunks": POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "chunks and length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 50\r\n\r\n{}" + SMUGGLED,
    "list of lengths": POST + b"Content-Length: 2, 2\r\n\r\n{}" + SMUGGLED,
    "signed length": POST + b"Content-Length: +2\r\n\r\n{}" + SMUGGLED,
    "hex length": POST + b"Content-Length: 0x2\r\n\r\n{}" + SMUGGLED,
    "folded header": POST + b"X-A: b\r\n Content-Length: 50\r\nContent-Length: 2\r\n\r\n{}" + SMUGGLED,
    "folded length": POST + b"Content-Length:\r\n 2\r\n\r\n{}" + SMUGGLED,
    "blank before colon": POST + b"Content-Length : 2\r\n\r\n{}" + SMUGGLED,
    "chunked twice": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "unknown coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "coding with a blank": POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "nul in a header": POST + b"X-A: a\0b\r\nContent-Length: 2\r\n\r\n{}" + SMUGGLED,
    "bare CR in a header": POST + b"X-A: a\rContent-Length: 50\r\nContent-Length: 2\r\n\r\n{}" + SMUGGLED,
    "signed chunk": POST + b"Transfer-Encoding: chunked\r\n\r\n+2\r\n{}\r\n0\r\n\r\n" + SMUGGLED,
    "chunk size with underscore": POST + b"Transfer-Encoding: chunked\r\n\r\n0_2\r\n{}\r\n0\r\n\r\n" + SMUGGLED,
    "long chunk": POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}xx\r\n0\r\n\r\n" + SMUGGLED,
}


@pytest.mark.parametrize("name", AMBIGUOUS)
async def test_ambiguous_requests_never_become_two(host, front, name):
    engine = await host.engine()
    gateway = await front()
    raw = await gateway.raw(AMBIGUOUS[name], seconds=1.0)
    assert all(request.target == "/infer" for request in engine.requests), [r.target for r in engine.requests]
    assert len(engine.requests) <= 1
    for request in engine.requests:  # what goes on is framed by us, once
        assert request.get("Content-Length") == str(len(request.body))
        assert request.get("Transfer-Encoding") is None
        assert SMUGGLED not in request.body
    assert b"gpus" not in raw


@pytest.mark.parametrize("value", ["application/json\tx", "a b", "x" * 4000, "\xe9", 'text/plain; a="b,c"'])
async def test_relayed_header_values_stay_in_their_line(host, front, value):
    engine = await host.engine()
    gateway = await front()
    data = f"POST /infer HTTP/1.1\r\nHost: x\r\nAccept: {value}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    raw = await gateway.raw(data.encode("latin-1"))
    assert b" 200 " in raw.split(b"\r\n")[0]
    assert [name.lower() for name, _ in engine.requests[0].headers].count("accept") == 1
    assert engine.requests[0].headers[-1][0].lower() == "content-length"


# ---- slow and broken clients ---------------------------------------------------------------------------------------


async def test_a_client_that_leaves_ends_its_request_in_the_engine(host, front):
    engine = await host.engine(script=counting(1_000_000, delay=0.001))
    gateway = await front()
    async with gateway.http.post(gateway.url + "/v1/completions", json={}) as response:
        await response.content.readany()
        response.close()
    await asyncio.wait_for(engine.requests[0].gone.wait(), 2)
    await gateway.until(lambda: gateway.worker.gateway.active == 0)
    assert gateway.worker.gateway.engines.admitted[0].in_flight == 0
    assert await gateway.metric("appliance_gateway_disconnects_total") == 1


async def test_a_client_that_leaves_before_the_answer_ends_its_request(host, front):
    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(30)

    engine = await host.engine(script=script)
    gateway = await front()
    task = asyncio.create_task(gateway.post())
    await gateway.until(lambda: engine.requests)
    task.cancel()
    await asyncio.wait_for(engine.requests[0].gone.wait(), 2)
    assert len(engine.requests) == 1  # a client's end is no engine's failure


async def test_a_slow_reader_slows_the_engine_and_costs_bounded_memory(host, front):
    written = 0

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(STREAM_HEAD)
        piece = chunk(event(0, 1) * 200)
        while written < 64 << 20:
            writer.write(piece)
            await writer.drain()
            written += len(piece)

    await host.engine(script=script)
    gateway = await front()
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1000)
    writer.write(b"POST /infer HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
    await reader.readexactly(100)
    writer.transport.pause_reading()
    before = -1
    while before != written:
        before = written
        await asyncio.sleep(0.3)
    assert written < 16 << 20  # socket buffers and one read on each side, not the whole stream
    writer.transport.resume_reading()
    for _ in range(16):
        await reader.readexactly(1 << 20)
    assert written > before
    writer.transport.abort()
    await gateway.until(lambda: gateway.worker.gateway.active == 0)


async def test_a_client_that_pipelines_while_its_stream_runs_is_served_in_order(host, front):
    await host.engine(script=counting(3))
    gateway = await front()
    one = b"POST /infer HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
    raw = await gateway.raw(one + one.replace(b"Host: x", b"Host: x\r\nConnection: close"))
    assert raw.count(b"HTTP/1.1 200 ") == 2
    assert raw.count(b"data: [DONE]") == 2


# ---- TLS -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tls")
    for name in ("first", "second"):
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days",
             "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1",
             "-keyout", directory / f"{name}.key", "-out", directory / f"{name}.pem"],
            check=True, capture_output=True,
        )  # fmt: skip
    return directory


async def test_tls_and_a_renewed_certificate(host, front, certificate, tmp_path, monkeypatch):
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))

    def install(name: str) -> None:
        (tmp_path / "tls-cert").write_bytes((certificate / f"{name}.pem").read_bytes())
        (tmp_path / "tls-key").write_bytes((certificate / f"{name}.key").read_bytes())

    install("first")
    await host.engine(script=counting(50))
    trust = ssl.create_default_context(cafile=certificate / "first.pem")
    trust.load_verify_locations(certificate / "second.pem")
    gateway = await front(tls=True, client_ssl=trust)
    assert (await gateway.stream()).endswith(b"data: [DONE]\n\n")
    old = await asyncio.open_connection("127.0.0.1", gateway.port, ssl=trust)
    install("second")
    gateway.worker.reload()
    new = await asyncio.open_connection("127.0.0.1", gateway.port, ssl=trust)

    def name_of(connection) -> str:
        return dict(part[0] for part in connection[1].get_extra_info("peercert")["subject"])["commonName"]

    assert (name_of(old), name_of(new)) == ("first", "second")
    (tmp_path / "tls-key").write_bytes((certificate / "first.key").read_bytes())  # does not belong to the certificate
    gateway.worker.reload()
    assert (await gateway.post())[0] == 200
    for _, writer in (old, new):
        writer.close()
    assert not await gateway.raw(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n", seconds=1)  # no plain HTTP on this port


async def test_a_client_that_floods_its_connection_behind_a_stream_is_cut_off(host, front):
    """Reading has to be paused then, and a client's end would not be seen: its pages would stay taken."""
    engine = await host.engine(script=counting(1_000_000, delay=0.005))
    gateway = await front()
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(b"POST /infer HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
    await reader.readexactly(50)
    writer.write(b"POST /infer HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n" + b"x" * (4 << 20))
    await asyncio.wait_for(engine.requests[0].gone.wait(), 5)
    writer.transport.abort()


@pytest.mark.parametrize("extra", ["Upgrade: websocket\r\nConnection: Upgrade\r\n", "Upgrade: h2c\r\n"])
async def test_an_upgrade_is_not_followed(host, front, extra):
    engine = await host.engine()
    gateway = await front()
    raw = await gateway.raw(
        f"POST /infer HTTP/1.1\r\nHost: x\r\n{extra}Content-Length: 2\r\n\r\n{{}}".encode() + SMUGGLED, seconds=1
    )
    assert not raw.startswith(b"HTTP/1.1 101")
    assert all(request.target == "/infer" and request.get("Upgrade") is None for request in engine.requests)


@pytest.mark.parametrize("line", ["CONNECT 10.0.0.1:80", "OPTIONS *", "TRACE /infer", "GET http://10.0.0.1/infer"])
async def test_it_is_no_proxy(host, front, line):
    engine = await host.engine()
    gateway = await front()
    raw = await gateway.raw(f"{line} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode(), seconds=1)
    assert raw.split(b" ")[1] in (b"400", b"404", b"405")
    assert not engine.requests


ABSENT = "203.0.113.77"  # TEST-NET-3 (RFC 5737): no host has it


def test_an_address_that_is_not_there_is_tried_again(monkeypatch):
    """VIPs and DHCP come late; exit status 4 would never be tried again."""
    monkeypatch.setattr(server, "ADDRESS_SECONDS", 0.0)
    with pytest.raises(BusyError, match="Cannot assign requested address") as busy:
        server._tcp_socket(ABSENT, 0, "gateway.host")
    assert busy.value.exit_code == 5 and "gateway.host: no interface" in busy.value.hint


def test_waiting_for_an_address_is_longer_than_the_limit_of_starts():
    text = (Path(__file__).parents[3] / "systemd/appliance-gateway@.service").read_text()
    unit = dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    each = server.ADDRESS_SECONDS + int(unit["RestartSec"])
    assert int(unit["StartLimitBurst"]) * each > int(unit["StartLimitIntervalSec"])
    assert int(unit["TimeoutStartSec"]) > 2 * server.ADDRESS_SECONDS  # the public and the admin listener


LATE = """
import subprocess, sys, threading
from appliance.gateway import server
from engine.log import setup_logging
setup_logging("info")
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)  # without any route every address may be bound
def come():
    subprocess.run(["ip", "addr", "add", "203.0.113.77/32", "dev", "lo"], check=True)
threading.Timer(0.3, come).start()
with server._tcp_socket("203.0.113.77", 8000, "gateway.host") as listener:
    print(listener.getsockname())
"""


@pytest.mark.netns
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a network namespace")
def test_an_address_that_comes_late_is_taken():
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", LATE], env=python_env(), capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "('203.0.113.77', 8000)\n", done.stderr
    assert done.stderr.count("address_missing") == 1
