"""Mutated bodies (by their schema) and raw bytes: never a 5xx, always the error shape, nothing left behind."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import typing

import aiohttp
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.api import schema
from engine.api.routes import ROUTES

from .conftest import running
from .fakes import VOCAB

EXAMPLES = 2000 if os.environ.get("APPLIANCE_FULL") else 150

POSTS = [route for route in ROUTES if route.body is not None and not route.path.startswith("/admin")]
VALID: dict[str, dict] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/infer": {"input": "hi", "max_tokens": 2},
    "/generate": {"prompt": "hi", "max_tokens": 2},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [104]},
}
NASTY = st.sampled_from(
    [None, True, False, 0, 1, -1, 2, 1.0, 1.5, -0.0, 1e-320, 1e308, 2**31, 2**32, 2**53, 2**63, 2**64, -(2**63), 10**40,
     "", "a", "\x00", "\u2028", "🫠", "<|im_end|>", "<s>", "1", "true", "x" * 300, [], {}, [[]], [{}], [None], [True],
     [1, "a"], [[1], [2]], [VOCAB], [-1], {"1": 1}, {"-1": 1}, {"a": None}, {"type": "text"}, {"type": "json_object"},
     {"include_usage": True}, [{"role": "user", "content": "x"}], [{"role": "user", "content": [{"type": "text"}]}]]
)  # fmt: skip
ANY = st.recursive(
    NASTY | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@functools.cache
def well_typed(kind) -> st.SearchStrategy:
    """Values of the declared type of a field, so that the fuzz reaches past the type checks."""
    origin = typing.get_origin(kind)
    if kind is type(None):
        return st.none()
    if kind is bool:
        return st.booleans()
    if kind is int:
        return st.integers(-3, 30) | st.integers(-(2**65), 2**65)
    if kind is float:
        return st.floats(-3, 3) | st.integers(-3, 3)
    if kind is str:
        return st.text(max_size=12) | st.sampled_from(["tiny", "<|im_end|>", "auto"])
    if origin is typing.Literal:
        return st.sampled_from(typing.get_args(kind))
    if origin is list:
        return st.lists(well_typed(typing.get_args(kind)[0]), max_size=4)
    if origin is dict:
        value = well_typed(typing.get_args(kind)[1])
        return st.dictionaries(st.integers(-2, 300).map(str) | st.text(max_size=5), value, max_size=4)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return st.fixed_dictionaries({}, optional={f.name: well_typed(f.type) for f in msgspec.structs.fields(kind)})
    if kind is typing.Any:
        return ANY
    return st.one_of([well_typed(one) for one in typing.get_args(kind)])


@st.composite
def bodies(draw):
    route = draw(st.sampled_from(POSTS))
    body = dict(VALID[route.path])
    fields = {field.name: field.type for field in msgspec.structs.fields(route.body)}
    for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=5, unique=True)):
        body[name] = draw(well_typed(fields[name]) if draw(st.integers(0, 3)) else ANY)
    if draw(st.integers(0, 9)) == 0:
        body[draw(st.text(max_size=10))] = draw(ANY)
    raw = json.dumps(body, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    damage = draw(st.sampled_from(["no"] * 6 + ["cut", "byte", "insert"]))
    if raw and damage != "no":
        where = draw(st.integers(0, len(raw) - 1))
        byte = bytes([draw(st.integers(0, 255))])
        raw = {
            "cut": raw[:where],
            "byte": raw[:where] + byte + raw[where + 1 :],
            "insert": raw[:where] + byte + raw[where:],
        }[damage]
    return route.path, raw


async def check(url, http, path, raw):
    headers = {"Content-Type": "application/json"}
    async with http.post(url + path, data=raw, headers=headers) as response:
        body = await response.read()
        assert response.status in (200, 400, 404, 413), (response.status, body)
        assert response.headers["X-Request-Id"]
        if response.status == 200:
            if response.content_type == "text/event-stream":
                assert body.endswith(b"data: [DONE]\n\n")
            else:
                json.loads(body)
            return
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"] and error["type"]


@pytest.fixture(scope="module")
def loop_and_endpoint():
    """One endpoint for all examples: what one request breaks, the next one sees."""
    loop = asyncio.new_event_loop()
    context = running(max_model_len=128, limits={"max_body_bytes": 100_000})
    endpoint = loop.run_until_complete(context.__aenter__())
    http = loop.run_until_complete(_session())
    yield loop, endpoint, http
    loop.run_until_complete(http.close())
    loop.run_until_complete(context.__aexit__(None, None, None))
    loop.close()


async def _session():
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20))


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(bodies())
def test_bodies(loop_and_endpoint, case):
    loop, endpoint, http = loop_and_endpoint
    path, raw = case
    loop.run_until_complete(check(endpoint.url, http, path, raw))
    assert not endpoint.client.running
    assert endpoint.service.active == 0
    assert endpoint.service._buffered_bytes == 0
    for msg in endpoint.client.submitted:
        assert len(msg.prompt_ids) + msg.params.max_tokens <= 128
        assert all(0 <= token < VOCAB for token in msg.prompt_ids)
        assert all(0 <= token < VOCAB for token in msg.params.logit_bias)
    endpoint.client.submitted.clear()
    endpoint.client.handles.clear()


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=300) | st.lists(st.sampled_from(
    [b"GET ", b"POST ", b"/livez", b"/infer", b" HTTP/1.1\r\n", b"Content-Length: ", b"5", b"-1", b"\r\n", b"\r\n\r\n",
     b"Transfer-Encoding: chunked\r\n", b"0\r\n\r\n", b"Host: x\r\n", b"Content-Type: application/json\r\n", b"{}",
     b"\x00",
     b"Expect: 100-continue\r\n", b"Upgrade: websocket\r\n", b"Connection: upgrade\r\n", b"Connection: close\r\n"]),
    max_size=14).map(b"".join))  # fmt: skip
def test_raw_bytes(loop_and_endpoint, data):
    loop, endpoint, http = loop_and_endpoint

    async def send():
        reader, writer = await asyncio.open_connection(*endpoint.address[:2])
        writer.write(data)
        writer.write_eof()
        raw = b""
        try:
            async with asyncio.timeout(5):
                raw = await reader.read()
        except ConnectionError:
            pass
        writer.close()
        for status in (b"HTTP/1.1 5", b"HTTP/1.0 5"):
            assert status not in raw, raw
        async with http.get(endpoint.url + "/livez") as response:
            assert response.status == 200

    loop.run_until_complete(send())


async def test_many_clients_coming_and_going():
    """A small soak: errors, aborts, disconnects and good requests at once; in the end nothing is left."""
    rng = random.Random(7)
    count = 2000 if os.environ.get("APPLIANCE_FULL") else 200
    async with running() as endpoint:
        endpoint.client.script.token_delay = 0.0005
        gate = asyncio.Semaphore(32)

        async def one(number):
            body = {"prompt": "x" * rng.randrange(1, 50), "max_tokens": rng.randrange(1, 40), "n": rng.randrange(1, 4)}
            body["stream"] = rng.random() < 0.5
            body["stop"] = "a" if rng.random() < 0.3 else None
            if rng.random() < 0.1:
                body["temperature"] = 9
            async with gate:
                request = asyncio.create_task(_fetch(endpoint, body))
                if rng.random() < 0.3:
                    await asyncio.sleep(rng.random() * 0.01)
                    request.cancel()
                results = await asyncio.gather(request, return_exceptions=True)
                return results[0]

        results = await asyncio.gather(*[one(number) for number in range(count)])
        assert {r for r in results if isinstance(r, int)} <= {200, 400}
        assert results.count(200) > count / 3
        for _ in range(200):
            if not endpoint.client.running and endpoint.service.active == 0:
                break
            await asyncio.sleep(0.02)
        assert not endpoint.client.running
        assert (endpoint.service.active, endpoint.service.streams, len(endpoint.service.runs)) == (0, 0, 0)
        assert endpoint.service._buffered_bytes == 0
        assert all(not handle.unfinished for handle in endpoint.client.handles)


async def _fetch(endpoint, body):
    async with endpoint.http.post(endpoint.url + "/v1/completions", json=body) as response:
        await response.read()
        return response.status


def test_every_post_route_is_fuzzed():
    assert {route.path for route in POSTS} == set(VALID)
    assert schema.CompletionRequest in {route.body for route in POSTS}
