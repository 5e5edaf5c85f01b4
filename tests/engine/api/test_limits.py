"""Limits at L - 1, L and L + 1, and that a refusal costs the engine nothing."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import threading

import aiohttp
import pytest

from engine.api import connection
from engine.api.connection import check_library
from engine.client import EngineClient
from engine.core_config import CoreConfig
from engine.errors import AdmissionError, ConfigError, EngineDead, QueueFull

from .fakes import Script

COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize(("prompt_tokens", "max_tokens", "status"), [
    (62, 1, 200), (63, 1, 200), (64, 1, 413), (65, 1, 413),
    (10, 53, 200), (10, 54, 200), (10, 55, 413), (10, 2**70, 413),
    (63, None, 200), (64, None, 413), (65, None, 413),
])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
async def test_context(make_endpoint, prompt_tokens, max_tokens, status, stream):
    endpoint = await make_endpoint(max_model_len=64)
    body = {"prompt": [97] * prompt_tokens, "max_tokens": max_tokens, "stream": stream}
    async with endpoint.http.post(endpoint.url + COMPLETIONS, json=body) as response:
        assert response.status == status
        if status == 413:
            error = (await response.json())["error"]
            assert error["code"] == "context_length_exceeded"
            assert "64" in error["message"] and str(prompt_tokens) in error["message"]
            assert endpoint.client.submitted == []
        else:
            await response.read()
            assert len(endpoint.client.submitted[0].prompt_ids) == prompt_tokens  # never cut


async def test_one_prompt_too_long_refuses_all(make_endpoint):
    endpoint = await make_endpoint(max_model_len=64)
    status, _ = await endpoint.post(COMPLETIONS, {"prompt": [[1], [1] * 64]})
    assert status == 413
    assert endpoint.client.submitted == []


def padded(size):
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    return body + b" " * (size - len(body))


@pytest.mark.parametrize(("size", "status"), [(999, 200), (1000, 200), (1001, 413)])
@pytest.mark.parametrize("chunked", [False, True])
async def test_body(make_endpoint, size, status, chunked):
    endpoint = await make_endpoint(limits={"max_body_bytes": 1000})

    async def pieces():
        data = padded(size)
        for start in range(0, len(data), 100):
            yield data[start : start + 100]

    headers = {"Content-Type": "application/json"}
    data = pieces() if chunked else padded(size)
    async with endpoint.http.post(endpoint.url + COMPLETIONS, data=data, headers=headers) as response:
        assert response.status == status
        if status == 413:
            assert (await response.json())["error"]["code"] == "body_too_large"


@pytest.mark.parametrize(("depth", "status"), [(31, 200), (32, 200), (33, 400)])
async def test_json_depth(endpoint, depth, status):
    value = 1
    for _ in range(depth - 2):
        value = [value]
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "chat_template_kwargs": {"a": value}}
    # 40 more brackets, so that the scan is not skipped
    body["stop_token_ids"], body["messages"] = [1], body["messages"] * 20
    assert json.dumps(body).count("[") + json.dumps(body).count("{") > 32
    got, answer = await endpoint.post("/v1/chat/completions", body)
    assert got == status, answer


@pytest.mark.parametrize(("count", "status"), [(3, 200), (4, 200), (5, 400)])
async def test_prompts(make_endpoint, count, status):
    endpoint = await make_endpoint(limits={"max_prompts": 4})
    for prompt in (["x"] * count, [[1]] * count):
        got, answer = await endpoint.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 1})
        assert got == status
        if status == 400:
            assert answer["error"]["param"] == "prompt"


@pytest.mark.parametrize(("n", "status"), [(3, 200), (4, 200), (5, 400)])
async def test_choices_are_prompts_times_n(make_endpoint, n, status):
    endpoint = await make_endpoint(limits={"max_choices": 8})
    got, _ = await endpoint.post(COMPLETIONS, {"prompt": ["x", "y"], "n": n, "max_tokens": 1})
    assert got == status


@pytest.mark.parametrize(("count", "status"), [(3, 200), (4, 200), (5, 400)])
async def test_lists(make_endpoint, count, status):
    endpoint = await make_endpoint(limits={"max_logit_bias": 4, "max_stops": 4, "max_stop_token_ids": 4})
    for fields in (
        {"logit_bias": {str(i): 1 for i in range(count)}},
        {"stop": [f"zz{i}" for i in range(count)]},
        {"stop_token_ids": list(range(count))},
    ):
        got, answer = await endpoint.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1} | fields)
        assert got == status
        if status == 400:
            assert answer["error"]["param"] in fields


@pytest.mark.parametrize(("count", "status"), [(4, 200), (5, 400)])
async def test_messages(make_endpoint, count, status):
    endpoint = await make_endpoint(limits={"max_messages": 4})
    body = {"messages": [{"role": "user", "content": "x"}] * count, "max_tokens": 1}
    got, _ = await endpoint.post("/v1/chat/completions", body)
    assert got == status


async def test_the_prompts_of_a_request_are_queued_together_or_not_at_all(make_endpoint):
    endpoint = await make_endpoint(Script(max_queue=3, never_answer=True))
    first = asyncio.create_task(endpoint.post(COMPLETIONS, {"prompt": "a"}))
    while not endpoint.client.running:
        await asyncio.sleep(0.005)
    status, answer = await endpoint.post(COMPLETIONS, {"prompt": ["a", "b", "c"]})
    assert (status, answer["error"]["code"]) == (429, "queue_full")  # it would fit an empty queue
    assert len(endpoint.client.submitted) == 1
    first.cancel()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "prompt",
    [["a", "b", "c", "d"], [[97] * 40, [97] * 40, [97] * 21]],
    ids=["too many prompts", "too many tokens"],
)
async def test_what_no_empty_queue_would_take_is_refused_for_good(make_endpoint, stream, prompt):
    endpoint = await make_endpoint(Script(max_queue=3, max_queued_tokens=100))
    body = {"prompt": prompt, "max_tokens": 1, "stream": stream}
    async with endpoint.http.post(endpoint.url + COMPLETIONS, json=body) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"], error["param"]) == (413, "queue_exceeded", "prompt")
        assert "Retry-After" not in response.headers
        assert "split the request" in error["message"]
    assert endpoint.client.submitted == [] and not endpoint.service.runs
    assert (await endpoint.post(COMPLETIONS, {"prompt": [97] * 101, "max_tokens": 1}))[0] == 200  # the context's matter


def test_capacity_of_the_real_client():
    client = EngineClient(CoreConfig(model_dir="nowhere"), max_queued_requests=4, max_queued_prompt_tokens=100)
    with pytest.raises(QueueFull):
        client.check_capacity(1, 1)  # loading
    client.state = "ready"
    client.check_capacity(4, 100)
    client.check_capacity(1, 101)
    for requests, tokens in ((5, 5), (2, 101)):
        with pytest.raises(AdmissionError):
            client.check_capacity(requests, tokens)
    client.queued_requests, client.queued_prompt_tokens = 1, 60
    client.check_capacity(3, 40)
    for requests, tokens in ((4, 40), (3, 41), (1, 41), (1, 101)):
        with pytest.raises(QueueFull):
            client.check_capacity(requests, tokens)
    client.state = "dead"
    with pytest.raises(EngineDead):
        client.check_capacity(1, 1)


async def test_large_work_waits_behind_its_like_and_is_bounded(make_endpoint):
    endpoint = await make_endpoint(
        inline_encode_chars=100, limits={"large_work_bytes": 20_000, "max_large_backlog_bytes": 200_000}
    )
    gate = threading.Event()
    original = endpoint.tokenizer.encode

    def encode(text, **kwargs):
        if len(text) > 20_000:
            assert gate.wait(10)
        return original(text, **kwargs)

    endpoint.tokenizer.encode = encode
    large = {"prompt": "x" * 60_000, "return_token_strs": True}
    tasks = [asyncio.create_task(endpoint.post("/tokenize", large)) for _ in range(3)]
    try:
        while endpoint.service.large_backlog_bytes < 180_000:
            await asyncio.sleep(0.005)
        status, answer = await endpoint.post("/tokenize", {"prompt": "y" * 18_000})  # parsed and encoded in threads
        assert (status, answer["count"]) == (200, 18_001)
        async with endpoint.http.post(endpoint.url + "/tokenize", json=large) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "2")
        assert not any(task.done() for task in tasks)
    finally:
        gate.set()
    for status, answer in await asyncio.gather(*tasks):
        assert status == 200
        assert answer["token_strs"] == ["<s>"] + ["x"] * 60_000 and answer["count"] == 60_001
    assert endpoint.service.large_backlog_bytes == 0
    assert (await endpoint.post("/tokenize", {"prompt": "x" * 300_000}))[0] == 200  # it waits for nobody


async def test_bodies_held_in_memory_are_bounded_together(make_endpoint):
    endpoint = await make_endpoint(Script(never_answer=True), limits={"max_buffered_bytes": 3000})
    release = asyncio.Event()

    async def slow(size):
        yield b'{"prompt": "'
        yield b"x" * size
        await release.wait()
        yield b'"}'

    headers = {"Content-Type": "application/json"}

    async def post(size):
        async with endpoint.http.post(endpoint.url + "/tokenize", data=slow(size), headers=headers) as response:
            return response.status, response.headers.get("Retry-After")

    first = asyncio.create_task(post(2000))
    while endpoint.service._buffered_bytes < 2000:
        await asyncio.sleep(0.01)
    assert (await post(2000))[0] == 429
    release.set()
    assert (await first)[0] == 200
    assert (await post(2000))[0] == 200  # given back
    assert endpoint.service._buffered_bytes == 0


def test_another_release_of_aiohttp_is_refused_at_the_start(monkeypatch):
    """Its private attributes differ: every request would be dropped without a word (seen with a system package)."""
    check_library()
    for version in ("3.13.2", "3.15.0", "4.0.0a1"):
        monkeypatch.setattr(aiohttp, "__version__", version)
        with pytest.raises(ConfigError, match=f"aiohttp {version} is installed") as caught:
            check_library()
        assert "make setup" in str(caught.value.hint)


def test_an_early_aiohttp_of_the_right_release_is_refused_at_the_start(monkeypatch):
    """3.14.0 to 3.14.3 lack `_buffer_paused`; all that Connection uses of its parent is looked for."""
    monkeypatch.setattr(connection, "PRIVATE", connection.PRIVATE | {"_of_a_later_patch"})
    with pytest.raises(ConfigError, match=f"aiohttp {aiohttp.__version__} is installed; .* 3.14.4 and later"):
        check_library()
    (guarded,) = (
        node
        for node in ast.parse(inspect.getsource(connection)).body
        if isinstance(node, ast.ClassDef) and node.name == "Connection"
    )
    used = {
        node.attr
        for node in ast.walk(guarded)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    ours = {node.name for node in guarded.body if isinstance(node, ast.FunctionDef)} | {
        target.attr
        for function in guarded.body
        if isinstance(function, ast.FunctionDef) and function.name == "__init__"
        for node in ast.walk(function)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute)
    }
    assert {name for name in used - ours if name.startswith("_")} == connection.PRIVATE - {"_of_a_later_patch"}
