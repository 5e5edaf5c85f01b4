"""Clients that leave, deadlines, a dying engine, shutdown: nothing is left in the engine, everybody gets an answer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import textwrap
import time
from pathlib import Path

import aiohttp
import openai
import pytest

from engine.api.config import ApiConfig
from engine.api.run import Run
from engine.api.server import drain, run_server
from engine.client import EngineClient
from engine.core_config import CoreConfig
from engine.messages import Fatal
from engine.types import FinishReason

from .conftest import FACTORIES, make_config
from .fakes import ByteTokenizer, FakeClient, Script

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "x", "max_tokens": 500}


async def until(condition, seconds=5.0):
    """Poll a condition; fails the test when it does not come true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "condition never came true"
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_aborts_its_request(make_endpoint, stream, queued, n):
    script = Script(never_answer=True) if queued else Script(token_delay=0.005)
    endpoint = await make_endpoint(script)
    body = LONG | {"stream": stream, "n": n, "prompt": ["a", "b"]}
    task = asyncio.create_task(endpoint.post(COMPLETIONS, body))
    await until(lambda: len(endpoint.client.submitted) == 2)
    if not queued:
        await asyncio.sleep(0.03)
    task.cancel()  # aiohttp's client closes the connection
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await until(lambda: not endpoint.client.running)
    assert all(None in handle.aborts for handle in endpoint.client.handles)
    await until(lambda: endpoint.service.active == 0 and not endpoint.service.runs and endpoint.service.streams == 0)
    assert 'reason="disconnect"' in endpoint.service.metrics.render().decode()


async def test_every_prompt_carries_the_clients_own_id(endpoint):
    await endpoint.post(COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 1}, headers={"X-Request-Id": "my-id"})
    assert [message.client_id for message in endpoint.client.submitted] == ["my-id", "my-id"]
    assert len({message.request_id for message in endpoint.client.submitted}) == 2


async def test_closing_an_openai_stream_aborts(make_endpoint):
    endpoint = await make_endpoint(Script(token_delay=0.005))
    stream = await endpoint.openai().completions.create(model="tiny", stream=True, **LONG)
    async for _ in stream:
        break
    await stream.close()
    await until(lambda: not endpoint.client.running)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_finished_request_is_not_aborted(endpoint, stream):
    async with endpoint.http.post(endpoint.url + COMPLETIONS, json={"prompt": "x", "stream": stream}) as response:
        await response.read()
    await until(lambda: not endpoint.service.runs)
    assert endpoint.client.handles[0].aborts == []


async def test_deadline_told_by_the_engine(make_endpoint):
    endpoint = await make_endpoint(Script(finish=FinishReason.DEADLINE))
    before = time.monotonic()
    status, answer = await endpoint.post(COMPLETIONS, {"prompt": "x", "max_tokens": 2, "timeout": 7})
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    assert before + 6.9 < endpoint.client.submitted[0].deadline < time.monotonic() + 7.1


@pytest.mark.parametrize("stream", [False, True])
async def test_deadline_of_an_engine_that_never_answers(make_endpoint, stream):
    endpoint = await make_endpoint(Script(never_answer=True), timeouts={"deadline_grace": 0.05})
    status, answer = await endpoint.post(COMPLETIONS, {"prompt": "x", "timeout": 0.05, "stream": stream})
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    assert not endpoint.client.running


async def test_engine_dies_under_requests(make_endpoint):
    endpoint = await make_endpoint(Script(token_delay=0.01))
    whole = asyncio.create_task(endpoint.post(COMPLETIONS, LONG))
    stream = await endpoint.openai().completions.create(model="tiny", stream=True, **LONG)
    await anext(stream)
    await until(lambda: len(endpoint.client.submitted) == 2)
    endpoint.client.die()
    status, answer = await whole
    assert (status, answer["error"]["code"]) == (503, "engine_dead")
    with pytest.raises(openai.APIError, match="engine is gone"):
        async for _ in stream:
            pass
    for path in (COMPLETIONS, "/infer", "/generate", "/v1/chat/completions"):
        status, answer = await endpoint.post(path, {"prompt": "x"})
        assert (status, answer["error"]["code"]) == (503, "engine_dead")
    assert (await endpoint.get("/readyz"))[0] == 503
    assert (await endpoint.get("/livez"))[0] == 200


async def test_engine_aborting_a_request_is_no_empty_answer(make_endpoint):
    endpoint = await make_endpoint(Script(finish=FinishReason.ABORT))
    status, answer = await endpoint.post(COMPLETIONS, {"prompt": "x"})
    assert (status, answer["error"]["code"]) == (503, "aborted")


def finished(service):
    """Choices by finish reason, as /metrics says."""
    (family,) = (f for f in service.metrics.registry.collect() if f.name == "appliance_requests_finished")
    return {s.labels["reason"]: s.value for s in family.samples if s.name.endswith("_total") and s.value}


CLOCK = {"timeouts": {"deadline_grace": 0.05}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "config", "fields", "reasons"),
    [
        (Script(), {}, {}, {"length": 6}),
        (Script(finish=FinishReason.DEADLINE), {}, {}, {"deadline": 6}),
        (Script(never_answer=True), CLOCK, {"timeout": 0.05}, {"deadline": 6}),
        (Script(token_delay=0.02), CLOCK, {"timeout": 0.1}, {"deadline": 6}),
        (Script(fail_after=2), {}, {}, {"error": 6}),
        (Script(end_early_after=2), {}, {}, {"error": 6}),
        (Script(finish=FinishReason.ABORT), {}, {}, {"abort": 6}),
    ],
    ids=["done", "engine's deadline", "silent engine", "slow engine", "NaN", "broken engine", "drained engine"],
)
async def test_every_choice_is_counted_under_a_reason(make_endpoint, stream, script, config, fields, reasons):
    endpoint = await make_endpoint(script, **config)
    body = {"prompt": ["a", "b"], "n": 3, "max_tokens": 20, "stream": stream} | fields
    async with endpoint.http.post(endpoint.url + COMPLETIONS, json=body) as response:
        await response.read()
    await until(lambda: not endpoint.service.runs)
    assert finished(endpoint.service) == reasons


async def test_choices_that_had_ended_keep_their_reason(make_endpoint):
    def reply(msg, index):
        return [97] * (2 if index == 0 else 500)

    endpoint = await make_endpoint(Script(reply=reply, token_delay=0.01), **CLOCK)
    await endpoint.post(COMPLETIONS, {"prompt": "a", "n": 3, "max_tokens": 400, "timeout": 0.15})
    assert finished(endpoint.service) == {"stop": 1, "deadline": 2}


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_of_a_dying_engine_are_errors(make_endpoint, stream):
    endpoint = await make_endpoint(Script(token_delay=0.01))
    body = LONG | {"n": 3, "stream": stream}
    flight = asyncio.create_task(_read(endpoint.http, endpoint.url, body))
    await until(lambda: endpoint.client.submitted)
    await asyncio.sleep(0.03)
    endpoint.client.die()
    await flight
    assert finished(endpoint.service) == {"error": 3}


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_that_outlast_a_shutdown(make_endpoint, stream):
    endpoint = await make_endpoint(Script(token_delay=0.02), timeouts={"drain": 0.05})
    flight = asyncio.create_task(_read(endpoint.http, endpoint.url, LONG | {"n": 3, "stream": stream}))
    await until(lambda: endpoint.client.submitted)
    await drain(endpoint.service, asyncio.Event())
    await flight
    assert finished(endpoint.service) == {"shutdown": 3}


async def test_a_fault_of_ours_is_not_counted_as_a_client_that_left(make_endpoint, monkeypatch):
    endpoint = await make_endpoint(Script(token_delay=0.01))

    async def broken(self):
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(Run, "wait", broken)
    status, _ = await endpoint.post(COMPLETIONS, LONG | {"n": 3})
    assert status == 500
    assert finished(endpoint.service) == {"error": 3}


async def test_long_prompts_are_tokenized_off_the_event_loop(make_endpoint):
    import threading

    endpoint = await make_endpoint(inline_encode_chars=100)
    await endpoint.post("/tokenize", {"prompt": "x" * 100})
    await endpoint.post("/tokenize", {"prompt": "x" * 101})
    await endpoint.post("/tokenize", {"messages": [{"role": "user", "content": "y" * 101}]})
    await endpoint.post("/infer", {"input": "y" * 101, "max_tokens": 1})
    short, *long = endpoint.tokenizer.encode_threads
    assert short == threading.get_ident()
    assert threading.get_ident() not in long and len(long) == 3


async def test_livez_answers_while_the_tokenizer_is_stuck(make_endpoint):
    import threading

    endpoint = await make_endpoint(inline_encode_chars=1)
    gate = threading.Event()
    original = endpoint.tokenizer.encode
    endpoint.tokenizer.encode = lambda *args, **kwargs: (gate.wait(10), original(*args, **kwargs))[1]
    tasks = [asyncio.create_task(endpoint.post("/tokenize", {"prompt": "xx"})) for _ in range(5)]
    try:
        await asyncio.sleep(0.05)
        assert (await endpoint.get("/livez"))[0] == 200
        assert (await endpoint.get("/health"))[0] == 200
        assert not any(task.done() for task in tasks)
    finally:
        gate.set()
    assert {status for status, _ in await asyncio.gather(*tasks)} == {200}


# ---- shutdown --------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def served(script, **config):
    """run_server in a task, stopped by its event: (client, url, stop, task)."""
    client, stop, where = FakeClient(script), asyncio.Event(), asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        run_server(
            client, ByteTokenizer(), make_config(**config), host="127.0.0.1", port=0, stop=stop,
            handle_signals=False, on_listening=where.set_result, **FACTORIES,
        )
    )  # fmt: skip
    address = (await where)[0]
    try:
        yield client, f"http://{address[0]}:{address[1]}", stop, task
    finally:
        stop.set()
        await asyncio.wait_for(task, 10)


async def test_drain_finishes_what_is_in_flight_and_takes_nothing_new():
    async with served(Script(token_delay=0.01)) as (client, url, stop, task), aiohttp.ClientSession() as http:
        flight = asyncio.create_task(http.post(url + COMPLETIONS, json={"prompt": "x", "max_tokens": 40}))
        await until(lambda: client.running)
        stop.set()
        await asyncio.sleep(0.05)
        async with http.get(url + "/readyz") as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "5")
        async with http.get(url + "/livez") as response:
            assert response.status == 200
        async with http.post(url + COMPLETIONS, json={"prompt": "x"}) as response:
            assert response.status == 503
            assert response.headers["Connection"] == "close"
            assert (await response.json())["error"]["code"] == "draining"
        response = await flight
        assert response.status == 200
        assert (await response.json())["usage"]["completion_tokens"] == 40
        assert await asyncio.wait_for(task, 5) == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_what_outlasts_the_drain_ends_with_an_error(stream):
    script = Script(token_delay=0.02)
    async with served(script, timeouts={"drain": 0.1}) as (client, url, stop, task), aiohttp.ClientSession() as http:
        flight = asyncio.create_task(_read(http, url, LONG | {"stream": stream}))
        await until(lambda: client.running)
        await asyncio.sleep(0.05)
        stop.set()
        status, text = await flight
        assert status == (200 if stream else 503)
        assert '"code":"shutting_down"' in text
        assert "[DONE]" not in text
        assert await asyncio.wait_for(task, 5) == 0
        assert not client.running


async def _read(http, url, body):
    async with http.post(url + COMPLETIONS, json=body) as response:
        return response.status, await response.text()


async def test_idle_connections_do_not_hold_up_the_exit():
    async with served(Script()) as (_, url, stop, task), aiohttp.ClientSession() as http:
        async with http.get(url + "/livez") as response:
            await response.read()
        stop.set()
        assert await asyncio.wait_for(task, 5) == 0


async def test_a_dead_engine_ends_the_server_with_1():
    async with served(Script(never_answer=True)) as (client, url, _, task), aiohttp.ClientSession() as http:
        flight = asyncio.create_task(_read(http, url, LONG))
        await until(lambda: client.running)
        client.die()
        assert (await flight)[0] == 503
        assert await asyncio.wait_for(task, 10) == 1


PROGRAM = """
    import asyncio, sys
    import uvloop
    from PACKAGE.conftest import FACTORIES, make_config
    from PACKAGE.fakes import ByteTokenizer, FakeClient, Script
    from engine.api.server import run_server

    async def main():
        client = FakeClient(Script(token_delay=0.02))
        config = make_config(timeouts={"drain": float(sys.argv[1]), "fast_drain": 0.1})
        status = await run_server(client, ByteTokenizer(), config, host="127.0.0.1", port=0,
                                  on_listening=lambda a: print(a[0][1], flush=True), **FACTORIES)
        await asyncio.sleep(float(sys.argv[2]))  # as the end of engine-core may take
        return status

    sys.exit(uvloop.run(main()))
"""


@contextlib.asynccontextmanager
async def process(drain_seconds, end_seconds=0):
    here = Path(__file__).resolve()
    package = __name__.rpartition(".")[0]
    path = f"{here.parents[3]}:{here.parents[package.count('.') + 1]}"
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(PROGRAM).replace("PACKAGE", package),
        str(drain_seconds), str(end_seconds),
        env=os.environ | {"PYTHONPATH": path}, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        port = int(await asyncio.wait_for(child.stdout.readline(), 30))
        yield child, f"http://127.0.0.1:{port}"
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def test_sigterm_drains_and_exits_0():
    async with process(10) as (child, url), aiohttp.ClientSession() as http:
        flight = asyncio.create_task(_read(http, url, {"prompt": "x", "max_tokens": 25}))
        await asyncio.sleep(0.2)
        child.send_signal(signal.SIGTERM)
        status, _ = await flight
        assert status == 200
        assert await asyncio.wait_for(child.wait(), 10) == 0


async def test_a_second_sigterm_hurries():
    async with process(60) as (child, url), aiohttp.ClientSession() as http:
        flight = asyncio.create_task(_read(http, url, {"prompt": "x", "max_tokens": 500}))
        await asyncio.sleep(0.2)
        child.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        child.send_signal(signal.SIGTERM)
        status, text = await asyncio.wait_for(flight, 5)
        assert status == 503
        assert "shutting_down" in text
        assert await asyncio.wait_for(child.wait(), 10) == 0


async def test_signals_at_the_end_do_not_spoil_the_exit():
    async with process(10, end_seconds=1) as (child, _):
        child.send_signal(signal.SIGTERM)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) * 3:
            await asyncio.sleep(0.1)
            child.send_signal(number)
        assert await asyncio.wait_for(child.wait(), 10) == 0


async def test_the_log_says_how_the_engine_died(caplog):
    async with served(Script()) as (client, _, _, task):
        client.fatal = Fatal(error="engine-core ended with signal 9", hint="see dmesg")
        client.die()
        assert await asyncio.wait_for(task, 10) == 1
    (entry,) = (r for r in caplog.records if r.levelname == "CRITICAL")
    assert "engine-core ended with signal 9" in entry.getMessage()


async def test_a_killed_engine_is_named_by_the_client(tmp_path):
    client = EngineClient(CoreConfig(model_dir=str(tmp_path)))
    client.start()
    os.kill(client.core_pid, signal.SIGKILL)
    await asyncio.wait_for(client.on_death.wait(), 10)
    assert "signal 9" in client.fatal.error and "memory" in client.fatal.hint


def test_config_defaults_are_consistent():
    timeouts = ApiConfig(model="m", max_model_len=1).timeouts
    assert timeouts.request <= timeouts.max_request
    assert timeouts.fast_drain < timeouts.drain
