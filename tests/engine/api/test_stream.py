"""Server-sent events on the wire: framing, errors, pings, shared events under load, and how a choice is cut."""

from __future__ import annotations

import asyncio
import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api.choice import Choice
from engine.api.sampling import make_plan
from engine.api.schema import CompletionRequest
from engine.api.service import Service
from engine.messages import Ready, Tokens
from engine.stop import StopMatcher
from engine.types import DeviceId, FinishReason

from .conftest import FACTORIES, make_config
from .fakes import EOS, ByteTokenizer, FakeClient, NaiveStopMatcher, Script

COMPLETIONS = "/v1/completions"


async def events(endpoint, body, path=COMPLETIONS):
    """The events of a stream, parsed as the WHATWG event stream rules say (data lines, an empty line, comments)."""
    async with endpoint.http.post(endpoint.url + path, json=body | {"stream": True}) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["X-Accel-Buffering"] == "no"
        assert response.headers["Cache-Control"] == "no-cache"
        raw = (await response.read()).decode()
    assert raw.endswith("\n\n")
    out = []
    for block in raw[:-2].split("\n\n"):
        lines = block.split("\n")
        assert len(lines) == 1
        if lines[0].startswith(":"):
            out.append("ping")
            continue
        name, value = lines[0].split(": ", 1)
        assert name == "data"
        out.append(value if value == "[DONE]" else json.loads(value))
    return out


async def test_framing(endpoint):
    got = await events(endpoint, {"prompt": "x", "max_tokens": 3, "stream_options": {"include_usage": True}})
    assert got[-1] == "[DONE]"
    assert got[-2]["choices"] == []
    assert got[-2]["usage"]["completion_tokens"] == 3
    assert all(event["usage"] is None for event in got[:-2])
    assert [event["choices"][0]["finish_reason"] for event in got[:-2]][-1] == "length"
    assert "".join(event["choices"][0]["text"] for event in got[:-2]).__len__() == 3


async def test_newlines_and_separators_in_text_stay_inside_one_event(make_endpoint):
    text = 'a\nb\r\n\n\u2028data: [DONE]\n\n"\\\x00'
    endpoint = await make_endpoint(Script(reply=lambda msg, index: list(text.encode())))
    got = await events(endpoint, {"prompt": "x", "max_tokens": 100})
    assert "".join(event["choices"][0]["text"] for event in got[:-1]) == text


async def test_error_before_the_first_token_is_an_http_status(make_endpoint):
    endpoint = await make_endpoint(Script(fail_after=0))
    status, answer = await endpoint.post(COMPLETIONS, {"prompt": "x", "stream": True})
    assert status == 500
    assert answer["error"]["where"] == {"layer": 3, "op": "lm_head", "position": 1}
    assert answer["error"]["code"] == "engine_error"


async def test_error_in_mid_stream_is_an_event_without_done(make_endpoint):
    endpoint = await make_endpoint(Script(fail_after=4, token_delay=0.002))
    got = await events(endpoint, {"prompt": "x", "max_tokens": 9})
    assert got[-1]["error"]["message"] == "NaN logits"
    assert got[-1]["error"]["type"] == "server_error"
    assert "[DONE]" not in got
    assert not endpoint.client.running
    metrics = endpoint.service.metrics.render().decode()
    assert "appliance_stream_errors_total 1.0" in metrics
    assert 'appliance_requests_finished_total{reason="error"} 1.0' in metrics


async def test_an_error_fails_only_its_request(make_endpoint):
    endpoint = await make_endpoint(Script(token_delay=0.002))
    other = asyncio.create_task(endpoint.post(COMPLETIONS, {"prompt": "x", "max_tokens": 60}))
    while not endpoint.client.running:
        await asyncio.sleep(0.001)
    endpoint.client.fail(endpoint.client.handles[0], "NaN logits")  # as the engine reports it, for one request
    status, _ = await endpoint.post(COMPLETIONS, {"prompt": "y", "max_tokens": 60})
    assert status == 200
    status, answer = await other
    assert (status, answer["error"]["message"]) == (500, "NaN logits")


async def test_engine_that_ends_without_a_finish_reason_is_an_error(make_endpoint):
    endpoint = await make_endpoint(Script(end_early_after=2))
    status, answer = await endpoint.post(COMPLETIONS, {"prompt": "x"})
    assert (status, answer["error"]["code"]) == (500, "engine_error")


async def test_silence_is_filled_with_comments(make_endpoint):
    endpoint = await make_endpoint(Script(first_delay=0.3), timeouts={"sse_ping": 0.05})
    got = await events(endpoint, {"prompt": "x", "max_tokens": 2})
    assert got[0] == "ping"
    assert got[-1] == "[DONE]"
    client = endpoint.openai()
    stream = await client.completions.create(model="tiny", prompt="x", max_tokens=2, stream=True)
    assert len([chunk async for chunk in stream]) >= 1  # the official client skips them


async def test_tokens_share_events_under_load_only(make_endpoint):
    script = Script(token_delay=0.001)
    alone = await make_endpoint(script, coalesce_min_streams=2, coalesce_seconds=0.05)
    body = {"prompt": "x", "max_tokens": 60, "seed": 1}
    single = await events(alone, body)
    both = await asyncio.gather(events(alone, body), events(alone, body))

    def text(got):
        return "".join(event["choices"][0]["text"] for event in got[:-1])

    assert len(single) == 61  # one event a token, and [DONE]
    for got in both:
        assert len(got) < 40
        assert text(got) == text(single)


async def test_interleaved_choices_keep_their_index(endpoint):
    got = await events(endpoint, {"prompt": ["a", "b"], "n": 3, "max_tokens": 4, "seed": 9})
    whole = (await endpoint.post(COMPLETIONS, {"prompt": ["a", "b"], "n": 3, "max_tokens": 4, "seed": 9}))[1]
    texts = dict.fromkeys(range(6), "")
    order = []
    for event in got[:-1]:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
        order.append(choice["index"])
    assert list(texts.values()) == [choice["text"] for choice in whole["choices"]]
    assert order != sorted(order)  # really interleaved


async def test_stop_ends_one_choice_and_the_others_go_on(make_endpoint):
    replies = {0: b"abSTOPxxxx", 1: b"abcdefghij"}
    endpoint = await make_endpoint(Script(reply=lambda msg, index: list(replies[index]), token_delay=0.001))
    status, answer = await endpoint.post(COMPLETIONS, {"prompt": "x", "n": 2, "max_tokens": 10, "stop": "STOP"})
    assert status == 200
    assert [c["text"] for c in answer["choices"]] == ["ab", "abcdefghij"]
    assert [c["finish_reason"] for c in answer["choices"]] == ["stop", "length"]
    assert [c["stop_reason"] for c in answer["choices"]] == ["STOP", None]
    assert answer["usage"]["completion_tokens"] == 6 + 10
    assert endpoint.client.handles[0].aborts == [0]


def run_choice(ids, cuts, finish, matcher=NaiveStopMatcher, **fields):
    """Feed `ids` to a choice in pieces cut at `cuts`; what it says in the end."""
    factories = FACTORIES | {"make_stop_matcher": matcher}
    service = Service(FakeClient.__new__(FakeClient), ByteTokenizer(), make_config(), **factories)
    service.client.ready = None
    service.client.state = "ready"
    plan = make_plan_for(service, **fields)
    choice = Choice(service, plan, 0, 0, service.make_stop_matcher(plan.stops) if plan.stops else None)
    borders = [0, *sorted(cuts), len(ids)]
    text = ""
    for start, end in itertools.pairwise(borders):
        last = end == len(ids)
        choice.feed(Tokens(request_id="r", index=0, token_ids=ids[start:end], finish_reason=finish if last else None))
        text += choice.take().text
        if choice.done():
            break
    service.pool.shutdown()
    return text, choice.finish_reason, choice.stop_reason, choice.num_tokens


def make_plan_for(service, **fields):
    service.client.ready = Ready(
        kv_pages=1,
        max_model_len=512,
        vocab_size=272,
        weights_bytes=0,
        weights_checksum="",
        load_seconds=0,
        backend="",
        device=DeviceId("", "", ""),
    )
    return make_plan(service, CompletionRequest(prompt="x", **fields))


@given(
    st.text(alphabet="abé🫠 \n", max_size=30),
    st.lists(st.text(alphabet="abé🫠", min_size=1, max_size=4), max_size=3),
    st.integers(0, 8),
    st.booleans(),
    st.data(),
)
@settings(max_examples=150, deadline=None)
def test_the_cut_into_messages_changes_nothing(text, stops, min_tokens, include, data):
    """Same tokens, other messages: same text, finish reason and usage. And no stop string is ever let through."""
    ids = list(text.encode())
    if not ids:
        return
    fields = {"stop": stops, "min_tokens": min_tokens, "include_stop_str_in_output": include, "seed": 0}
    whole = run_choice(ids, [], FinishReason.LENGTH, **fields)
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=8))
    assert run_choice(ids, cuts, FinishReason.LENGTH, **fields) == whole
    assert run_choice(ids, range(1, len(ids)), FinishReason.LENGTH, **fields) == whole
    assert run_choice(ids, cuts, FinishReason.LENGTH, matcher=StopMatcher, **fields) == whole  # the engine's own
    answer, reason, stop_reason, num_tokens = whole
    if min_tokens == 0 and not include:
        assert not any(stop in answer for stop in stops)
        assert text.startswith(answer)
    if reason == "stop":
        assert stop_reason in stops
        assert num_tokens > min_tokens
        if include:
            assert answer.endswith(stop_reason)
    else:
        assert answer == text
        assert num_tokens == len(ids)


def test_invalid_utf8_from_the_model_is_replaced_only_at_the_end():
    ids = [*b"ok ", 0xF0, 0x9F]
    text, reason, _, count = run_choice(ids, range(1, len(ids)), FinishReason.STOP, seed=0)
    assert (text, reason, count) == ("ok �", "stop", 5)


@pytest.mark.parametrize("seed", range(3))
async def test_json_and_stream_agree_for_random_requests(make_endpoint, seed):
    rng = random.Random(seed)
    endpoint = await make_endpoint(
        Script(
            reply=lambda msg, index: [random.Random(f"{msg.params.seed}{index}").randrange(0, 260) for _ in range(50)]
        ),
        eos_token_ids=(EOS,),
    )
    for _ in range(10):
        body = {
            "prompt": "x",
            "seed": rng.randrange(1000),
            "max_tokens": rng.randrange(1, 40),
            "n": rng.randrange(1, 4),
            "stop": rng.sample(["a", "ab", "\u00e9", "0"], 2),
            "skip_special_tokens": rng.random() < 0.5,
            "echo": rng.random() < 0.5,
        }
        whole = (await endpoint.post(COMPLETIONS, body))[1]
        texts = [""] * body["n"]
        for event in (await events(endpoint, body))[:-1]:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == [choice["text"] for choice in whole["choices"]]
