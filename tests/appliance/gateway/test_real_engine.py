"""Real engines (CPU backend, a tiny model) behind a gateway: killed, stopped and restarted in the middle of answers.

The oracle is the same request on an engine that nobody disturbs: text, logprobs, finish reasons, usage must be equal.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio

from appliance.paths import Paths
from engine.spawn import python_env, python_module
from tests.engine.streams import assemble, session
from tests.serving import MODEL
from tests.tiny import make_tiny_model

from .world import Front, Host, fronted, metric_value

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.asyncio(loop_scope="module")]

FULL = bool(os.environ.get("APPLIANCE_FULL"))
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Say something."}]
USAGE = {"stream_options": {"include_usage": True}}
TOKENS = 48


class Machine:
    """Two GPU slots with an engine each. Starts engines and reports them, as launchers do."""

    def __init__(self, host: Host, model: Path) -> None:
        self.host, self.model = host, model
        self.processes: dict[int, asyncio.subprocess.Process] = {}
        self.restarts = {0: 0, 1: 0}
        self.gateway: Front

    def path(self, gpu: int) -> Path:
        return self.host.paths.engine_socket(gpu, "r1")

    async def start(self, gpu: int, *options: str) -> None:
        """Ready and admitted when this returns."""
        self.path(gpu).parent.mkdir(parents=True, exist_ok=True)
        process = await asyncio.create_subprocess_exec(
            *python_module("engine"), "--model-dir", str(self.model), "--model-name", MODEL, "--backend", "cpu",
            "--threads", "1", "--kv-tokens", "32768", "--uds", str(self.path(gpu)), *options,
            env=python_env(), stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        self.processes[gpu] = process
        async with session(self.path(gpu)) as http, asyncio.timeout(60):
            while True:
                assert process.returncode is None, "the engine did not start"
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.get("http://engine/readyz") as response:
                        if response.status == 200:
                            break
                await asyncio.sleep(0.05)
        self.host.report(gpu, pid=process.pid, state="ready", admitted=True, restarts=self.restarts[gpu])

    async def kill(self, gpu: int, victim: str = "scope") -> None:
        """`victim`: "api" or "core" alone, or both, as a kill of the whole scope."""
        process = self.processes[gpu]
        core = [child.pid for child in psutil.Process(process.pid).children()]
        for pid in ([process.pid] if victim != "core" else []) + (core if victim != "api" else []):
            os.kill(pid, signal.SIGKILL)
        await process.wait()
        self.host.report(gpu, state="backoff", admitted=False)

    async def revive(self) -> None:
        """Restart what is not running."""
        for gpu, process in list(self.processes.items()):
            if process.returncode is not None:
                self.restarts[gpu] += 1
                await self.start(gpu)
        engines = self.gateway.worker.gateway.engines
        await self.gateway.until(lambda: len([e for e in engines.admitted if e.reachable]) == 2, 10)

    def serving(self) -> int:
        """The GPU that has the one request in flight."""
        busy = [engine.gpu for engine in self.gateway.worker.gateway.engines.admitted if engine.in_flight]
        assert len(busy) == 1, busy
        return busy[0]

    async def begin(self, path: str, body: dict[str, Any], request_id: str = "same") -> Running:
        headers = {"X-Request-Id": request_id}
        response = await self.gateway.http.post(
            self.gateway.url + path, json={"model": MODEL, **body, "stream": True}, headers=headers
        )
        assert response.status == 200, await response.text()
        return Running(response)

    async def whole(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The undisturbed answer."""
        return await (await self.begin(path, body)).finish()


class Running:
    """A stream that a client reads."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response, self.data = response, b""
        self.seed = int(response.headers["X-Appliance-Seed"])

    async def events(self, count: int) -> None:
        """Read at least so many."""
        while self.data.count(b"\n\n") < count:
            piece = await self.response.content.readany()
            assert piece, "the stream has ended already: the test disturbs nothing"
            self.data += piece

    async def finish(self) -> dict[str, Any]:
        self.data += await self.response.read()
        assert self.data.endswith(b"data: [DONE]\n\n"), self.data[-300:]
        answer = assemble(self.data.decode()[:-2].split("\n\n"))
        assert len(answer["heads"]) == 1  # one id, created, model and fingerprint throughout
        del answer["heads"][0]["created"]
        return answer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def machine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Machine]:
    # Deep, so that a step takes longer than the way of its token to the client: almost every token has its own event.
    model = make_tiny_model(
        tmp_path_factory.mktemp("model") / MODEL, num_hidden_layers=24, hidden_size=128, intermediate_size=256
    )
    with tempfile.TemporaryDirectory(prefix="gw") as directory:
        host = Host(Paths.under(Path(directory)))
        host.point("stable", "r1")
        machine = Machine(host, model)
        try:
            await asyncio.gather(machine.start(0), machine.start(1))
            async with fronted(host, replay_timeout=60.0, wait_timeout=60.0) as gateway:
                machine.gateway = gateway
                yield machine
        finally:
            for process in machine.processes.values():
                if process.returncode is None:
                    process.kill()
                    await process.wait()


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": (COMPLETIONS, {"prompt": "abc", "max_tokens": TOKENS, "ignore_eos": True, **USAGE}),
    "greedy": (COMPLETIONS, {"prompt": "abc", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}),
    "n-logprobs": (
        COMPLETIONS,
        {"prompt": "abc", "max_tokens": TOKENS, "n": 3, "logprobs": 3, "ignore_eos": True, **USAGE},
    ),
    "echo": (COMPLETIONS, {"prompt": "a\u00e9\U0001fae0", "max_tokens": TOKENS, "echo": True, "ignore_eos": True}),
    "stop": (COMPLETIONS, {"prompt": "abc", "max_tokens": 2 * TOKENS, "ignore_eos": True, **USAGE}),
    "chat": (CHAT, {"messages": MESSAGES, "max_tokens": TOKENS, "ignore_eos": True, **USAGE}),
    "chat-n-logprobs": (
        CHAT,
        {"messages": MESSAGES, "max_tokens": TOKENS, "n": 2, "logprobs": True, "top_logprobs": 2, "ignore_eos": True},
    ),
}
VICTIMS = ("scope", "core", "api")
SOME = [("completion", "core"), ("n-logprobs", "scope"), ("stop", "api"), ("chat-n-logprobs", "scope")]
ALL = [(kind, victim) for kind in KINDS for victim in VICTIMS]


async def prepare(machine: Machine, kind: str) -> tuple[str, dict[str, Any]]:
    path, body = KINDS[kind]
    if kind == "stop":  # strings out of the text itself, late in it
        text = (await machine.whole(path, body | {"seed": 11}))["choices"][0]["text"]
        body = body | {"seed": 11, "stop": [text[60:63], "never"]}
    return path, body


@pytest.mark.parametrize(("kind", "victim"), ALL if FULL else SOME)
async def test_killed_in_mid_stream_with_two_engines_up(machine: Machine, kind: str, victim: str) -> None:
    await machine.revive()
    path, body = await prepare(machine, kind)
    before = (await machine.gateway.get("/metrics"))[1]
    running = await machine.begin(path, body)
    await running.events(10)
    killed = machine.serving()
    await machine.kill(killed, victim)
    answer = await running.finish()
    after = (await machine.gateway.get("/metrics"))[1]
    replays = [metric_value(text, "appliance_gateway_replays_total", outcome="done") for text in (before, after)]
    assert replays[1] == replays[0] + 1
    assert metric_value(after, "appliance_gateway_errors_total") == 0
    assert answer == await machine.whole(path, body | {"seed": running.seed})
    assert answer["done"] == 1


@pytest.mark.parametrize("kind", ["chat"])
async def test_the_only_engine_is_killed_and_restarted(machine: Machine, kind: str) -> None:
    await machine.revive()
    machine.host.hold(1, operator={"level": "drain", "reason": "test", "since": 1.0})
    try:
        await asyncio.sleep(0.3)
        path, body = await prepare(machine, kind)
        running = await machine.begin(path, body)
        await running.events(10)
        await machine.kill(0)
        machine.restarts[0] += 1
        await machine.start(0)
        answer = await running.finish()
        assert answer == await machine.whole(path, body | {"seed": running.seed})
    finally:
        machine.host.hold(1)
    assert await machine.gateway.metric("appliance_engine_restarts_total", gpu="0") == machine.restarts[0]


async def test_killed_under_load_no_client_loses_an_answer(machine: Machine) -> None:
    """Streams and plain answers on both engines; one engine dies and comes back."""
    await machine.revive()
    body = {"prompt": "abc", "max_tokens": TOKENS, "ignore_eos": True, "model": MODEL}

    async def stream(seed: int) -> dict[str, Any]:
        return (await (await machine.begin(COMPLETIONS, body | {"seed": seed})).finish())["choices"]

    async def plain(seed: int) -> Any:
        status, answer = await machine.gateway.post(COMPLETIONS, body | {"seed": seed})
        assert status == 200, answer
        return answer["choices"], answer["usage"]

    async def everything() -> list[Any]:
        return await asyncio.gather(*map(stream, range(12)), *map(plain, range(12)))

    expected = await everything()
    disturbed = asyncio.create_task(everything())
    engines = machine.gateway.worker.gateway.engines
    await machine.gateway.until(lambda: sum(e.in_flight for e in engines.admitted) == 24)
    await asyncio.sleep(0.3)
    assert not disturbed.done()
    await machine.kill(1)
    machine.restarts[1] += 1
    await machine.start(1)
    assert await disturbed == expected


async def test_an_engine_that_is_drained_too_long_hands_its_streams_over(machine: Machine) -> None:
    """SIGTERM with a drain shorter than the stream: the engine says `shutting_down retry`."""
    await machine.revive()
    for gpu in (0, 1):
        await machine.kill(gpu)
        await machine.start(gpu, "--drain-timeout", "0.05")
    path, body = KINDS["completion"]
    running = await machine.begin(path, body)
    await running.events(5)
    stopped = machine.serving()
    machine.processes[stopped].send_signal(signal.SIGTERM)
    machine.host.report(stopped, state="draining", admitted=False)
    answer = await running.finish()
    assert await asyncio.wait_for(machine.processes[stopped].wait(), 20) == 0
    assert answer == await machine.whole(path, body | {"seed": running.seed})


async def test_a_client_that_leaves_frees_its_pages(machine: Machine) -> None:
    await machine.revive()
    running = await machine.begin(COMPLETIONS, {"prompt": "abc", "max_tokens": 1500, "n": 4, "ignore_eos": True})
    await running.events(8)
    gpu = machine.serving()
    async with session(machine.path(gpu)) as http:

        async def value(name: str) -> float:
            async with http.get("http://engine/metrics") as response:
                return metric_value(await response.text(), name)

        async with asyncio.timeout(10):
            while await value("appliance_requests_running") != 4:
                await asyncio.sleep(0.05)
        running.response.close()
        async with asyncio.timeout(10):
            while await value("appliance_requests_running") != 0:
                await asyncio.sleep(0.05)


async def test_the_engines_own_metrics_are_handed_on(machine: Machine) -> None:
    """Those that alert rules read, of each engine, as it says them itself."""
    await machine.revive()
    errors = "appliance_gateway_engine_scrape_errors_total"
    before, text = "", (await machine.gateway.get("/metrics"))[1]
    async with asyncio.timeout(30):  # an engine late on a busy machine is left out and counted
        while not before or metric_value(text, errors) != metric_value(before, errors):
            before, text = text, (await machine.gateway.get("/metrics"))[1]
    for gpu in (0, 1):
        async with session(machine.path(gpu)) as http, http.get("http://engine/metrics") as response:
            own = await response.text()
        for name in ("appliance_kv_pages_total", "appliance_preemptions_total", "appliance_requests_waiting"):
            assert f"\n{name}{{" in text
            assert metric_value(text, name, gpu=str(gpu), release="r1") == metric_value(own, name)


async def test_admin_is_not_there_and_errors_are_the_engines(machine: Machine) -> None:
    await machine.revive()
    gateway = machine.gateway
    for path in ("/admin/state", "/v1/models/..%2f..%2fadmin%2fstate"):
        assert (await gateway.get(path))[0] == 404
    status, body = await gateway.post(COMPLETIONS, {"model": MODEL, "prompt": "a", "max_tokens": True})
    assert (status, body["error"]["param"]) == (400, "max_tokens")
    status, body = await gateway.post(COMPLETIONS, {"model": MODEL, "prompt": "a", "max_tokens": 10**6})
    assert (status, body["error"]["code"]) == (413, "context_length_exceeded")
    status, body = await gateway.post(COMPLETIONS, b"\xff\xfe")
    assert (status, body["error"]["code"]) == (400, "invalid_utf8")
    status, body = await gateway.post("/infer", {"input": "hello", "max_tokens": 4})
    assert status == 200 and body["output"]
    status, body = await gateway.post("/generate", {"prompt": "hello", "max_tokens": 4})
    assert status == 200 and body["text"]


async def test_the_official_client_unmodified(machine: Machine) -> None:
    import openai

    await machine.revive()
    client = openai.AsyncOpenAI(base_url=machine.gateway.url + "/v1", api_key="none", max_retries=0, timeout=30)
    async with client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        answer = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=12, seed=3, extra_body={"ignore_eos": True}
        )
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=12, seed=3, stream=True, extra_body={"ignore_eos": True}
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == answer.choices[0].message.content
        assert answer.usage.completion_tokens == 12
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("another/model")


async def test_the_official_client_sees_nothing_of_a_kill(machine: Machine) -> None:
    import openai

    await machine.revive()
    client = openai.AsyncOpenAI(base_url=machine.gateway.url + "/v1", api_key="none", max_retries=0, timeout=60)
    arguments: dict[str, Any] = {
        "model": MODEL, "messages": MESSAGES, "max_tokens": TOKENS, "seed": 5, "extra_body": {"ignore_eos": True}
    }  # fmt: skip
    async with client:
        answer = await client.chat.completions.create(**arguments)
        pieces = []
        async for chunk in await client.chat.completions.create(**arguments, stream=True):
            pieces.append(chunk.choices[0].delta.content or "")
            if len(pieces) == 8:
                await machine.kill(machine.serving())
        assert "".join(pieces) == answer.choices[0].message.content


async def test_keys_are_tenants_for_the_prefix_cache(machine: Machine, tmp_path: Path) -> None:
    """Two keys never share cached pages: what one has sent cannot be guessed by timing or usage of the other."""
    import hashlib

    await machine.revive()
    machine.host.hold(1, operator={"level": "drain", "reason": "test", "since": 1.0})
    try:
        await asyncio.sleep(0.3)
        keys = tmp_path / "keys"
        keys.write_text("".join(f"{hashlib.sha256(k.encode()).hexdigest()} {k}\n" for k in ("ann", "bob")))
        prompt = "the quick brown fox jumps over the lazy dog, " * 8

        async with second_gateway(machine.host, keys) as gateway:

            async def cached(key: str) -> int:
                status, answer = await gateway.post(
                    COMPLETIONS, {"model": MODEL, "prompt": prompt, "max_tokens": 1},
                    headers={"Authorization": f"Bearer {key}"},
                )  # fmt: skip
                assert status == 200, answer
                return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

            assert [await cached(key) for key in ("ann", "bob", "ann", "bob")] == [0, 0, 256, 256]
    finally:
        machine.host.hold(1)


@contextlib.asynccontextmanager
async def second_gateway(host: Host, keys: Path) -> AsyncIterator[Front]:
    host.point("canary", "r1")
    async with fronted(host, slot="canary", canary_port=0, keys=keys) as gateway:
        yield gateway
