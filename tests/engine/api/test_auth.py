"""Keys: who gets in where, default-deny on every route, reload, and binds that are refused."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import ssl
import threading
from pathlib import Path

import aiohttp
import pytest

from engine import __version__
from engine.api.app import build_app
from engine.api.auth import KeyStore, bearer, read_key_file
from engine.api.config import check_bind, is_loopback, tls_context
from engine.api.routes import ROUTES, Access
from engine.api.server import listening, run_server
from engine.errors import BusyError, ConfigError

from .conftest import FACTORIES, make_config
from .fakes import ByteTokenizer, FakeClient, Script


def line(key, label=""):
    return f"{hashlib.sha256(key.encode()).hexdigest()} {label}\n"


@pytest.fixture
def keys(tmp_path):
    user, admin = tmp_path / "keys", tmp_path / "admin"
    user.write_text("# team keys\n\n" + line("one", "alice") + line("two") + line("schlüssel", "umlaut"))
    admin.write_text(line("root", "ops"))
    return user, admin


def key(value):
    return {"Authorization": f"Bearer {value}"}


def open_path(route):
    return route.path.replace("{model:.+}", "tiny")


async def test_every_route_is_closed_without_a_key(make_endpoint, keys):
    endpoint = await make_endpoint(key_file=keys[0], admin_key_file=keys[1])
    paths = [(route.method, open_path(route), route.access) for route in ROUTES]
    paths += [("GET", "/nope", Access.KEY), ("POST", "/", Access.KEY), ("PUT", "/livez", Access.KEY)]
    for method, path, access in paths:
        for headers in ({}, key("wrong"), {"Authorization": "Basic b25lOg=="}, {"Authorization": "Bearer"}):
            async with endpoint.http.request(method, endpoint.url + path, json={}, headers=headers) as response:
                if access in (Access.OPEN, Access.PARTLY):
                    assert response.status == 200, path
                else:
                    assert response.status == (403 if access is Access.ADMIN and headers == key("wrong") else 401), path
                    error = (await response.json())["error"]
                    assert error["code"] in ("invalid_api_key", "admin_only")
    assert endpoint.client.submitted == []


async def test_each_key_opens_the_api_and_not_admin(make_endpoint, keys):
    endpoint = await make_endpoint(key_file=keys[0], admin_key_file=keys[1])
    for value in ("one", "two"):
        assert (await endpoint.post("/tokenize", {"prompt": "x"}, headers=key(value)))[0] == 200
        assert (await endpoint.get("/metrics_nope", headers=key(value)))[0] == 404
        assert (await endpoint.get("/admin/state", headers=key(value)))[0] == 403
    assert (await endpoint.get("/v1/models", headers={"Authorization": "bearer  one "}))[0] == 200
    assert (await endpoint.get("/v1/models", headers=key("root")))[0] == 200


async def test_health_says_less_without_a_key(make_endpoint, keys):
    endpoint = await make_endpoint(key_file=keys[0])
    _, answer = await endpoint.get("/health")
    assert answer == {"status": "ready", "reason": None}
    _, answer = await endpoint.get("/health", headers=key("one"))
    assert answer["kv"]["pages_total"] == 64
    assert answer["memory"]["api_resident_bytes"] > 1_000_000


async def test_admin_routes(make_endpoint, keys):
    endpoint = await make_endpoint(key_file=keys[0], admin_key_file=keys[1])
    admin = key("root")
    status, answer = await endpoint.get("/admin/state", headers=admin)
    assert (status, answer["status"]) == (200, "ready")
    status, answer = await endpoint.post("/admin/golden", {"args": {"prompt_ids": [1]}}, headers=admin)
    device = {"backend": "fake", "uuid": "GPU-fake", "name": "Fake 1"}
    head = {"op": "golden", "device": device, "engine_version": __version__}  # what a golden file is keyed by
    assert (status, answer) == (200, head | {"result": {"hash": "abc"}})
    assert (await endpoint.post("/admin/checksum", {}, headers=admin))[0] == 200
    for name in ("op", "self", "timeout_seconds", "a b"):
        args = {"prompt_ids": [1], name: 1}
        status, answer = await endpoint.post("/admin/golden", {"args": args}, headers=admin)
        assert status == 400 and answer["error"]["param"].startswith("args")
    assert endpoint.client.controls == [("golden", {"prompt_ids": [1]}), ("checksum", {})]
    assert (await endpoint.post("/admin/drain", {"reason": "maintenance"}, headers=admin))[0] == 200
    status, answer = await endpoint.post("/v1/completions", {"prompt": "x"}, headers=key("one"))
    assert (status, answer["error"]["code"], answer["error"]["message"]) == (503, "draining", "maintenance")
    status, answer = await endpoint.get("/admin/state", headers=admin)
    assert (status, answer["status"], answer["draining"]) == (200, "draining", "maintenance")
    assert (await endpoint.post("/admin/undrain", {}, headers=admin))[0] == 200
    assert (await endpoint.post("/v1/completions", {"prompt": "x"}, headers=key("one")))[0] == 200


CONTROLS = [("/admin/golden", {"args": {"prompt_ids": [1]}}), ("/admin/checksum", {})]


@pytest.mark.parametrize(("path", "body"), CONTROLS)
async def test_a_control_has_the_configured_time(make_endpoint, keys, path, body):
    endpoint = await make_endpoint(admin_key_file=keys[1], timeouts={"control": 0.05})
    assert (await endpoint.post(path, body, headers=key("root")))[0] == 200
    endpoint.client.script.control_delay = 5
    status, answer = await endpoint.post(path, body, headers=key("root"))
    assert (status, answer["error"]["code"]) == (504, "timeout")
    assert endpoint.client.control_timeouts == [0.05, 0.05]
    assert endpoint.client.cancelled_controls == 1


@pytest.mark.parametrize(("path", "body"), CONTROLS)
async def test_a_control_ends_with_the_client_that_asked(make_endpoint, keys, path, body):
    endpoint = await make_endpoint(Script(control_delay=10), admin_key_file=keys[1])
    task = asyncio.create_task(endpoint.post(path, body, headers=key("root")))
    while not endpoint.client.controls:
        await asyncio.sleep(0.005)
    task.cancel()
    for _ in range(400):
        if endpoint.client.cancelled_controls:
            break
        await asyncio.sleep(0.005)
    assert endpoint.client.cancelled_controls == 1
    assert (await endpoint.get("/livez"))[0] == 200


async def test_without_admin_keys_nobody_is_admin_over_tcp(endpoint):
    for method, path in (("GET", "/admin/state"), ("POST", "/admin/drain")):
        async with endpoint.http.request(method, endpoint.url + path, json={}) as response:
            assert response.status == 401
    assert (await endpoint.get("/readyz"))[0] == 200


async def test_the_unix_socket_is_trusted(tmp_path, keys):
    path = tmp_path / "api.sock"
    app = build_app(FakeClient(), ByteTokenizer(), make_config(key_file=keys[0]), **FACTORIES)
    async with listening(app, unix_path=path) as addresses:
        assert addresses == [str(path)]
        assert path.stat().st_mode & 0o777 == 0o660
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as http:
            async with http.get("http://x/admin/state") as response:
                assert response.status == 200
            async with http.post("http://x/v1/completions", json={"prompt": "x"}) as response:
                assert response.status == 200
            async with http.get("http://x/metrics") as response:
                assert response.status == 200
        with pytest.raises(BusyError, match="another process serves"):
            async with listening(build_app(FakeClient(), ByteTokenizer(), make_config(), **FACTORIES), unix_path=path):
                pass
        assert path.exists()
    assert not path.exists()
    path.write_text("precious")
    with pytest.raises(ConfigError, match="no socket"):
        async with listening(build_app(FakeClient(), ByteTokenizer(), make_config(), **FACTORIES), unix_path=path):
            pass
    assert path.read_text() == "precious"


async def test_a_socket_path_that_is_too_long_says_so(tmp_path):
    path = tmp_path / ("x" * 120)
    with pytest.raises(ConfigError) as caught:
        async with listening(build_app(FakeClient(), ByteTokenizer(), make_config(), **FACTORIES), unix_path=path):
            pass
    assert "107 bytes" in caught.value.hint and "None" not in caught.value.message


async def test_an_address_in_brackets_is_that_address():
    import socket

    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this host has no IPv6 loopback")
    app = build_app(FakeClient(), ByteTokenizer(), make_config(), **FACTORIES)
    async with listening(app, host="[::1]") as addresses:
        assert addresses[0][0] == "::1"


async def test_a_stale_socket_is_replaced(tmp_path):
    import socket

    path = tmp_path / "api.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    app = build_app(FakeClient(), ByteTokenizer(), make_config(), **FACTORIES)
    async with (
        listening(app, unix_path=path),
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as http,
        http.get("http://x/livez") as response,
    ):
        assert response.status == 200


async def test_metrics_beyond_loopback_are_for_the_admin_socket(make_endpoint, keys):
    endpoint = await make_endpoint(key_file=keys[0], admin_key_file=keys[1])
    endpoint.service.metrics_public = False  # as run_server sets it for a public host
    assert (await endpoint.get("/metrics", headers=key("one")))[0] == 403
    async with endpoint.http.get(endpoint.url + "/metrics", headers=key("root")) as response:
        assert response.status == 200


async def test_run_server_on_a_public_address_hides_metrics(keys):
    stop, where = asyncio.Event(), asyncio.get_running_loop().create_future()
    client = FakeClient()
    task = asyncio.create_task(
        run_server(client, ByteTokenizer(), make_config(key_file=keys[0]), host="0.0.0.0", port=0, stop=stop,
                   handle_signals=False, on_listening=where.set_result, **FACTORIES)
    )  # fmt: skip
    port = (await where)[0][1]
    url = f"http://127.0.0.1:{port}/metrics"
    async with aiohttp.ClientSession() as http, http.get(url, headers=key("one")) as response:
        assert response.status == 403
    stop.set()
    assert await task == 0


@pytest.fixture
def signals():
    """A server that handles them ignores them when it has ended, as its process ends then; ours does not."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


async def test_sighup_reloads_and_a_broken_file_changes_nothing(keys, signals):
    stop, where = asyncio.Event(), asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        run_server(FakeClient(), ByteTokenizer(), make_config(key_file=keys[0]), host="127.0.0.1", port=0, stop=stop,
                   on_listening=where.set_result, **FACTORIES)
    )  # fmt: skip
    url = f"http://127.0.0.1:{(await where)[0][1]}/v1/models"
    async with aiohttp.ClientSession() as http:

        async def status(value):
            async with http.get(url, headers=key(value)) as response:
                return response.status

        async def reload(text):
            keys[0].write_text(text)
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.1)

        assert (await status("one"), await status("new")) == (200, 401)
        await reload(line("new"))
        assert (await status("one"), await status("new")) == (401, 200)
        await reload("not a hash\n")
        assert (await status("one"), await status("new")) == (401, 200)
        await reload("")
        assert (await status("one"), await status("new")) == (401, 401)  # an empty file lets nobody in
    stop.set()
    assert await task == 0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("secret\n", 1),
        (line("a") + "x" * 64 + "\n", 2),
        ("a" * 63 + "\n", 1),
        ("# ok\n\nÿ\n", 3),
        (line("a")[:-2] + "x", 1),
    ],
)
def test_broken_key_files_name_the_line(tmp_path, text, number):
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f":{number}: not a SHA-256"):
        KeyStore(path)


def test_unreadable_key_files(tmp_path):
    path = tmp_path / "keys"
    for data in (b"\xff", b"#" * (1 << 20) + b"\n"):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match="key file"):
            KeyStore(path)
    with pytest.raises(ConfigError, match="cannot read"):
        KeyStore(tmp_path / "none")


@pytest.mark.parametrize("kind", ["fifo", "directory", "device"])
def test_a_key_file_is_a_regular_file(tmp_path, kind):
    path = tmp_path / "keys"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path = Path("/dev/zero")
    with pytest.raises(ConfigError, match="key file"):
        KeyStore(path)


def test_a_key_file_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "keys"
    path.write_bytes(b"\xef\xbb\xbf" + line("one", "alice").encode())
    assert KeyStore(path).match("one") == "alice"


async def test_a_reload_that_hangs_holds_up_nobody(keys, signals, monkeypatch):
    stop, where = asyncio.Event(), asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        run_server(FakeClient(), ByteTokenizer(), make_config(key_file=keys[0]), host="127.0.0.1", port=0, stop=stop,
                   on_listening=where.set_result, **FACTORIES)
    )  # fmt: skip
    url = f"http://127.0.0.1:{(await where)[0][1]}/livez"
    gate = threading.Event()
    monkeypatch.setattr(KeyStore, "reload", lambda self: gate.wait(20))
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.05)
        async with aiohttp.ClientSession() as http, asyncio.timeout(5), http.get(url) as response:
            assert response.status == 200
        stop.set()
        assert await asyncio.wait_for(task, 10) == 0
    finally:
        gate.set()


async def test_a_silent_tls_client_is_held_no_longer_than_a_silent_plain_one():
    cert, private = (Path(__file__).parent / "tls" / name for name in ("cert.pem", "key.pem"))
    config = make_config(tls_cert=cert, tls_key=private, timeouts={"header": 0.2})
    async with listening(build_app(FakeClient(), ByteTokenizer(), config, **FACTORIES), host="127.0.0.1") as addresses:
        reader, writer = await asyncio.open_connection("127.0.0.1", addresses[0][1])
        try:
            assert await asyncio.wait_for(reader.read(), 10) == b""
        finally:
            writer.close()


def test_labels(keys):
    store = KeyStore(keys[0])
    assert [store.match(value) for value in ("one", "two", "schlüssel", "three", "")] == [
        "alice", "key4", "umlaut", None, None,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("header", "token"),
    [
        (None, None),
        ("", None),
        ("Bearer", None),
        ("Bearer ", None),
        ("Bearer x", "x"),
        ("bEaReR x", "x"),
        ("Basic x", None),
    ],
)
def test_bearer(header, token):
    assert bearer(header) == token


@pytest.mark.parametrize(("host", "expected"), [
    ("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("[::1]", True), ("localhost", True), ("0.0.0.0", False),
    ("::", False), ("10.0.0.1", False), ("example.org", False), ("", False), ("localhost.evil.org", False),
])  # fmt: skip
def test_is_loopback(host, expected):
    assert is_loopback(host) is expected


def test_public_binds_need_keys_or_the_written_word(keys):
    with pytest.raises(ConfigError, match="without API keys"):
        check_bind(make_config(), "0.0.0.0")
    check_bind(make_config(), "127.0.0.1")
    check_bind(make_config(key_file=keys[0]), "0.0.0.0")
    check_bind(make_config(auth="none"), "0.0.0.0")
    with pytest.raises(ConfigError, match="key file"):
        check_bind(make_config(auth="keys"), "127.0.0.1")
    with pytest.raises(ConfigError, match="contradicts"):
        check_bind(make_config(auth="none", key_file=keys[0]), "127.0.0.1")
    with pytest.raises(ConfigError, match="tls_key"):
        check_bind(make_config(tls_cert=keys[0]), "127.0.0.1")


async def test_tls():
    """With a self-signed pair for localhost that serves this test only (valid until 2126)."""
    cert, private = (Path(__file__).parent / "tls" / name for name in ("cert.pem", "key.pem"))
    config = make_config(tls_cert=cert, tls_key=private)
    app = build_app(FakeClient(), ByteTokenizer(), config, **FACTORIES)
    async with listening(app, host="127.0.0.1") as addresses, aiohttp.ClientSession() as http:
        port = addresses[0][1]
        trust = ssl.create_default_context(cafile=str(cert))
        async with http.get(f"https://127.0.0.1:{port}/livez", ssl=trust, server_hostname="localhost") as response:
            assert response.status == 200
        body = {"prompt": "x", "max_tokens": 3, "stream": True}
        async with http.post(
            f"https://127.0.0.1:{port}/v1/completions", json=body, ssl=trust, server_hostname="localhost"
        ) as response:
            assert (await response.text()).endswith("data: [DONE]\n\n")
        with pytest.raises(aiohttp.ClientError):
            await http.get(f"http://127.0.0.1:{port}/livez")
    with pytest.raises(ConfigError, match="cannot load"):
        tls_context(make_config(tls_cert=private, tls_key=private))


async def test_keys_never_reach_the_log(make_endpoint, keys, caplog):
    caplog.set_level("DEBUG")
    endpoint = await make_endpoint(key_file=keys[0])
    await endpoint.post("/v1/completions", {"prompt": "topsecret", "user": "bob"}, headers=key("one"))
    await endpoint.post("/v1/completions", {"prompt": 5}, headers=key("wrongkey"))
    text = "\n".join(json.dumps({"m": r.getMessage()} | getattr(r, "fields", {}), default=str) for r in caplog.records)
    assert '"key": "alice"' in text
    for secret in ("topsecret", "wrongkey", '"one"', "bob"):
        assert secret not in text


def test_a_key_file_that_is_no_file_is_refused_at_once(tmp_path):
    """Reading a pipe waits for a writer, and a reload happens on the event loop."""
    pipe = tmp_path / "keys"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="regular file"):
        read_key_file(pipe)
    with pytest.raises(ConfigError, match=r"regular file|directory"):
        read_key_file(tmp_path)


def test_a_byte_order_mark_is_no_key(tmp_path):
    path = tmp_path / "keys"
    path.write_bytes(b"\xef\xbb\xbf" + b"ab" * 32 + b" me\n")
    assert [label for _, label in read_key_file(path)] == ["me"]
