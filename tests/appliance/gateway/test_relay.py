"""What a client gets through the gateway is what the engine sent."""

from __future__ import annotations

import asyncio
import json

import pytest

from .world import DONE, STREAM_HEAD, Received, answer, chunk, counting, event


async def test_an_answer_comes_through_with_its_status_headers_and_bytes(host, front):
    body = json.dumps({"text": "Grüße", "n": 1.50}, indent=3).encode()

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(200, body, "X-Appliance-Seed: 5\r\nX-Anything: a\r\nConnection: keep-alive\r\n"))

    engine = await host.engine(script=script)
    gateway = await front()
    async with gateway.http.post(gateway.url + "/v1/completions", data=b'{"prompt": "x"}') as response:
        assert response.status == 200
        assert await response.read() == body
        assert response.headers["X-Appliance-Seed"] == "5"
        assert response.headers["X-Anything"] == "a"
        assert response.headers["Content-Type"] == "application/json"
    request = engine.requests[0]
    assert (request.method, request.target, request.body) == ("POST", "/v1/completions", b'{"prompt": "x"}')
    assert request.get("X-Appliance-Relay") == "1"


@pytest.mark.parametrize("status", [400, 401, 404, 409, 413, 415, 504])
async def test_an_engines_refusal_is_passed_on_and_not_retried(host, front, status):
    body = json.dumps({"error": {"message": "no", "type": "x", "param": None, "code": "c"}}).encode()

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(status, body, "X-Appliance-Error: c final\r\n"))

    engines = [await host.engine(gpu, script=script) for gpu in range(2)]
    gateway = await front()
    async with gateway.http.post(gateway.url + "/v1/completions", data=b"{}") as response:
        assert (response.status, await response.read()) == (status, body)
    assert sum(len(engine.requests) for engine in engines) == 1


async def test_a_stream_is_the_engines_bytes_however_they_were_cut(host, front):
    whole = b"".join(event(0, n) for n in range(1, 40)) + b": ping\n\n" + DONE

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        size = int(json.loads(request.body)["size"])
        framed = b"".join(chunk(whole[at : at + size]) for at in range(0, len(whole), size)) + b"0\r\n\r\n"
        writer.write(STREAM_HEAD)
        for at in range(0, len(framed), 7 * size):
            writer.write(framed[at : at + 7 * size])
            await writer.drain()
            await asyncio.sleep(0)

    await host.engine(script=script)
    gateway = await front()
    for size in (1, 2, 3, 17, 64, 500, 10_000):
        assert await gateway.stream({"size": size}) == whole


async def test_only_complete_events_are_sent(host, front):
    """Half an event stays here until its other half has come."""
    half = asyncio.Event()

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(event(0, 1) + event(0, 2)[:20]))
        await half.wait()
        writer.write(chunk(event(0, 2)[20:] + DONE) + b"0\r\n\r\n")

    await host.engine(script=script)
    gateway = await front()
    async with gateway.http.post(gateway.url + "/v1/completions", data=b"{}") as response:
        assert await response.content.readany() == event(0, 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(response.content.readany(), 0.1)
        half.set()
        assert await response.read() == event(0, 2) + DONE


async def test_an_http_1_0_client_gets_its_stream_without_chunks(host, front):
    await host.engine(script=counting(5))
    gateway = await front()
    raw = await gateway.raw(b"POST /v1/completions HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}")
    head, _, body = raw.partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert body == b"".join(event(0, n) for n in range(1, 6)) + DONE


async def test_connections_to_an_engine_are_used_again(host, front):
    engine = await host.engine()
    gateway = await front()
    before = engine.connections
    for _ in range(20):
        assert (await gateway.post())[0] == 200
    assert engine.connections <= before + 1


async def test_least_in_flight_gets_the_next_request(host, front):
    gates = [asyncio.Event() for _ in range(3)]

    def waiting(gate: asyncio.Event):
        async def script(request: Received, writer: asyncio.StreamWriter) -> None:
            await gate.wait()
            writer.write(answer())

        return script

    engines = [await host.engine(gpu, script=waiting(gates[gpu])) for gpu in range(3)]
    gateway = await front()
    tasks = [asyncio.create_task(gateway.post()) for _ in range(6)]
    await gateway.until(lambda: sum(len(engine.requests) for engine in engines) == 6)
    assert [len(engine.requests) for engine in engines] == [2, 2, 2]
    gates[1].set()
    await gateway.until(lambda: sum(task.done() for task in tasks) == 2)
    tasks += [asyncio.create_task(gateway.post()) for _ in range(2)]
    await gateway.until(lambda: len(engines[1].requests) == 4)
    for gate in gates:
        gate.set()
    assert {status for status, _ in await asyncio.gather(*tasks)} == {200}


async def test_ties_are_spread(host, front):
    engines = [await host.engine(gpu) for gpu in range(2)]
    gateway = await front()
    for _ in range(60):
        await gateway.post()
    # One after the other, so both always have 0 in flight. P(one of two gets < 10 of 60) < 1e-7.
    assert min(len(engine.requests) for engine in engines) >= 10


async def test_a_gpu_on_probation_gets_its_share(host, front):
    """A quarter of the share: a quarter of the requests in flight under load, and one of five when nothing is."""
    gate = asyncio.Event()

    async def wait(request: Received, writer: asyncio.StreamWriter) -> None:
        await gate.wait()
        writer.write(answer())

    engines = [await host.engine(gpu, script=wait) for gpu in range(2)]
    host.share(1, 0.25)
    gateway = await front()
    tasks = [asyncio.create_task(gateway.post()) for _ in range(20)]
    await gateway.until(lambda: sum(len(engine.requests) for engine in engines) == 20)
    assert [len(engine.requests) for engine in engines] == [16, 4]
    assert await gateway.metric("appliance_gpu_share", gpu="1") == 0.25
    gate.set()
    await asyncio.gather(*tasks)
    for engine in engines:
        engine.requests.clear()
    for _ in range(100):
        await gateway.post()
    # Binomial(100, 0.2): P(outside 6..40) < 1e-4 (scipy.stats.binom)
    assert 6 <= len(engines[1].requests) <= 40


async def test_a_gpu_with_no_share_serves_only_when_it_is_alone(host, front):
    engines = [await host.engine(gpu) for gpu in range(2)]
    host.share(1, 0.0)
    gateway = await front()
    for _ in range(20):
        await gateway.post()
    assert len(engines[1].requests) == 0
    host.hold(0, operator={"level": "drain", "reason": "fan", "since": 1.0})
    await gateway.until(lambda: len(gateway.worker.gateway.engines.admitted) == 1)
    assert (await gateway.post())[0] == 200
    assert len(engines[1].requests) == 1


async def test_a_model_name_with_slashes_and_dots_stays_one_path_segment(host, front):
    engine = await host.engine()
    gateway = await front()
    await gateway.get("/v1/models/org/model-1.0")
    assert engine.requests[-1].target == "/v1/models/org%2Fmodel-1.0"


async def test_large_answers_come_through_whole(host, front):
    """Above the size that is kept for a retry, and without a length."""
    body = bytes(range(256)) * (40 << 10)

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        if request.body == b"chunks":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n")
            for at in range(0, len(body), 1 << 20):
                writer.write(chunk(body[at : at + (1 << 20)]))
            writer.write(b"0\r\n\r\n")
        elif request.body == b"close":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n" + body)
            await writer.drain()
            writer.close()
        else:
            writer.write(answer(200, body, kind="application/octet-stream"))
        await writer.drain()

    await host.engine(script=script)
    gateway = await front()
    for kind in (b"length", b"chunks", b"close"):
        async with gateway.http.post(gateway.url + "/generate", data=kind) as response:
            assert await response.read() == body, kind
    assert gateway.worker.gateway.buffered_bytes == 0
