"""Engines that behave badly: what is retried, what goes on elsewhere, and what a client sees when nothing helps."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time

import aiohttp
import pytest

from .world import DONE, STREAM_HEAD, Received, answer, chunk, counting, event, fronted, ok, resumed

FULL = bool(os.environ.get("APPLIANCE_FULL"))
ERROR_RETRY = b': error shutting_down retry\ndata: {"error":{"message":"bye","type":"service_unavailable"}}\n\n'
ERROR_FINAL = b': error deadline_exceeded final\ndata: {"error":{"message":"late","code":"deadline_exceeded"}}\n\n'


def whole(total: int, choices: int = 1) -> bytes:
    return b"".join(event(i, n) for n in range(1, total + 1) for i in range(choices)) + DONE


async def refuse(request: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(answer(503, b'{"error":{"code":"draining"}}', "X-Appliance-Error: draining retry\r\n"))


async def close_at_once(request: Received, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def close_in_head(request: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-")
    await writer.drain()
    writer.transport.abort()


async def close_after_head(request: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n")
    await writer.drain()
    writer.transport.abort()


async def close_in_body(request: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"text": "hal')
    await writer.drain()
    writer.transport.abort()


async def close_before_event(request: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD + chunk(event(0, 1)[:15]))
    await writer.drain()
    writer.transport.abort()


async def engine_error(request: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(answer(500, b'{"error":{"code":"engine_error"}}', "X-Appliance-Error: engine_error retry\r\n"))


async def full(request: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(answer(429, b'{"error":{"code":"queue_full"}}', "Retry-After: 3\r\n"))


def raw(data: bytes):
    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        await asyncio.sleep(5)

    return script


GARBAGE = {
    "no HTTP": b"SSH-2.0-OpenSSH_9.2\r\n\r\n\r\n",
    "giant head": b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000,
    "many headers": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000,
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok",
    "length and chunks": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\nok",
    "folded header": b"HTTP/1.1 200 OK\r\nX-A: b\r\n c\r\nContent-Length: 2\r\n\r\nok",
    "negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\nok",
    "signed chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n+2\r\nok\r\n0\r\n\r\n",
    "long chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nokay\r\n0\r\n\r\n",
    "chunk without a size": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"z" * 50,
    "interim": b"HTTP/1.1 103 Early Hints\r\n\r\n",
    "HTTP/1.0": b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
    "line feeds only": b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok" + b" " * 40_000,
}
BROKEN = {
    "503": refuse,
    "closed": close_at_once,
    "closed in the head": close_in_head,
    "closed after the head": close_after_head,
    "closed in the body": close_in_body,
    "half an event": close_before_event,
    "500 retry": engine_error,
    "429": full,
} | {name: raw(data) for name, data in GARBAGE.items()}


@pytest.mark.parametrize("name", BROKEN)
async def test_before_the_first_byte_another_engine_answers(host, front, name):
    bad = await host.engine(0, script=BROKEN[name])
    good = await host.engine(1)
    gateway = await front(head_timeout=0.5)
    asked = 0
    while not bad.requests and asked < 60:  # ties are broken at random
        assert await gateway.post() == (200, {"ok": True})
        asked += 1
    assert bad.requests, "the bad engine was never tried: the test shows nothing"
    assert len(good.requests) == asked
    assert await gateway.metric("appliance_gateway_retries_total") == len(bad.requests)


@pytest.mark.parametrize("gone", ["socket", "listener"])
async def test_an_engine_that_cannot_be_reached_costs_nothing(host, front, gone):
    bad, good = await host.engine(0), await host.engine(1)
    gateway = await front(retries=0)
    await bad.die()
    if gone == "socket":
        bad.path.unlink()
    for _ in range(10):
        assert (await gateway.post())[0] == 200
    assert len(good.requests) == 10


async def test_a_kept_connection_that_was_closed_is_no_failure(host, front):
    """The engine closes idle connections when it likes; a request that meets such a one goes through with retries=0."""
    engine = await host.engine()
    gateway = await front(retries=0)
    for _ in range(5):
        await gateway.post()
        for writer in list(engine._writers):
            writer.close()
    assert len(engine.requests) == 5


async def test_a_request_that_kills_engines_gets_an_answer_after_a_few(host, front):
    engines = [await host.engine(gpu, script=close_at_once) for gpu in range(8)]
    gateway = await front(retries=2)
    status, body = await gateway.post()
    assert (status, body["error"]["code"]) == (502, "engine_failed")
    assert sum(len(engine.requests) for engine in engines) == 3
    assert await gateway.metric("appliance_gateway_errors_total", **{"class": "engine_failed"}) == 1


async def test_an_error_that_every_engine_gives_is_passed_on(host, front):
    engines = [await host.engine(gpu, script=engine_error) for gpu in range(2)]
    gateway = await front()
    began = time.monotonic()
    assert await gateway.post() == (500, {"error": {"code": "engine_error"}})
    assert [len(engine.requests) for engine in engines] == [1, 1]
    assert time.monotonic() - began < 1.0  # nothing was waited for


async def test_full_everywhere_is_429_with_the_engines_retry_after(host, front):
    engines = [await host.engine(gpu, script=full) for gpu in range(3)]
    gateway = await front()
    assert await gateway.post() == (429, {"error": {"code": "queue_full"}})
    assert gateway.headers["Retry-After"] == "3"
    assert [len(engine.requests) for engine in engines] == [1, 1, 1]


# ---- waiting -------------------------------------------------------------------------------------------------------


async def test_no_engine_waits_and_then_says_503(host, front):
    gateway = await front(wait_timeout=0.3)
    began = time.monotonic()
    status, body = await gateway.post()
    assert 0.3 <= time.monotonic() - began < 2
    assert (status, body["error"]["code"], body["error"]["type"]) == (503, "no_engine", "service_unavailable")
    assert int(gateway.headers["Retry-After"]) > 0
    assert (await gateway.metric("appliance_gateway_errors_total", **{"class": "no_engine"})) == 1


async def test_a_request_waits_for_an_engine_that_comes(host, front):
    host.report(0, state="loading", admitted=False, progress=0.4)
    gateway = await front(wait_timeout=20)
    task = asyncio.create_task(gateway.post())
    await asyncio.sleep(0.3)
    assert gateway.worker.gateway.waiting == 1
    await host.engine(state="ready", admitted=True)
    assert await task == (200, {"ok": True})
    assert gateway.worker.gateway.waiting == 0


async def test_a_request_survives_the_restart_of_the_only_engine(host, front):
    """Closed with the request in work; the launcher then reports a new process, which answers."""
    engine = await host.engine(script=close_at_once)
    gateway = await front()
    task = asyncio.create_task(gateway.post())
    await gateway.until(lambda: engine.requests)
    await engine.die()
    host.report(state="backoff", admitted=False)
    await asyncio.sleep(0.3)
    assert not task.done()
    await host.engine(script=ok, pid=2000, restarts=1, state="ready", admitted=True)
    assert await task == (200, {"ok": True})
    assert await gateway.metric("appliance_engine_restarts_total", gpu="0", release="r1") == 1


async def test_an_engine_that_refuses_for_long_is_503_in_the_end(host, front):
    engine = await host.engine(script=refuse)
    gateway = await front(wait_timeout=0.8)
    status, body = await gateway.post()
    assert (status, body["error"]["code"]) == (503, "no_engine")
    assert 1 <= len(engine.requests) <= 4  # it was asked again, and not in a tight loop


async def test_the_queue_of_waiting_requests_is_bounded(host, front):
    gateway = await front(wait_timeout=1.0, max_waiting=3)
    results = await asyncio.gather(*(gateway.post() for _ in range(8)))
    codes = sorted(body["error"]["code"] for _, body in results)
    assert codes == ["no_engine"] * 3 + ["queue_full"] * 5


async def test_a_slot_without_a_release_says_so_at_once(host, front):
    host.point("stable", None)
    gateway = await front(wait_timeout=30)
    status, body = await asyncio.wait_for(gateway.post(), 2)
    assert (status, body["error"]["code"]) == (503, "no_release")


# ---- replay --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("cut", [1, 2, 7, 19])
async def test_a_stream_goes_on_elsewhere_without_a_byte_lost_or_doubled(host, front, cut, choices):
    first = await host.engine(0, script=counting(20, choices=choices, cut_after=cut))
    gateway = await front()
    task = asyncio.create_task(gateway.stream({"stream": True, "n": choices}))
    await gateway.until(lambda: first.requests)
    second = await host.engine(1, script=counting(20, choices=choices))
    body = await task
    assert sorted(body.split(b"\n\n")) == sorted(whole(20, choices).split(b"\n\n"))
    for index in range(choices):
        mine = [part for part in body.split(b"\n\n") if part.startswith(b"id: %d:" % index)]
        assert mine == [event(index, n)[:-2] for n in range(1, 21)]
    assert body.endswith(DONE)
    a, b = first.requests[-1], second.requests[-1]
    assert a.body == b.body
    assert a.get("X-Request-Id") == b.get("X-Request-Id")
    assert (b.get("X-Appliance-Seed"), b.get("X-Appliance-Created")) == ("7", "1700000000")
    assert a.get("X-Appliance-Resume") is None
    assert sum(resumed(b).values()) == cut
    assert await gateway.metric("appliance_gateway_replays_total", outcome="done") == 1


async def test_what_was_held_back_is_not_counted_as_sent(host, front):
    """Half an event was received and never passed on: the replay must not skip it."""

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(event(0, 1)) + chunk(event(0, 2)[:25]))
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()

    first = await host.engine(0, script=script)
    gateway = await front()
    task = asyncio.create_task(gateway.stream())
    await gateway.until(lambda: first.requests)
    second = await host.engine(1, script=counting(4))
    assert await task == whole(4)
    assert resumed(second.requests[0]) == {0: 1}


async def test_a_stream_goes_on_in_the_same_engine_after_its_restart(host, front):
    engine = await host.engine(script=counting(10, cut_after=4))
    gateway = await front()
    task = asyncio.create_task(gateway.stream())
    await gateway.until(lambda: engine.requests)
    await engine.die()
    host.report(state="backoff", admitted=False)
    await asyncio.sleep(0.2)
    await host.engine(script=counting(10), pid=2000, state="ready", admitted=True)
    assert await task == whole(10)


async def test_cuts_follow_one_another(host, front):
    """Every attempt gets three events further; the progress of all attempts counts."""

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        await counting(9, cut_after=3)(request, writer)

    for gpu in range(3):
        await host.engine(gpu, script=script)
    gateway = await front()
    assert await gateway.stream() == whole(9)
    assert await gateway.metric("appliance_gateway_replays_total", outcome="done") == 1


async def test_an_engine_that_shuts_down_says_retry_and_the_client_sees_nothing_of_it(host, front):
    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(event(0, 1) + event(0, 2) + ERROR_RETRY) + b"0\r\n\r\n")

    first = await host.engine(0, script=script)
    gateway = await front()
    task = asyncio.create_task(gateway.stream())
    await gateway.until(lambda: first.requests)
    await host.engine(1, script=counting(5))
    assert await task == whole(5)


async def test_a_final_error_is_passed_on(host, front):
    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(event(0, 1)) + chunk(ERROR_FINAL) + b"0\r\n\r\n")

    engines = [await host.engine(gpu, script=script) for gpu in range(2)]
    gateway = await front()
    assert await gateway.stream() == event(0, 1) + ERROR_FINAL
    assert sum(len(engine.requests) for engine in engines) == 1
    assert await gateway.metric("appliance_gateway_errors_total", **{"class": "deadline"}) == 1


async def test_a_clean_end_without_done_is_a_cut(host, front):
    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(event(0, 1)) + b"0\r\n\r\n")

    first = await host.engine(0, script=script)
    gateway = await front()
    task = asyncio.create_task(gateway.stream())
    await gateway.until(lambda: first.requests)
    await host.engine(1, script=counting(3))
    assert await task == whole(3)


async def test_after_done_nothing_is_missing(host, front):
    """The end of the chunks is lost, the stream is not."""

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(event(0, 1) + DONE))
        await writer.drain()
        writer.transport.abort()

    engine = await host.engine(script=script)
    gateway = await front()
    assert await gateway.stream() == event(0, 1) + DONE
    assert len(engine.requests) == 1


async def test_when_nobody_can_go_on_the_stream_ends_with_an_error_event(host, front):
    engine = await host.engine(script=counting(10, cut_after=4))
    gateway = await front(replay_timeout=0.4)
    task = asyncio.create_task(gateway.stream())
    await gateway.until(lambda: engine.requests)
    host.report(state="failed", admitted=False)
    body = await task
    assert body.startswith(b"".join(event(0, n) for n in range(1, 5)))
    last = body.split(b"\n\n")[-2]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "stream_failed"
    assert DONE not in body
    assert await gateway.metric("appliance_gateway_replays_total", outcome="timeout") == 1


async def test_a_stream_of_a_release_that_was_withdrawn_ends_at_once(host, front):
    """Its engine was killed, and no slot names the release any more: nobody can come back, so nobody is waited for."""
    engine = await host.engine(script=counting(10, cut_after=4))
    await host.engine(1, "r2")
    gateway = await front(replay_timeout=300)
    task = asyncio.create_task(gateway.stream())
    await gateway.until(lambda: engine.requests)
    host.point("stable", "r2")
    host.remove(0, "r1")
    body = await asyncio.wait_for(task, 10)
    last = body.split(b"\n\n")[-2]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "stream_failed"
    assert b"taken out of service" in last
    assert await gateway.metric("appliance_gateway_replays_total", outcome="withdrawn") == 1


@pytest.mark.parametrize("wanted", ["slot", "launcher"])
async def test_an_engine_that_comes_back_is_waited_for(host, front, wanted):
    """Between two processes no engine of the release is there; it is the slot, or the launcher, that still wants it."""
    engine = await host.engine(script=counting(10, cut_after=4))
    await host.engine(1, "r2")
    gateway = await front(replay_timeout=300)
    task = asyncio.create_task(gateway.stream())
    await gateway.until(lambda: engine.requests)
    if wanted == "launcher":
        host.point("stable", "r2")
        host.report(0, state="backoff", admitted=False, pid=None)
    else:
        host.remove(0, "r1")
    await asyncio.sleep(1.2)
    assert not task.done()
    await host.engine(0, "r1", script=counting(10), state="ready", admitted=True, pid=4711)
    assert await asyncio.wait_for(task, 10) == whole(10)


async def test_a_stream_never_goes_on_with_another_release(host, front):
    engine = await host.engine(0, script=counting(10, cut_after=4))
    gateway = await front(replay_timeout=0.5)
    task = asyncio.create_task(gateway.stream())
    await gateway.until(lambda: engine.requests)
    other = await host.engine(1, "r2", script=counting(10))
    host.point("stable", "r2")
    host.report(0, state="failed", admitted=False)
    assert DONE not in await task
    assert not other.requests


async def test_a_diverging_replay_is_an_error_and_not_tried_further(host, front):
    """One of two devices computes wrongly. Which one cannot be told, so the client must not get a mixture."""
    body = b'{"error":{"code":"resume_diverged"}}'

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(409, body, "X-Appliance-Error: resume_diverged final\r\n"))

    first = await host.engine(0, script=counting(10, cut_after=4))
    gateway = await front()
    task = asyncio.create_task(gateway.stream())
    await gateway.until(lambda: first.requests)
    host.report(0, state="failed", admitted=False)
    second = await host.engine(1, script=script)
    assert DONE not in await task
    assert len(second.requests) == 1
    assert await gateway.metric("appliance_gateway_replays_total", outcome="diverged") == 1


async def test_a_stream_that_kills_engines_ends(host, front):
    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        if not resumed(request):
            await counting(10, cut_after=1)(request, writer)
        writer.transport.abort()

    engines = [await host.engine(gpu, script=script) for gpu in range(8)]
    gateway = await front(retries=3)
    assert DONE not in await gateway.stream()
    assert sum(len(engine.requests) for engine in engines) == 4


async def test_cut_at_any_byte_again_and_again_the_stream_is_whole(host, front):
    """Two engines that break off at random places of what they send, frames and half events included."""
    rng = random.Random(11)

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        at = resumed(request)
        events = [event(i, n) for n in range(1, 7) for i in range(2) if n > at.get(i, 0)]
        framed = STREAM_HEAD + b"".join(map(chunk, [*events, DONE])) + b"0\r\n\r\n"
        if rng.random() < 0.6:
            end = rng.randrange(len(framed))
            for piece in (framed[: end // 2], framed[end // 2 : end]):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            writer.transport.abort()
            return
        writer.write(framed)
        await writer.drain()

    for gpu in range(2):
        await host.engine(gpu, script=script)
    gateway = await front(retries=10, replay_timeout=30)
    for _ in range(60 if FULL else 12):
        body = await gateway.stream({"n": 2})
        for index in range(2):
            mine = [part for part in body.split(b"\n\n") if part.startswith(b"id: %d:" % index)]
            assert mine == [event(index, n)[:-2] for n in range(1, 7)], body
        assert body.endswith(DONE) and body.count(DONE) == 1
    assert await gateway.metric("appliance_gateway_replays_total", outcome="done") > 0


async def test_a_silent_stream_is_cut_and_goes_on(host, front):
    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(event(0, 1)))
        await asyncio.sleep(30)

    stuck = await host.engine(0, script=script)
    gateway = await front(silence_timeout=0.4)
    task = asyncio.create_task(gateway.stream())
    await gateway.until(lambda: stuck.requests)
    await host.engine(1, script=counting(3))
    assert await task == whole(3)
    await asyncio.wait_for(stuck.requests[0].gone.wait(), 2)


async def test_a_waiting_client_hears_a_comment(host, front):
    engine = await host.engine(script=counting(4, cut_after=2))
    gateway = await front(waiting_comment=0.1, replay_timeout=10)
    task = asyncio.create_task(gateway.stream())
    await gateway.until(lambda: engine.requests)
    host.report(state="backoff", admitted=False)
    await asyncio.sleep(0.6)
    await host.engine(script=counting(4), pid=2000, state="ready", admitted=True)
    body = await task
    assert 2 <= body.count(b": waiting\n\n") <= 12
    assert body.replace(b": waiting\n\n", b"") == whole(4)


async def test_a_client_that_leaves_while_waiting_for_a_replay_leaves_nothing(host, front):
    engine = await host.engine(script=counting(4, cut_after=2))
    async with fronted(host, replay_timeout=30) as gateway:
        async with gateway.http.post(gateway.url + "/v1/completions", json={}) as response:
            await response.content.readany()
            await gateway.until(lambda: engine.requests)
            host.report(state="backoff", admitted=False)
            await asyncio.sleep(0.2)
            assert gateway.worker.gateway.active == 1
            response.close()
        await gateway.until(lambda: gateway.worker.gateway.active == 0)


async def test_requests_that_wait_when_the_gateway_has_to_go_are_told(host, front):
    engine = await host.engine(script=counting(4, cut_after=2))
    async with fronted(host, replay_timeout=30, wait_timeout=30, drain_timeout=0.3) as gateway:
        stream = asyncio.create_task(gateway.stream())
        await gateway.until(lambda: engine.requests)
        host.report(state="backoff", admitted=False)
        await asyncio.sleep(0.25)
        plain = asyncio.create_task(gateway.post())
        await gateway.until(lambda: gateway.worker.gateway.waiting)
        gateway.worker.leave()
        body = await stream
        assert json.loads(body.split(b"\n\n")[-2].removeprefix(b"data: "))["error"]["code"] == "shutting_down"
        status, answer_body = await plain
        assert (status, answer_body["error"]["code"]) == (503, "shutting_down")


async def test_a_large_answer_that_breaks_off_is_a_broken_body_and_not_a_short_one(host, front):
    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 20000000\r\n\r\n" + b"x" * 15_000_000
        )
        await writer.drain()
        writer.transport.abort()

    await host.engine(script=script)
    gateway = await front()
    with pytest.raises(aiohttp.ClientError):
        await gateway.post()
    await gateway.until(lambda: gateway.worker.gateway.active == 0)
    assert await gateway.metric("appliance_gateway_errors_total", **{"class": "cut"}) == 1
    assert await gateway.metric("appliance_gateway_disconnects_total") == 0
