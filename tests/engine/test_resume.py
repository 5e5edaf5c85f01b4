"""A stream that is cut anywhere and resumed on another engine of the same release: the client sees one answer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.engine.streams import assemble, check_every_cut, last_ids, post, resume, resume_header, session
from tests.serving import MODEL, Server
from tests.tiny import make_tiny_model

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.asyncio(loop_scope="module")]

FULL = bool(os.environ.get("APPLIANCE_FULL"))
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Say something."}]
USAGE = {"stream_options": {"include_usage": True}}
LONG = "the quick brown fox jumps over the lazy dog, " * 8  # more than two KV pages: the second time it is cached


@dataclass
class Engines:
    """Two engines of one release; their steps overlap differently."""

    one: aiohttp.ClientSession
    two: aiohttp.ClientSession
    servers: list[Server]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engines]:
    directory = tmp_path_factory.mktemp("resume")
    # Deep, so that a step takes longer than the way of its token to the client: almost every token has its own event.
    model = make_tiny_model(directory / MODEL, num_hidden_layers=24, hidden_size=128, intermediate_size=256)
    async with contextlib.AsyncExitStack() as stack:
        servers, sessions = [], []
        for number in (1, 2):
            socket = directory / f"{number}.sock"
            server = await Server.start(
                model, "--host", "127.0.0.1", "--uds", str(socket), "--kv-tokens", "32768",
                "--plans-in-flight", str(number),
            )  # fmt: skip
            servers.append(await stack.enter_async_context(server))
            sessions.append(await stack.enter_async_context(session(socket)))
        yield Engines(*sessions, servers)


# Without a seed the text is another one each time: ignore_eos, or a stream now and then ends before it can be cut.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (COMPLETIONS, {"prompt": "abc", "max_tokens": 12, "temperature": 0}),
    "no-seed": (COMPLETIONS, {"prompt": "abc", "max_tokens": 12, "ignore_eos": True}),
    "seed-minus-one": (COMPLETIONS, {"prompt": "abc", "max_tokens": 6, "seed": -1, "ignore_eos": True}),
    "largest-seed": (COMPLETIONS, {"prompt": "abc", "max_tokens": 6, "seed": 2**64 - 1}),
    "usage-cached": (COMPLETIONS, {"prompt": LONG, "max_tokens": 6, "temperature": 0, **USAGE}),
    "n": (COMPLETIONS, {"prompt": "abc", "max_tokens": 8, "n": 3, "ignore_eos": True, **USAGE}),
    "prompts": (COMPLETIONS, {"prompt": ["abc", LONG, "x"], "max_tokens": 6, "n": 2, "ignore_eos": True, **USAGE}),
    "logprobs": (COMPLETIONS, {"prompt": "abc", "max_tokens": 12, "logprobs": 3, "ignore_eos": True, **USAGE}),
    "logprobs-n": (COMPLETIONS, {"prompt": "abc", "max_tokens": 6, "logprobs": 0, "n": 2, "ignore_eos": True}),
    "echo": (COMPLETIONS, {"prompt": "a\u00e9\U0001fae0", "max_tokens": 6, "echo": True, "n": 2, "ignore_eos": True}),
    "echo-logprobs": (
        COMPLETIONS,
        {"prompt": "abcdef", "max_tokens": 6, "echo": True, "logprobs": 2, "ignore_eos": True, **USAGE},
    ),
    "echo-long": (
        COMPLETIONS,
        {"prompt": [LONG, "x"], "max_tokens": 3, "echo": True, "logprobs": 1, "n": 2, "ignore_eos": True},
    ),
    "echo-only": (COMPLETIONS, {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1, **USAGE}),
    "special-shown": (COMPLETIONS, {"prompt": "abc", "max_tokens": 12, "skip_special_tokens": False, "seed": 5}),
    "chat": (CHAT, {"messages": MESSAGES, "max_tokens": 12, "ignore_eos": True, **USAGE}),
    "chat-n-logprobs": (
        CHAT,
        {"messages": MESSAGES, "max_tokens": 8, "n": 2, "logprobs": True, "top_logprobs": 2, "ignore_eos": True},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_cut_after_every_event(engines: Engines, kind: str) -> None:
    path, body = KINDS[kind]
    whole = await check_every_cut(engines.one, engines.two, path, body)
    tokens = body["max_tokens"] * body.get("n", 1)
    assert len(whole.blocks) > min(3, tokens / 2), "hardly a place to cut"  # tokens share events on a busy machine


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("min_tokens", [0, 8])
async def test_cut_around_a_stop_string(engines: Engines, include: bool, min_tokens: int) -> None:
    """The stop strings are found in the text itself, so that text is held back in front of them."""
    body: dict[str, Any] = {"prompt": "abc", "max_tokens": 24, "seed": 3, "ignore_eos": True, "temperature": 1.5}
    text = assemble((await post(engines.one, COMPLETIONS, body)).blocks)["choices"][0]["text"]
    stops = [text[6:9], text[14:16] + "never"]
    body |= {"stop": stops, "include_stop_str_in_output": include, "min_tokens": min_tokens, **USAGE}
    whole = await check_every_cut(engines.one, engines.two, COMPLETIONS, body)
    if min_tokens == 0:
        choice = assemble(whole.blocks)["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", text[6:9])
        assert choice["text"] == (text[:9] if include else text[:6])


async def test_cut_around_a_stop_token(engines: Engines) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 12, "seed": 3, "logprobs": True, "ignore_eos": True}
    whole = assemble((await post(engines.one, CHAT, body)).blocks)
    token = whole["choices"][0]["logprobs"]["content"][7]["bytes"][0]
    stopped = await check_every_cut(engines.one, engines.two, CHAT, body | {"stop_token_ids": [token], **USAGE})
    assert assemble(stopped.blocks)["choices"][0]["stop_reason"] == token


@pytest.mark.parametrize("cold_first", [True, False])
async def test_usage_tells_what_the_first_engine_took_from_its_cache(engines: Engines, cold_first: bool) -> None:
    """What a client pays for does not change because its stream was moved to an engine with another cache."""
    body = {"prompt": LONG, "max_tokens": 6, "temperature": 0, "cache_salt": f"cold{cold_first}", **USAGE}
    await post(engines.two if cold_first else engines.one, COMPLETIONS, body)
    first = await post(engines.one, COMPLETIONS, body)
    cached = assemble(first.blocks)["usage"][0]["prompt_tokens_details"]["cached_tokens"]
    assert (cached == 0) == cold_first
    rest = await resume(engines.two, COMPLETIONS, body, first, first.blocks[:2])
    assert assemble(first.blocks[:2] + rest.blocks) == assemble(first.blocks)


async def test_cut_again_and_again(engines: Engines) -> None:
    """A resumed stream is cut too, and goes on on the first engine: ids count from the beginning, not from the cut."""
    rng = random.Random(7)
    for kind in ("prompts", "echo-logprobs", "chat-n-logprobs"):
        path, body = KINDS[kind]
        first = await post(engines.one, path, body)
        sent: list[str] = []
        part = first
        for http in itertools.cycle((engines.two, engines.one)):
            sent += part.blocks[: rng.randrange(1, 5)]
            if sent[-1] == "data: [DONE]":
                break
            part = await resume(http, path, body, first, sent)
        assert assemble(sent) == assemble(first.blocks)
        assert part is not first


def random_body(rng: random.Random) -> tuple[str, dict[str, Any]]:
    chat = rng.random() < 0.4
    body: dict[str, Any] = {
        "max_tokens": rng.randrange(1, 14), "n": rng.choice([1, 1, 2, 3]), "temperature": rng.choice([0, 0.7, 1.5]),
        "stop": rng.sample(["a", "\ufffd", "9\ufffd", " ", "e<", "zz"], rng.randrange(3)),
        "include_stop_str_in_output": rng.random() < 0.5, "skip_special_tokens": rng.random() < 0.5,
        "ignore_eos": rng.random() < 0.5, "repetition_penalty": rng.choice([1.0, 1.3]),
    }  # fmt: skip
    body["min_tokens"] = rng.randrange(body["max_tokens"] + 1)
    if rng.random() < 0.5:
        body |= USAGE
    if rng.random() < 0.5:
        body["seed"] = rng.randrange(2**64)
    text = LONG if rng.random() < 0.3 else rng.choice(["abc", "\u00e9\u00e9", "<|im_start|>x"])
    if chat:
        body["messages"] = [{"role": "user", "content": text}]
        if rng.random() < 0.5:
            body |= {"logprobs": True, "top_logprobs": rng.randrange(4)}
        return CHAT, body
    body["prompt"] = rng.choice([text, [text, "x"], [1, 2, 3]])
    body["echo"] = rng.random() < 0.4
    if rng.random() < 0.5:
        body["logprobs"] = rng.randrange(4)
    return COMPLETIONS, body


@pytest.mark.parametrize("seed", range(120 if FULL else 12))
async def test_random_requests_cut_after_every_event(engines: Engines, seed: int) -> None:
    path, body = random_body(random.Random(seed))
    await check_every_cut(engines.one, engines.two, path, body)


async def test_without_relay_nothing_is_added(engines: Engines) -> None:
    """Without the header the same stream has no ids, and is the same."""
    body = KINDS["chat-n-logprobs"][1] | {"seed": 1, "stream": True}
    with_ids = await post(engines.one, CHAT, body)
    pinned = {"X-Appliance-Created": with_ids.headers["X-Appliance-Created"], "X-Request-Id": "same"}
    async with engines.one.post("http://engine" + CHAT, json=body, headers=pinned) as response:
        plain = (await response.read()).decode()
        assert "X-Appliance-Created" not in response.headers
    assert not re.search("^id:", plain, re.M)
    again = await post(engines.one, CHAT, body, X_Request_Id="same", X_Appliance_Created=pinned["X-Appliance-Created"])

    with_lines = [f"id: {_index(block)}:\n{block}" if _index(block) else block for block in plain[:-2].split("\n\n")]
    assert assemble(with_lines) == assemble(again.blocks)


def _index(block: str) -> str:
    found = re.search('"index":([0-9]+)', block)
    return found[1] if found else ""


async def test_json_answers_carry_seed_and_created_and_can_be_pinned(engines: Engines) -> None:
    async def ask(**headers: str) -> tuple[Any, dict[str, Any]]:
        names = {"X-Appliance-Relay": "1"} | {name.replace("_", "-"): value for name, value in headers.items()}
        body = {"prompt": "abc", "max_tokens": 10, "ignore_eos": True}
        async with engines.one.post("http://engine" + COMPLETIONS, json=body, headers=names) as response:
            assert response.status == 200
            return response.headers, await response.json()

    headers, answer = await ask()
    assert int(headers["X-Appliance-Created"]) == answer["created"]
    assert int(headers["X-Appliance-Seed"]) == answer["seed"]
    _, again = await ask(
        X_Appliance_Seed=headers["X-Appliance-Seed"], X_Appliance_Created="12345", X_Request_Id=headers["X-Request-Id"]
    )
    assert again == answer | {"created": 12345}


async def test_a_stream_of_another_text_is_refused(engines: Engines) -> None:
    """The first engine's bits are not what this one computes (here: the CRC says so): never a spliced answer."""
    body = {"prompt": "abc", "max_tokens": 12, "seed": 9, "logprobs": 1, "ignore_eos": True}
    mine = await post(engines.one, COMPLETIONS, body)
    other = await post(engines.one, COMPLETIONS, body | {"seed": 10})
    for cut in range(1, len(mine.blocks) - 1):
        got = await post(
            engines.two, COMPLETIONS, body, X_Appliance_Resume=resume_header(other.blocks[:cut]), **mine.pinned
        )
        assert got.status == 409
        assert json.loads(got.blocks[0])["error"]["code"] == "resume_diverged"
        assert got.headers["X-Appliance-Error"] == "resume_diverged final"


async def test_an_answer_that_ends_before_what_was_sent_is_refused(engines: Engines) -> None:
    body = {"prompt": "abc", "max_tokens": 12, "seed": 9, "ignore_eos": True}
    longer = await post(engines.one, COMPLETIONS, body)
    got = await post(
        engines.two, COMPLETIONS, body | {"max_tokens": 6}, X_Appliance_Resume=resume_header(longer.blocks),
        **longer.pinned,
    )  # fmt: skip
    assert got.status == 409
    # And with n = 2: the choice that fits may have begun; then it ends with an error event that says final.
    body |= {"n": 2}
    state = last_ids((await post(engines.one, COMPLETIONS, body)).blocks)["1"]
    got = await post(
        engines.two, COMPLETIONS, body | {"max_tokens": 6}, X_Appliance_Resume=f"1:{state}", **longer.pinned
    )
    if got.status == 200:
        *_, last = got.blocks
        assert last.startswith(": error resume_diverged final\ndata: {")
    else:
        assert got.status == 409


async def test_the_dead_engines_stream_tells_a_gateway_to_go_on_elsewhere(tmp_path: Path) -> None:
    """engine-core is killed in mid-stream: the events so far and the comment are all a gateway needs."""
    import psutil

    model = make_tiny_model(tmp_path / MODEL)
    body = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True, "seed": 4}
    blocks: list[str] = []
    server = await Server.start(model, "--host", "127.0.0.1", "--uds", str(tmp_path / "s"), "--kv-tokens", "4096")
    async with server, session(tmp_path / "s") as http:
        whole = await post(http, COMPLETIONS, body)
        (core,) = [p for p in psutil.Process(server.process.pid).children() if "engine.core" in " ".join(p.cmdline())]
        asking = asyncio.create_task(post(http, COMPLETIONS, body))
        await asyncio.sleep(0.1)
        core.kill()
        cut = await asking
        await server.process.wait()
    if cut.status == 200:
        *blocks, last = cut.blocks
        assert last.startswith(": error engine_dead retry\ndata: {")
    else:
        assert cut.headers["X-Appliance-Error"] == "engine_dead retry"
    second = await Server.start(model, "--host", "127.0.0.1", "--uds", str(tmp_path / "s"), "--kv-tokens", "4096")
    async with second, session(tmp_path / "s") as http:
        first = cut if cut.status == 200 else whole
        rest = await resume(http, COMPLETIONS, body, first, blocks)
        assert assemble(blocks + rest.blocks)["choices"] == assemble(whole.blocks)["choices"]
