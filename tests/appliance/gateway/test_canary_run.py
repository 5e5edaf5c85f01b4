"""What changes for clients while a canary run is on, and what is counted for its judge."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import signal

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.gateway import canary_run
from appliance.gateway.canary_run import Clients, Leave
from canary.marker import clear_marker, write_marker

from .test_lifecycle import admin, started
from .world import DONE, STREAM_HEAD, Received, answer, chunk, counting, event

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"


class Kept:
    """One keep-alive connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, gateway, address: str = "127.0.0.1") -> Kept:
        return cls(*await asyncio.open_connection("127.0.0.1", gateway.port, local_addr=(address, 0)))

    async def ask(self, data: bytes = POST) -> tuple[int, bool]:
        """(status, whether the answer says that the connection ends)"""
        self.writer.write(data)
        return await self.answer()

    async def answer(self) -> tuple[int, bool]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        lines = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
        if "content-length" in lines:
            await self.reader.readexactly(int(lines["content-length"]))
        else:
            while (size := int(await self.reader.readline(), 16)) or await self.reader.readline() != b"\r\n":
                await self.reader.readexactly(size + 2)
        return int(head.split()[1]), lines.get("connection") == "close"

    async def ended(self) -> bool:
        """By a FIN: a reset would raise."""
        return await self.reader.read(1) == b""


async def in_run(gateway, run: str = "1", draining=None) -> None:
    write_marker(gateway.host.paths, run, draining=draining)
    watch = gateway.worker.gateway.canary
    await gateway.until(lambda: watch.run == run and watch.draining == (draining == gateway.worker.settings.slot))


async def test_a_connection_ends_after_100_answers_in_a_run_and_says_so_before(host, front):
    await host.engine()
    gateway = await front()
    before = await Kept.to(gateway)
    for _ in range(120):
        assert await before.ask() == (200, False)  # no run: as many as it likes
    await in_run(gateway)
    counted = []
    for connection in (before, *[await Kept.to(gateway) for _ in range(9)]):
        number, last = 0, False
        while not last and number < 101:
            status, last = await connection.ask()
            assert status == 200
            number += 1
        assert last and await connection.ended()
        counted.append(number)
    assert all(50 <= number <= 100 for number in counted)  # also of the one that had answered 120 before
    assert len(set(counted)) > 1  # a pool does not end all at once
    clear_marker(host.paths)
    await gateway.until(lambda: gateway.worker.gateway.canary.run is None)
    after = await Kept.to(gateway)
    for _ in range(120):
        assert await after.ask() == (200, False)
    assert await gateway.metric("appliance_gateway_closed_keepalives_total", slot="stable", reason="run") == 10


@given(
    since=st.floats(0, 1e6), began=st.floats(0, 1e6), answers=st.integers(0, 10**6), more=st.integers(0, 200),
    seconds=st.floats(0, 100),
)  # fmt: skip
def test_the_draw_is_between_half_of_the_limit_and_all_of_it(since, began, answers, more, seconds):
    """60 s or 100 requests, whichever is first, counted from the later of the run's and the connection's beginning."""
    leave = Leave("1", began, since, answers)
    start = max(since, began)
    due = leave.due(answers + more, start + seconds)
    if more >= 100 or seconds >= 60.001:
        assert due
    if more < 50 and seconds < 29.999:
        assert not due


async def test_a_connection_that_is_old_enough_ends_with_its_next_answer(host, front, monkeypatch):
    monkeypatch.setattr(canary_run, "MAX_SECONDS", 0.3)
    await host.engine()
    gateway = await front()
    await in_run(gateway)
    connection = await Kept.to(gateway)
    await asyncio.sleep(0.35)
    with pytest.raises(TimeoutError):  # an idle one is left alone: its next request may be on its way
        async with asyncio.timeout(0.2):
            await connection.reader.read(1)
    assert await connection.ask() == (200, True)
    assert await connection.ended()


async def test_every_answer_of_a_draining_slot_ends_its_connection(host, front):
    large = b"x" * (9 << 20)  # passed on in pieces

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        body = json.loads(request.body)
        if body.get("stream"):
            await counting(3)(request, writer)
        else:
            writer.write(answer(body.get("status", 200), large if body.get("large") else b"{}"))

    await host.engine(script=script)
    gateway = await front()
    await in_run(gateway, draining="stable")
    for path, body in (
        ("/v1/completions", {}), ("/v1/completions", {"stream": True}), ("/infer", {"large": True}),
        ("/infer", {"status": 400}), ("/infer", {"status": 500}), ("/nothing", {}), ("/livez", {}),
    ):  # fmt: skip
        data = json.dumps(body).encode()
        method = "GET" if path == "/livez" else "POST"
        connection = await Kept.to(gateway)
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        _, last = await connection.ask(head + data)
        assert last, path
        assert await connection.ended(), path


async def test_the_other_slot_drains_without_us(host, front):
    await host.engine()
    gateway = await front()
    await in_run(gateway, draining="canary")
    connection = await Kept.to(gateway)
    for _ in range(3):
        assert await connection.ask() == (200, False)


async def test_requests_that_were_sent_ahead_are_answered_before_a_connection_ends(host, front):
    engine = await host.engine()
    gateway = await front()
    await in_run(gateway, draining="stable")
    connection = await Kept.to(gateway)
    connection.writer.write(POST * 5)
    answers = [await connection.answer() for _ in range(5)]
    assert [status for status, _ in answers] == [200] * 5
    assert answers[-1] == (200, True) and await connection.ended()
    assert len(engine.requests) == 5


async def test_a_stream_is_not_cut_when_its_slot_drains(host, front):
    gate = asyncio.Event()

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(event(0, 1)))
        await gate.wait()
        writer.write(chunk(event(0, 2)) + chunk(DONE) + b"0\r\n\r\n")

    engine = await host.engine(script=script)
    gateway = await front()
    connection = await Kept.to(gateway)
    connection.writer.write(POST)
    await gateway.until(lambda: engine.requests and gateway.worker.gateway.streams)
    await asyncio.sleep(0.1)
    await in_run(gateway, draining="stable")
    gate.set()
    # Its head was sent before, so this client may use its connection once more. That answer is the last one.
    assert await connection.answer() == (200, False)
    assert (await connection.ask(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")) == (200, True)
    assert await connection.ended()


@pytest.mark.parametrize(
    "bad", [b"", b"{", b"[]", b'{"schema":2,"run":"2"}', b'{"schema":1}', b'{"schema":1,"run":""}',
            b'{"schema":1,"run":"2","draining_slot":"else"}', b"\xff", b'{"schema":1,"run":NaN}', None],
)  # fmt: skip
async def test_a_marker_that_cannot_be_read_changes_nothing(host, front, bad):
    await host.engine()
    gateway = await front()
    await in_run(gateway, draining="stable")
    path = host.paths.canary_marker
    if bad is None:
        path.rename(path.with_name("away"))
        path.mkdir()
    else:
        path.with_name("new").write_bytes(bad)
        path.with_name("new").rename(path)
    await asyncio.sleep(0.25)
    watch = gateway.worker.gateway.canary
    if bad is not None:
        assert (watch.run, watch.draining) == ("1", True)
    assert (await gateway.post())[0] == 200
    if bad is None:
        path.rmdir()
    await in_run(gateway, "3")


# ---- who came --------------------------------------------------------------------------------------------------------


async def test_addresses_are_counted_once_in_each_run(host, front):
    await host.engine()
    gateway = await front()

    async def visits(*addresses: str) -> float:
        for address in addresses:
            connection = await Kept.to(gateway, address)
            assert (await connection.ask())[0] == 200
            connection.writer.close()
        return await total()

    async def total() -> float:
        return json.loads((await admin(gateway, "/counts"))[1])["clients"]

    assert await visits("127.0.0.2", "127.0.0.3") == 0  # no run
    await in_run(gateway, "a")
    assert await visits("127.0.0.2", "127.0.0.3", "127.0.0.2", "127.0.0.4") == 3
    await in_run(gateway, "b")
    assert await total() == 0
    assert await visits("127.0.0.2", "127.0.0.9") == 2
    assert await gateway.metric("appliance_gateway_run_clients", slot="stable") == 2
    clear_marker(host.paths)
    await gateway.until(lambda: gateway.worker.gateway.canary.run is None)
    assert await visits("127.0.0.7") == 0


def test_no_number_of_clients_fills_our_memory():
    clients = Clients()
    clients.begin("1")
    for number in range(5000):
        clients.add(str(ipaddress.IPv4Address(number)))
    assert clients.number == len(clients.keys) == canary_run.MAX_CLIENTS
    clients.merge("1", [str(number) for number in range(5000)])
    assert clients.number == canary_run.MAX_CLIENTS


@given(st.lists(st.ip_addresses(), max_size=60))
def test_a_client_is_an_ipv4_address_or_an_ipv6_network(addresses):
    """The oracle is the ipaddress module's own idea of a /64 and of a mapped address."""
    clients = Clients()
    clients.begin("1")
    for address in addresses:
        clients.add(str(address))
    wanted = set()
    for address in addresses:
        if address.version == 6 and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        wanted.add(str(address) if address.version == 4 else ipaddress.ip_network((address, 64), strict=False))
    assert clients.number == len(wanted)


def test_two_addresses_of_one_ipv6_host_are_one_client():
    clients = Clients()
    clients.begin("1")
    for address in ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", "2001:db8:1:3::1", "::ffff:192.0.2.1", "192.0.2.1"):
        clients.add(address)
    clients.add("fe80::1%eth0")
    assert clients.number == 4


def test_another_runs_addresses_are_not_merged():
    clients = Clients()
    clients.merge("1", ["a"])
    clients.begin("1")
    clients.merge("2", ["a"])
    clients.merge(None, ["a"])
    assert clients.number == 0
    clients.merge("1", ["a", "b"])
    clients.merge("1", ["b", "c"])
    assert clients.number == 3


# ---- what is counted -------------------------------------------------------------------------------------------------


async def test_connections_are_counted_when_they_are_accepted(host, front):
    await host.engine()
    gateway = await front()
    before = await gateway.metric("appliance_gateway_accepted_connections_total")
    connections = [await Kept.to(gateway) for _ in range(7)]
    for connection in connections:
        await connection.ask()
    opened = await gateway.metric("appliance_gateway_opened_connections_total", slot="stable", release="r1")
    assert await gateway.metric("appliance_gateway_accepted_connections_total") == before + 7 == opened
    await connections[0].ask()
    assert await gateway.metric("appliance_gateway_accepted_connections_total") == before + 7


async def test_a_connection_over_the_cap_is_an_error_that_its_client_sees(host, front):
    import dataclasses

    await host.engine()
    gateway = await front()
    settings = gateway.worker.settings
    few = dataclasses.replace(settings.api, limits=dataclasses.replace(settings.api.limits, max_connections=3))
    gateway.worker.gateway.settings = dataclasses.replace(settings, api=few)
    kept = [await Kept.to(gateway) for _ in range(3)]
    for connection in kept:
        await connection.ask()
    refused = await Kept.to(gateway)
    assert await refused.answer() == (503, True)
    kept.pop().writer.close()
    await gateway.until(lambda: gateway.worker.gateway.connections < 3)
    errors = {"slot": "stable", "release": "r1", "class": "connections"}
    assert await gateway.metric("appliance_gateway_errors_total", **errors) == 1
    assert await gateway.metric("appliance_gateway_requests_total", route="refused", code="503") == 1


async def test_the_first_token_is_not_the_first_byte(host, front):
    """A comment that keeps the connection alive is no token."""

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(b": ping\n\n"))
        await asyncio.sleep(0.3)
        for number in (1, 2, 3):
            writer.write(chunk(event(0, number)))
        writer.write(chunk(DONE) + b"0\r\n\r\n")

    await host.engine(script=script)
    gateway = await front()
    await gateway.stream()
    await gateway.stream(path="/infer")
    name = "appliance_gateway_time_to_first_token_seconds"
    assert await gateway.metric(f"{name}_count", slot="stable", release="r1") == 2
    assert await gateway.metric(f"{name}_bucket", le="0.25") == 0


async def test_what_is_no_stream_has_no_first_token(host, front):
    await host.engine()
    gateway = await front()
    await gateway.post()
    assert await gateway.metric("appliance_gateway_time_to_first_token_seconds_count") == 0
    assert await gateway.metric("appliance_gateway_first_byte_seconds_count", route="/v1/completions") == 1


async def test_a_resumed_stream_has_one_first_token(host, front):
    for gpu in range(2):
        await host.engine(gpu, script=counting(20, cut_after=15))
    gateway = await front()
    await gateway.stream()
    assert await gateway.metric("appliance_gateway_replays_total", outcome="done") == 1
    assert await gateway.metric("appliance_gateway_time_to_first_token_seconds_count") == 1


async def never(request: Received, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(30)


@pytest.mark.parametrize("asked", [b'{"stream": true}', b'{"a":1,"stream" :\n true}'])
async def test_who_leaves_before_the_first_token_has_waited_for_it(host, front, asked):
    engine = await host.engine(script=never)
    gateway = await front()
    with pytest.raises(TimeoutError):
        await gateway.post(body=asked, timeout=aiohttp.ClientTimeout(total=0.4))
    await gateway.until(lambda: engine.requests[0].gone.is_set())
    name = "appliance_gateway_left_waiting_seconds"
    assert await gateway.metric(f"{name}_count", slot="stable", release="r1", metric="ttft") == 1
    assert await gateway.metric(f"{name}_bucket", metric="ttft", le="0.25") == 0
    assert await gateway.metric(f"{name}_count", metric="itl") == 0


async def test_who_leaves_a_stream_has_waited_for_its_next_token(host, front):
    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(event(0, 1)))
        await asyncio.sleep(30)

    engine = await host.engine(script=script)
    gateway = await front()
    response = await gateway.http.post(gateway.url + "/v1/completions", data=b'{"stream": true}')
    await response.content.readany()
    await asyncio.sleep(0.4)
    response.close()
    await gateway.until(lambda: engine.requests[0].gone.is_set())
    name = "appliance_gateway_left_waiting_seconds"
    assert await gateway.metric(f"{name}_count", slot="stable", release="r1", metric="itl") == 1
    assert await gateway.metric(f"{name}_bucket", metric="itl", le="0.25") == 0
    assert await gateway.metric(f"{name}_count", metric="ttft") == 0


@pytest.mark.parametrize("asked", [b"{}", b'{"stream": false}', b'{"prompt": "a \\"stream\\": true b"}'])
async def test_who_wanted_no_stream_has_waited_for_no_token(host, front, asked):
    engine = await host.engine(script=never)
    gateway = await front()
    with pytest.raises(TimeoutError):
        await gateway.post(body=asked, timeout=aiohttp.ClientTimeout(total=0.2))
    await gateway.until(lambda: engine.requests[0].gone.is_set())
    assert await gateway.metric("appliance_gateway_left_waiting_seconds_count") == 0


async def test_livez_says_which_slot_it_is(host, front):
    gateway = await front(slot="canary", canary_port=0)
    await gateway.get("/livez")
    assert gateway.headers["X-Appliance-Slot"] == "canary"


# ---- several workers -------------------------------------------------------------------------------------------------


async def counts(host, slot: str = "stable") -> dict:
    connector = aiohttp.UnixConnector(str(host.paths.gateway_socket(slot)))
    async with aiohttp.ClientSession(connector=connector) as http, http.get("http://gateway/counts") as response:
        assert response.status == 200
        return await response.json()


def value(found: dict, name: str, **labels: str) -> float:
    table = found["metrics"][f"appliance_gateway_{name}"]
    return sum(
        number
        for values, number in table["samples"]
        if labels.items() <= dict(zip(table["labels"], values, strict=True)).items()
    )


async def test_workers_count_together_and_what_one_takes_along_is_an_error(host):
    await host.engine(script=counting(10**6, delay=0.02))
    write_marker(host.paths, "7")
    async with started(host, "workers = 2", "drain_timeout = 0.2") as gateway, contextlib.AsyncExitStack() as stack:
        first = await counts(host)
        assert (first["run"], first["clients"], first["silent_workers"]) == ("7", 0, [])
        accepted = value(first, "accepted_connections_total")
        for number in range(12):
            connector = aiohttp.TCPConnector(local_addr=(f"127.0.0.{2 + number % 3}", 0))
            http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            response = await http.post(gateway.url + "/v1/completions", json={"stream": True})
            await response.content.readany()
        found = await counts(host)
        assert found["clients"] == 3  # both workers have seen each of them
        assert value(found, "accepted_connections_total") == accepted + 12
        assert (found["in_flight"], found["epoch"]) == (12, first["epoch"])
        victim = (await gateway.state())["workers"][0]
        os.kill(victim["pid"], signal.SIGKILL)
        async with asyncio.timeout(10):
            while not (cut := value(found := await counts(host), "errors_total", **{"class": "cut"})):
                await asyncio.sleep(0.05)
        assert cut == victim["in_flight"] > 0
        assert value(found, "errors_total", release="r1") == cut
        assert value(found, "accepted_connections_total") >= accepted + 12  # nothing that was counted is lost
        assert (found["clients"], found["epoch"]) == (3, first["epoch"])


async def test_a_worker_that_does_not_answer_is_named(host):
    await host.engine()
    async with started(host, "workers = 2") as gateway:
        victim = (await gateway.state())["workers"][0]["pid"]
        os.kill(victim, signal.SIGSTOP)
        try:
            assert (await counts(host))["silent_workers"] == [victim]
        finally:
            os.kill(victim, signal.SIGCONT)
        async with asyncio.timeout(5):
            while (await counts(host))["silent_workers"]:
                await asyncio.sleep(0.05)


async def test_another_process_has_another_epoch(host):
    epochs = []
    for _ in range(2):
        async with started(host):
            epochs.append((await counts(host))["epoch"])
    assert epochs[0] != epochs[1]


# ---- a pool ----------------------------------------------------------------------------------------------------------


async def test_pooled_clients_lose_nothing_through_a_run_and_a_drain(host, front):
    """Eight clients that each keep one connection, with answers and streams: every request is answered, none is sent
    twice, and the connections are new ones in the end."""
    rounds = 400 if os.environ.get("APPLIANCE_FULL") else 60

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        if b"stream" in request.body:
            await counting(3)(request, writer)
        else:
            writer.write(answer())

    engine = await host.engine(script=script)
    gateway = await front()
    accepted = await gateway.metric("appliance_gateway_accepted_connections_total")

    async def client(number: int) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as http:
            for turn in range(2 * rounds):
                body = {"stream": True} if turn % 3 == 0 else {"turn": turn}
                async with http.post(gateway.url + "/v1/completions", json=body) as response:
                    assert response.status == 200
                    whole = await response.read()
                assert whole.endswith(DONE) or whole == b'{"ok":true}'
                if number == 0 and turn == rounds // 2:
                    write_marker(host.paths, "1")
                if number == 0 and turn == rounds:
                    write_marker(host.paths, "1", draining="stable")
                    await asyncio.sleep(0.15)  # it is seen by then

    async with asyncio.timeout(120):
        await asyncio.gather(*(client(number) for number in range(8)))
    assert len(engine.requests) == 8 * 2 * rounds
    used = await gateway.metric("appliance_gateway_accepted_connections_total") - accepted
    assert used >= 8 + rounds - 1  # at least the first client's second half
    assert gateway.worker.gateway.metrics.errors.values == {}
    clear_marker(host.paths)


async def test_a_failed_stream_does_not_take_its_connection_along(host, front):
    """Its head said that the connection goes on; a client that uses it again would find it closed."""

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD.replace(b"X-Appliance-Seed: 7\r\n", b"") + chunk(event(0, 1)))
        await writer.drain()
        await asyncio.sleep(0.02)
        writer.transport.abort()

    await host.engine(script=script)
    gateway = await front()
    connection = await Kept.to(gateway)
    for _ in range(3):
        assert await connection.ask() == (200, False)
        assert (await connection.ask(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")) == (200, False)
        await gateway.until(lambda: gateway.worker.gateway.engines.pick() is not None)
