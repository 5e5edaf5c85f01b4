"""Readiness, drains, pointers, metrics, and the process as systemd sees it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import socket
import ssl

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.spawn import python_env, python_module
from tests.certificates import make_certificate

from .world import DONE, Received, answer, counting, event, fronted, metric_value


async def test_readyz_needs_an_admitted_engine_that_answers(host, front):
    gateway = await front()
    status, body = await gateway.get("/readyz")
    assert (status, body["error"]["code"]) == (503, "no_engine")
    assert gateway.headers["Retry-After"]
    host.report(0, state="loading", admitted=False, progress=0.37)
    await asyncio.sleep(0.25)
    status, body = await gateway.get("/readyz")
    assert status == 503
    assert "GPU 0 loading (37 %)" in body["error"]["message"]
    engine = await host.engine(state="ready", admitted=True)
    await asyncio.sleep(0.25)
    assert (await gateway.get("/readyz")) == (200, {"status": "ready"})
    await engine.die()  # its launcher has not said so yet
    await gateway.until(lambda: gateway.worker.gateway.not_ready() is not None, 1)
    assert (await gateway.get("/readyz"))[0] == 503
    assert (await gateway.get("/livez"))[0] == 200


async def test_a_held_gpu_is_named_with_its_owner(host, front):
    await host.engine()
    gateway = await front()
    host.hold(0, watchdog={"level": "drain", "reason": "xid 79", "since": 1.0})
    await asyncio.sleep(0.25)
    status, body = await gateway.get("/readyz")
    assert status == 503
    assert "GPU 0 held by watchdog" in body["error"]["message"]
    assert await gateway.metric("appliance_gpu_hold", gpu="0", owner="watchdog") == 1
    assert await gateway.metric("appliance_gpu_admitted", gpu="0", uuid="CPU-0") == 0
    host.hold(0)
    await asyncio.sleep(0.25)
    assert (await gateway.get("/readyz"))[0] == 200


async def test_a_host_drain_turns_readyz_and_serves_on(host, front):
    await host.engine()
    gateway = await front()
    host.drain("kernel update")
    await asyncio.sleep(0.25)
    status, body = await gateway.get("/readyz")
    assert (status, body["error"]["code"]) == (503, "draining")
    assert "kernel update" in body["error"]["message"]
    assert (await gateway.post())[0] == 200
    assert await gateway.metric("appliance_host_drained") == 1
    host.drain(None)
    await asyncio.sleep(0.25)
    assert (await gateway.get("/readyz"))[0] == 200


async def test_draining_one_gpu_loses_nothing(host, front):
    """Requests go to the other one at once; what runs on it ends there."""
    first = await host.engine(0, script=counting(40, delay=0.01))
    gateway = await front()
    task = asyncio.create_task(gateway.stream())
    await gateway.until(lambda: first.requests)
    second = await host.engine(1)
    host.hold(0, operator={"level": "drain", "reason": "fan", "since": 1.0})
    await asyncio.sleep(0.25)
    for _ in range(5):
        assert (await gateway.post())[0] == 200
    assert len(second.requests) == 5
    assert await task == b"".join(event(0, n) for n in range(1, 41)) + DONE
    assert len(first.requests) == 1


async def test_the_pointer_moves_requests_only_when_the_new_release_is_there(host, front):
    old = await host.engine(0, "r1", script=counting(30, delay=0.01))
    gateway = await front()
    running = asyncio.create_task(gateway.stream())
    await gateway.until(lambda: old.requests)
    host.report(0, "r2", state="loading", admitted=False)
    host.point("stable", "r2")
    await asyncio.sleep(0.25)
    old.script = counting(2)
    assert (await gateway.stream()).endswith(DONE)  # the new one is not ready anywhere: the one before serves on
    assert len(old.requests) == 2
    new = await host.engine(0, "r2", script=counting(1), state="ready", admitted=True)
    await asyncio.sleep(0.25)
    await gateway.stream()
    assert len(new.requests) == 1
    assert (await running).endswith(DONE)
    assert await gateway.metric("appliance_slot_release", slot="stable", release="r2") == 1
    assert await gateway.metric("appliance_gateway_requests_total", release="r2", code="200") == 1
    assert await gateway.metric("appliance_gateway_requests_total", release="r1", code="200") == 2


async def test_a_slot_never_serves_the_other_slots_release(host, front):
    await host.engine(0, "r2")
    host.point("canary", "r2")
    gateway = await front(wait_timeout=0.3)
    assert (await gateway.post())[0] == 503
    canary = await front(slot="canary", canary_port=0)
    assert (await canary.post())[0] == 200


async def test_a_state_file_that_cannot_be_read_changes_nothing(host, front):
    await host.engine()
    gateway = await front()
    path = host.paths.launcher_state(0)
    for text in ("{", "[]", '{"schema": 99}', '{"schema": 1, "gpu": 5}', '{"schema": 1, "gpu": 0, "engines": [1]}'):
        path.write_text(text)
        await asyncio.sleep(0.25)
        assert (await gateway.post())[0] == 200, text
    host.report(0, "r9", state="failed", admitted=False, socket=None, pid=None, model=None, engine_version=None)
    await asyncio.sleep(0.25)
    assert (await gateway.post())[0] == 200
    assert await gateway.metric("appliance_engine_state", gpu="0", release="r9", state="failed") == 1
    path.unlink()  # the launcher ended in order
    await asyncio.sleep(0.25)
    assert (await gateway.get("/readyz"))[0] == 503


@pytest.mark.parametrize("bad", ["../releases/../../etc", "/etc/passwd", "../releases/UPPER", ".", "a" * 200])
async def test_a_pointer_that_leads_elsewhere_is_no_release(host, front, bad):
    await host.engine()
    pointer = host.paths.slot_pointer("stable")
    pointer.unlink()
    pointer.symlink_to(bad)
    gateway = await front()
    status, body = await gateway.post()
    assert (status, body["error"]["code"]) in ((503, "no_release"), (503, "no_engine"))


async def test_a_pointer_that_breaks_stops_nobody(host, front):
    """As in the launchers, which keep the engine."""
    await host.engine()
    gateway = await front()
    pointer = host.paths.slot_pointer("stable")
    pointer.unlink()
    pointer.write_text("a file")
    await asyncio.sleep(0.25)
    assert (await gateway.post())[0] == 200
    assert (await gateway.get("/readyz"))[0] == 200


# ---- metrics -------------------------------------------------------------------------------------------------------


async def test_metrics_are_legal_unique_and_count_what_happened(host, front):
    await host.engine(script=counting(10, delay=0.001), restarts=2)
    gateway = await front(metrics_buckets_seconds=[0.123])
    await gateway.stream()
    await gateway.post("/nothing")
    await gateway.raw(b"not http\r\n\r\n", seconds=1)
    text = (await gateway.get("/metrics"))[1]
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    assert all(name.startswith("appliance_") for name in names)
    from engine.api.metrics import Metrics
    from tests.engine.api.fakes import FakeClient

    of_the_engine = {family.name for family in text_string_to_metric_families(Metrics(FakeClient()).render().decode())}
    assert not of_the_engine & set(names)
    for family in families:
        if family.type == "histogram" and family.samples:
            edges = [float(s.labels["le"]) for s in family.samples if s.name.endswith("_bucket")]
            assert 0.123 in edges, family.name
            assert edges[-1] == float("inf")
    assert 0.08 in [
        float(s.labels["le"]) for f in families if "gap" in f.name for s in f.samples if s.name.endswith("_bucket")
    ]  # the limit that a canary is judged by
    ok = {"slot": "stable", "release": "r1", "route": "/v1/completions"}
    assert metric_value(text, "appliance_gateway_requests_total", code="200", **ok) == 1
    assert metric_value(text, "appliance_gateway_request_seconds_count", **ok) == 1
    assert metric_value(text, "appliance_gateway_first_byte_seconds_count", **ok) == 1
    assert 5 <= metric_value(text, "appliance_gateway_event_gap_seconds_count", release="r1") <= 10
    assert metric_value(text, "appliance_gateway_requests_total", code="404", route="unknown") == 1
    assert metric_value(text, "appliance_gateway_requests_total", code="400", route="malformed") == 1
    assert metric_value(text, "appliance_engine_restarts_total", gpu="0", release="r1") == 2
    assert metric_value(text, "appliance_engine_state", gpu="0", release="r1", state="ready") == 1
    assert metric_value(text, "appliance_gateway_ready", slot="stable") == 1
    assert metric_value(text, "appliance_gateway_errors_total") == 0


async def test_labels_are_bounded_whatever_a_client_asks_for(host, front):
    await host.engine()
    gateway = await front()
    for number in range(30):
        await gateway.get(f"/nothing/{number}")
        await gateway.get(f"/v1/models/m{number}")
    text = (await gateway.get("/metrics"))[1]
    families = {family.name: family for family in text_string_to_metric_families(text)}
    routes = {sample.labels["route"] for sample in families["appliance_gateway_requests"].samples}
    assert routes <= {"unknown", "/v1/models/{model}", "/metrics"}


async def admin(gateway, path: str) -> tuple[int, bytes]:
    socket_path = str(gateway.host.paths.gateway_socket(gateway.worker.settings.slot))
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(socket_path)) as session:
        async with session.get("http://gateway" + path) as response:
            return response.status, await response.read()


async def test_the_admin_socket_tells_everything(host, front):
    gate = asyncio.Event()

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        await gate.wait()
        writer.write(answer())

    engine = await host.engine(script=script)
    gateway = await front()
    task = asyncio.create_task(gateway.post())
    await gateway.until(lambda: engine.requests)
    status, raw = await admin(gateway, "/state")
    state = json.loads(raw)
    assert (status, state["in_flight"], state["release"], state["serving"]) == (200, 1, "r1", "r1")
    assert state["gpus"][0]["engines"][0]["in_flight"] == 1
    assert metric_value((await admin(gateway, "/metrics"))[1].decode(), "appliance_gateway_engine_in_flight") == 1
    assert (await admin(gateway, "/v1/models"))[0] == 404
    assert oct(host.paths.gateway_socket("stable").stat().st_mode & 0o777) == "0o660"
    gate.set()
    await task


async def test_beyond_loopback_metrics_are_on_the_admin_listener_only(host, front):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        admin_port = sock.getsockname()[1]
    await host.engine()
    gateway = await front(host="0.0.0.0", auth="none", admin_port=admin_port)
    status, body = await gateway.get("/metrics")
    assert (status, body["error"]["code"]) == (403, "admin_only")
    for path, wanted in (("/metrics", 200), ("/livez", 200), ("/readyz", 200), ("/state", 404), ("/health", 404)):
        async with gateway.http.get(f"http://127.0.0.1:{admin_port}{path}") as response:
            assert response.status == wanted, path


async def test_an_admin_listener_beyond_loopback_asks_for_a_key_and_has_tls(host, front, tmp_path, monkeypatch):
    certificate, key = make_certificate(tmp_path)
    certificate.rename(tmp_path / "tls-cert")
    key.rename(tmp_path / "tls-key")
    (tmp_path / "keys").write_text(hashlib.sha256(b"secret").hexdigest() + " prometheus\n")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    trust = ssl.create_default_context(cafile=tmp_path / "tls-cert")
    await host.engine()
    port = free_port()
    options = {"host": "0.0.0.0", "admin_host": "0.0.0.0", "admin_port": port, "tls": True, "client_ssl": trust}
    gateway = await front(keys=tmp_path / "keys", **options)
    url = f"https://127.0.0.1:{port}"
    for path, token, wanted in (
        ("/metrics", None, 401), ("/metrics", "wrong", 401), ("/metrics", "secret", 200),
        ("/livez", None, 200), ("/readyz", None, 200), ("/state", "secret", 404),
    ):  # fmt: skip
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with gateway.http.get(url + path, headers=headers) as response:
            assert response.status == wanted, path
    assert (await admin(gateway, "/metrics"))[0] == 200  # the Unix socket has its file mode


async def test_an_expired_certificate_is_served_and_said(host, front, tmp_path, monkeypatch, caplog):
    """A restart must not take the endpoint away from clients that can still be told not to look."""
    certificate, key = make_certificate(tmp_path, days=(-30, -2))
    certificate.rename(tmp_path / "tls-cert")
    key.rename(tmp_path / "tls-key")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    await host.engine()
    careless = ssl.create_default_context()
    careless.check_hostname, careless.verify_mode = False, ssl.CERT_NONE
    with caplog.at_level("ERROR"):
        gateway = await front(tls=True, client_ssl=careless)
    assert (await gateway.get("/livez"))[0] == 200
    assert "'box' expired on 20" in caplog.text
    careful = ssl.create_default_context(cafile=tmp_path / "tls-cert")
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):  # what the check is about
        await asyncio.open_connection("127.0.0.1", gateway.port, ssl=careful)


# ---- the process ---------------------------------------------------------------------------------------------------


class Process:
    """`python -m appliance.gateway`, as systemd starts it: with a notification socket and credentials."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, notes: socket.socket, host) -> None:
        self.process, self.port, self.host, self._notes = process, port, host, notes
        self.url = f"http://127.0.0.1:{port}"
        self.said: list[str] = []

    def notes(self) -> str:
        with contextlib.suppress(BlockingIOError):
            while True:
                self.said.append(self._notes.recv(4096).decode())
        return "\n".join(self.said)

    async def wait_note(self, text: str, seconds: float = 15.0) -> None:
        async with asyncio.timeout(seconds):
            while text not in self.notes():
                assert self.process.returncode is None, f"it ended with {self.process.returncode}"
                await asyncio.sleep(0.02)

    async def state(self) -> dict:
        connector = aiohttp.UnixConnector(str(self.host.paths.gateway_socket("stable")))
        async with aiohttp.ClientSession(connector=connector) as session:
            async with session.get("http://gateway/state") as response:
                return await response.json()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextlib.asynccontextmanager
async def started(host, *lines: str, port: int | None = None, wait: bool = True, **environment: str):
    port = port or free_port()
    host.paths.config.parent.mkdir(parents=True, exist_ok=True)
    host.paths.config.write_text("\n".join(["[gateway]", f"port = {port}", *lines]))
    notes = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    address = host.paths.etc.parent / "notify"
    address.unlink(missing_ok=True)
    notes.bind(str(address))
    own = {"APPLIANCE_ROOT": str(host.paths.etc.parent.parent), "NOTIFY_SOCKET": str(address), **environment}
    process = await asyncio.create_subprocess_exec(
        *python_module("appliance.gateway"),
        "--slot",
        "stable",
        env=python_env() | own,
        stderr=asyncio.subprocess.DEVNULL,
    )
    gateway = Process(process, port, notes, host)
    try:
        if wait:
            await gateway.wait_note("READY=1")
        yield gateway
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        notes.close()


async def test_sigterm_drains_and_exits_0(host):
    engine = await host.engine(script=counting(60, delay=0.01))
    async with started(host, "drain_timeout = 10") as gateway, aiohttp.ClientSession() as http:
        kept = await http.get(gateway.url + "/livez")
        async with http.post(gateway.url + "/v1/completions", json={}) as response:
            await response.content.readany()
            gateway.process.send_signal(signal.SIGTERM)
            await gateway.wait_note("STOPPING=1")
            async with http.get(gateway.url + "/readyz") as ready:
                assert (ready.status, (await ready.json())["error"]["code"]) == (503, "shutting_down")
            async with http.post(gateway.url + "/v1/completions", json={}) as refused:
                assert refused.status == 503
                assert refused.headers["Retry-After"] and refused.headers["Connection"] == "close"
            rest = await response.read()
        assert rest.endswith(event(0, 60) + DONE)
        assert await asyncio.wait_for(gateway.process.wait(), 10) == 0
        kept.close()
    assert len(engine.requests) == 1
    assert not host.paths.gateway_socket("stable").exists()


async def test_what_the_drain_does_not_end_gets_an_error_event(host):
    await host.engine(script=counting(1_000_000, delay=0.01))
    async with started(host, "drain_timeout = 0.3") as gateway, aiohttp.ClientSession() as http:
        async with http.post(gateway.url + "/v1/completions", json={}) as response:
            await response.content.readany()
            gateway.process.send_signal(signal.SIGTERM)
            body = await response.read()
        last = body.split(b"\n\n")[-2]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "shutting_down"
        assert await asyncio.wait_for(gateway.process.wait(), 10) == 0


async def test_sighup_takes_over_new_keys(host):
    await host.engine()
    credentials = host.paths.etc / "credentials"
    credentials.mkdir(parents=True)
    keys = credentials / "api-keys"

    def line(key: str) -> str:
        return f"{hashlib.sha256(key.encode()).hexdigest()} someone\n"

    keys.write_text(line("old"))
    async with started(host, CREDENTIALS_DIRECTORY=str(credentials)) as gateway, aiohttp.ClientSession() as http:

        async def status(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            async with http.post(gateway.url + "/infer", data=b"{}", headers=headers) as response:
                return response.status

        assert (await status("old"), await status("new")) == (200, 401)
        keys.write_text(line("new"))
        gateway.process.send_signal(signal.SIGHUP)
        async with asyncio.timeout(5):
            while await status("new") != 200:
                await asyncio.sleep(0.05)
        assert await status("old") == 401


async def run_to_end(host, slot: str = "stable") -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *python_module("appliance.gateway"), "--slot", slot, stderr=asyncio.subprocess.PIPE,
        env=python_env() | {"APPLIANCE_ROOT": str(host.paths.etc.parent.parent)},
    )  # fmt: skip
    _, log = await asyncio.wait_for(process.communicate(), 15)
    return process.returncode, log.decode()


async def test_a_taken_port_is_5_and_the_first_gateways_socket_stays_its_own(host):
    async with started(host) as gateway:
        status, log = await run_to_end(host)
        assert status == 5 and "has this port" in log
        host.paths.config.write_text(f"[gateway]\nport = {free_port()}\n")
        status, log = await run_to_end(host)
        assert status == 5 and "another gateway serves" in log
        assert (await gateway.state())["slot"] == "stable"


@pytest.mark.parametrize("bad", ['host = "0.0.0.0"', "workers = 0", "nonsense = 1", "tls = true", "port = 8001"])
def test_what_a_restart_does_not_mend_is_4(tmp_path, bad, monkeypatch):
    from appliance.gateway import __main__ as module

    monkeypatch.setenv("APPLIANCE_ROOT", str(tmp_path))
    monkeypatch.setattr(module, "setup_logging", lambda *args, **kwargs: None)
    config = tmp_path / "appliance.toml"
    config.write_text(f"[gateway]\n{bad}\n")
    assert module.main(["--slot", "stable", "--config", str(config)]) == 4
    config.unlink()
    assert module.main(["--slot", "stable", "--config", str(config)]) == 4


async def test_the_watchdog_is_fed_while_the_loop_turns(host):
    async with started(host, WATCHDOG_USEC="300000") as gateway:
        await asyncio.sleep(1.0)
        assert gateway.notes().count("WATCHDOG=1") >= 3
        gateway.process.send_signal(signal.SIGSTOP)
        gateway.notes()
        count = len(gateway.said)
        await asyncio.sleep(0.6)
        assert len(gateway.notes().splitlines()) <= count + 1
        gateway.process.send_signal(signal.SIGCONT)


# ---- several workers -----------------------------------------------------------------------------------------------


async def test_two_workers_share_the_port_and_their_metrics_add_up(host):
    await host.engine(script=counting(3))
    async with started(host, "workers = 2", "drain_timeout = 5") as gateway:
        workers = [worker["pid"] for worker in (await gateway.state())["workers"]]
        assert len(set(workers)) == 2

        async def one() -> None:
            async with aiohttp.ClientSession() as http:  # a connection of its own
                async with http.post(gateway.url + "/v1/completions", json={}) as response:
                    assert (await response.read()).endswith(DONE)

        for _ in range(6):
            await asyncio.gather(*(one() for _ in range(10)))
        async with aiohttp.ClientSession() as http:
            texts = []
            for _ in range(2):
                async with http.get(gateway.url + "/metrics") as response:
                    texts.append(await response.text())
        for text in texts:
            assert metric_value(text, "appliance_gateway_requests_total", code="200", route="/v1/completions") == 60
            assert metric_value(text, "appliance_gateway_ready") == 1
        os.kill(workers[0], signal.SIGKILL)
        async with asyncio.timeout(15):
            while len({w["pid"] for w in (await gateway.state())["workers"]} - {workers[0]}) < 2:
                await asyncio.sleep(0.1)
        await gateway.wait_note("READY=1")
        connector = aiohttp.UnixConnector(str(host.paths.gateway_socket("stable")))
        async with aiohttp.ClientSession(connector=connector) as http:
            async with http.get("http://gateway/metrics") as response:
                text = await response.text()
        # What the killed one had counted up to the last time it was asked stays: a counter never goes back.
        assert metric_value(text, "appliance_gateway_requests_total", code="200", route="/v1/completions") == 60
        await asyncio.gather(*(one() for _ in range(10)))
        gateway.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(gateway.process.wait(), 15) == 0
        for pid in workers:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


async def test_workers_share_the_connections_and_see_each_others_load(host):
    """Connections are spread evenly, and the least loaded engine is the one with the fewest requests of all workers."""
    engines = [await host.engine(gpu, script=counting(10_000, delay=0.05)) for gpu in range(2)]
    async with started(host, "workers = 2", "drain_timeout = 0.1") as gateway:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            responses = [await http.post(gateway.url + "/infer", json={}) for _ in range(20)]
            assert [len(engine.requests) for engine in engines] == [10, 10]
            responses += await asyncio.gather(*(http.post(gateway.url + "/infer", json={}) for _ in range(40)))
            state = await gateway.state()
            assert state["in_flight"] == 60
            assert sum(engine["in_flight"] for gpu in state["gpus"] for engine in gpu["engines"]) == 60
            assert min(worker["in_flight"] for worker in state["workers"]) >= 20
            for response in responses:
                response.close()
            async with asyncio.timeout(5):
                while (await gateway.state())["in_flight"]:
                    await asyncio.sleep(0.05)


async def test_workers_end_with_their_supervisor(host):
    await host.engine()
    async with started(host, "workers = 2", "drain_timeout = 1") as gateway:
        workers = [worker["pid"] for worker in (await gateway.state())["workers"]]
        gateway.process.kill()
        await gateway.process.wait()
        async with asyncio.timeout(10):
            for pid in workers:
                while True:
                    try:
                        os.kill(pid, 0)
                    except ProcessLookupError:
                        break
                    await asyncio.sleep(0.05)


async def test_in_process_gateways_leave_nothing_running(host):
    await host.engine()
    before = len(asyncio.all_tasks())
    async with fronted(host) as gateway:
        await gateway.post()
    assert len(asyncio.all_tasks()) == before + len(
        [task for task in asyncio.all_tasks() if "FakeEngine" in repr(task.get_coro())]
    )
