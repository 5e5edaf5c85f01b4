"""The trusted headers of a gateway: who may send them, what they change, and which Resume is refused."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api.app import build_app
from engine.api.choice import Delta
from engine.api.errors import ApiError
from engine.api.relay import Progress, Replay, cache_salt, parse_resume
from engine.api.server import listening
from engine.log import JsonFormatter
from engine.types import TokenLogprob

from .conftest import FACTORIES, make_config
from .fakes import ByteTokenizer, FakeClient, Script

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY: dict[str, Any] = {"prompt": "x", "max_tokens": 4, "seed": 1, "stream": True}
PINNED = {"X-Appliance-Relay": "1", "X-Appliance-Seed": "1", "X-Appliance-Created": "5", "X-Request-Id": "r"}
NOTHING = "0" * 16


@contextlib.asynccontextmanager
async def on_unix_socket(path: Path, script: Script | None = None, **config: Any) -> AsyncIterator[Any]:
    """(client, session) of an endpoint on a Unix socket."""
    client = FakeClient(script)
    app = build_app(client, ByteTokenizer(), make_config(**config), **FACTORIES)
    connector = aiohttp.UnixConnector(path=str(path / "s"), force_close=True)
    async with (
        listening(app, unix_path=path / "s"),
        aiohttp.ClientSession("http://engine", connector=connector) as http,
    ):
        yield client, http


async def ask(http: aiohttp.ClientSession, path: str, body: Any, headers: Any) -> tuple[int, Any, str]:
    async with http.post(path, json=body, headers=headers) as response:
        return response.status, response.headers, (await response.read()).decode()


def error_of(text: str) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(text)["error"]
    return error


@pytest.mark.parametrize("header", ["Tenant: t", "Relay: 1", "Seed: 1", "Created: 1", "Resume: "])
@pytest.mark.parametrize("path", [COMPLETIONS, "/infer", "/tokenize"])
async def test_over_tcp_they_are_refused_and_not_ignored(endpoint, header, path):
    name, _, value = f"X-Appliance-{header}".partition(": ")
    status, answer = await endpoint.post(path, {"prompt": "x"}, headers={name: value})
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "relay_header", name)
    assert not endpoint.client.submitted


async def test_an_admin_key_over_tcp_does_not_make_them_trusted(make_endpoint, tmp_path):
    import hashlib

    keys = tmp_path / "keys"
    keys.write_text(hashlib.sha256(b"secret").hexdigest() + " ops\n")
    endpoint = await make_endpoint(admin_key_file=keys)
    headers = {"Authorization": "Bearer secret", "X-Appliance-Tenant": "t"}
    status, answer = await endpoint.post(COMPLETIONS, {"prompt": "x"}, headers=headers)
    assert (status, answer["error"]["code"]) == (400, "relay_header")


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"X-Appliance-Tenant": ""}, "X-Appliance-Tenant"),
        ({"X-Appliance-Tenant": "t" * 257}, "X-Appliance-Tenant"),
        ({"X-Appliance-Relay": "0"}, "X-Appliance-Relay"),
        ({"X-Appliance-Relay": "true"}, "X-Appliance-Relay"),
        ({"X-Appliance-Seed": str(2**64)}, "X-Appliance-Seed"),
        ({"X-Appliance-Seed": "-1"}, "X-Appliance-Seed"),
        ({"X-Appliance-Seed": "\u0661"}, "X-Appliance-Seed"),
        ({"X-Appliance-Seed": "2"}, "X-Appliance-Seed"),  # the body says 1
        ({"X-Appliance-Created": "1.5"}, "X-Appliance-Created"),
        ([("X-Appliance-Seed", "1"), ("X-Appliance-Seed", "1")], "X-Appliance-Seed"),
    ],
)
async def test_bad_values_are_named(tmp_path, headers, param):
    async with on_unix_socket(tmp_path) as (client, http):
        status, _, text = await ask(http, COMPLETIONS, BODY, headers)
    assert status == 400
    assert (error_of(text)["code"], error_of(text)["param"]) == ("relay_header", param)
    assert not client.submitted


@pytest.mark.parametrize("missing", ["X-Appliance-Relay", "X-Appliance-Seed", "X-Appliance-Created", "X-Request-Id"])
async def test_resume_needs_everything_that_pins_the_answer(tmp_path, missing):
    headers = {name: value for name, value in PINNED.items() if name != missing} | {"X-Appliance-Resume": ""}
    async with on_unix_socket(tmp_path) as (_, http):
        status, _, text = await ask(http, COMPLETIONS, BODY, headers)
    assert (status, error_of(text)["code"]) == (400, "bad_resume")


BAD = [
    "x", "0", "0:", "0:1", "0:1.0.0.0", f":1.0.0.0.{NOTHING}", f"-1:1.0.0.0.{NOTHING}", f"0:1.0.4.0.{NOTHING}",
    f"0:-1.0.0.0.{NOTHING}", f"0: 1.0.0.0.{NOTHING}", f"0:1.0.0.0.{NOTHING},", f"0:\u0661.0.0.0.{NOTHING}",
    f"0:0.0.0.0.{NOTHING},0:0.0.0.0.{NOTHING}",  # twice
    f"1:0.0.0.0.{NOTHING}",  # there is only choice 0, and no usage event
    f"0:1000000.0.0.0.{NOTHING}",  # four tokens cannot have that many characters
    f"0:0.1.0.0.{NOTHING}",  # no logprobs were asked for
    f"0:0.0.1.0.{NOTHING}",  # a role, on the route without roles
    f"0:0.0.0.99.{NOTHING}",  # more cached tokens than the prompt has
    f"0:{10**13}.0.0.0.{NOTHING}", ",".join(f"{i}:0.0.0.0.{NOTHING}" for i in range(200)),
]  # fmt: skip


@pytest.mark.parametrize("resume", BAD, ids=range(len(BAD)))
async def test_a_resume_that_cannot_be_is_refused_before_anything_is_computed(tmp_path, resume):
    async with on_unix_socket(tmp_path) as (client, http):
        status, headers, text = await ask(http, COMPLETIONS, BODY, PINNED | {"X-Appliance-Resume": resume})
    assert (status, error_of(text)["code"]) == (400, "bad_resume")
    assert headers["X-Appliance-Error"] == "bad_resume final"
    assert not client.submitted


@pytest.mark.parametrize(
    ("resume", "fine"),
    [
        (f"0:4.0.2.0.{{crc}},1:0.0.2.-.{NOTHING}", True),
        (f"1:0.0.2.-.{NOTHING}", False),  # usage before the end of the choice
        (f"0:4.0.2.0.{{crc}},1:0.0.0.-.{NOTHING}", False),
    ],
)
async def test_the_usage_event_has_a_state_of_its_own(tmp_path, resume, fine):
    body = BODY | {"stream_options": {"include_usage": True}}
    async with on_unix_socket(tmp_path) as (_, http):
        _, _, text = await ask(http, COMPLETIONS, body, PINNED)
        *_, (index, state) = re.findall("^id: ([0-9]+):(.*)$", text, re.M)
        assert (index, state) == ("1", f"0.0.2.-.{NOTHING}")
        crc = re.findall(r"^id: 0:.*\.([0-9a-f]{16})$", text, re.M)[-1]
        status, _, rest = await ask(http, COMPLETIONS, body, PINNED | {"X-Appliance-Resume": resume.format(crc=crc)})
    assert status == (200 if fine else 400)
    assert not fine or rest == "data: [DONE]\n\n"


async def test_the_largest_request_can_be_resumed(tmp_path):
    """As many choices as a request may have: the header still fits into what the server reads as a header."""
    body = BODY | {"prompt": ["x" * 100] * 8, "n": 16, "logprobs": 2, "echo": True, "max_tokens": 3}
    async with on_unix_socket(tmp_path) as (_, http):
        _, _, text = await ask(http, COMPLETIONS, body, PINNED)
        last = dict(re.findall("^id: ([0-9]+):(.*)$", text, re.M))
        assert len(last) == 128
        value = ",".join(f"{index}:{state}" for index, state in last.items())
        status, _, rest = await ask(http, COMPLETIONS, body, PINNED | {"X-Appliance-Resume": value})
    assert (status, rest) == (200, "data: [DONE]\n\n")
    worst = ",".join(f"127:99999999.999999.3.999999.{NOTHING}" for _ in range(128))
    assert len(worst) < 8190  # aiohttp's limit, for the longest contexts there are


async def test_resume_needs_a_stream(tmp_path):
    headers = PINNED | {"X-Appliance-Resume": ""}
    async with on_unix_socket(tmp_path) as (client, http):
        for path, body in ((COMPLETIONS, BODY | {"stream": False}), ("/infer", {"input": "x"})):
            status, _, text = await ask(http, path, body, headers)
            assert (status, error_of(text)["code"]) == (400, "bad_resume")
    assert not client.submitted


async def test_the_states_of_the_other_route_are_refused(tmp_path):
    async with on_unix_socket(tmp_path) as (_, http):
        _, _, text = await ask(http, COMPLETIONS, BODY, PINNED)
        state = re.findall("^id: (.*)$", text, re.M)[0]
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "stream": True}
        status, _, text = await ask(http, CHAT, body, PINNED | {"X-Appliance-Resume": state})
    assert (status, error_of(text)["code"]) == (400, "bad_resume")


async def test_tenants_share_no_prefixes_and_are_in_the_log(tmp_path, caplog):
    caplog.set_level(logging.INFO, "engine.api.access")
    body = BODY | {"stream": False}
    async with on_unix_socket(tmp_path) as (client, http):
        for tenant, salt in ((None, None), (None, "s"), ("a", None), ("a", "s"), ("as", None), ("1:a", None)):
            headers = {"X-Appliance-Tenant": tenant} if tenant is not None else {}
            assert (await ask(http, COMPLETIONS, body | {"cache_salt": salt}, headers))[0] == 200
        assert (await ask(http, "/infer", {"input": "x"}, {"X-Appliance-Tenant": "b\u00e9"}))[0] == 200
        forged = [client.submitted[i].cache_salt for i in (2, 3, 4)]
        for salt in forged:
            assert (await ask(http, COMPLETIONS, body | {"cache_salt": salt}, {}))[0] == 200
    salts = [message.cache_salt for message in client.submitted]
    assert salts[:2] == ["", "s"]  # without a tenant as ever
    assert len(set(salts)) == len(salts) == 10
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    assert [line.get("key") for line in lines] == [None, None, "a", "a", "as", "1:a", "b\u00e9", None, None, None]


@given(st.lists(st.tuples(st.none() | st.text(min_size=1, max_size=4), st.text(max_size=5)), min_size=2, max_size=6))
def test_no_two_tenants_and_salts_give_the_same_salt(pairs):
    salts = {pair: cache_salt(*pair) for pair in pairs}
    assert len(set(salts.values())) == len(salts)


async def test_errors_say_whether_another_engine_may_do_better(tmp_path):
    script = Script(fail_after=2, token_delay=0.002)
    async with on_unix_socket(tmp_path, script) as (client, http):
        status, _, text = await ask(http, COMPLETIONS, BODY, PINNED)
        assert status == 200
        assert text.split("\n\n")[-2].startswith(": error engine_error retry\ndata: {")
        _, _, text = await ask(http, COMPLETIONS, BODY, {})
        assert ": error" not in text
        script.max_queue = 0
        status, headers, _ = await ask(http, COMPLETIONS, BODY | {"prompt": ["x"]}, PINNED)
        assert (status, headers["X-Appliance-Error"]) == (413, "queue_exceeded final")
        client.state = "dead"
        status, headers, _ = await ask(http, COMPLETIONS, BODY, PINNED)
        assert (status, headers["X-Appliance-Error"]) == (503, "engine_dead retry")
        status, headers, _ = await ask(http, COMPLETIONS, BODY, {})
        assert "X-Appliance-Error" not in headers


async def test_a_resumed_stream_pings_while_it_catches_up(tmp_path):
    """Nothing is sent for long, as the client has all of it already: whoever waits must not think we are dead."""
    script = Script(token_delay=0.02)
    async with on_unix_socket(tmp_path, script, timeouts={"sse_ping": 0.05}) as (_, http):
        body = BODY | {"max_tokens": 12}
        _, _, text = await ask(http, COMPLETIONS, body, PINNED)
        state = re.findall("^id: (.*)$", text, re.M)[-2]
        _, _, rest = await ask(http, COMPLETIONS, body, PINNED | {"X-Appliance-Resume": state})
    assert rest.count(": ping") >= 2
    assert rest.count("data: {") == 1


# ---- the arithmetic of positions ------------------------------------------------------------------------------------

ENTRIES = st.builds(
    lambda token, value: (TokenLogprob(token, value), 0), st.integers(0, 9), st.floats(allow_infinity=True)
)
DELTAS = st.lists(
    st.builds(Delta, st.text(alphabet="a\u00e9\U0001fae0", max_size=5), st.lists(ENTRIES, max_size=4)), max_size=8
)


def merged(deltas):
    return "".join(d.text for d in deltas), [entry for d in deltas for entry in d.logprobs]


@given(DELTAS, st.data())
@settings(max_examples=200, deadline=None)
def test_what_was_sent_is_left_out_however_it_is_cut(deltas, data):
    """The same output in other pieces, after a cut anywhere: sent + resumed = all of it; one id round trip between."""
    text, logprobs = merged(deltas)
    cut = data.draw(st.integers(0, len(deltas)))
    sent = Progress(cached=data.draw(st.none() | st.integers(0, 99)))
    for delta in deltas[:cut]:
        sent.advance(delta.text, delta.logprobs)
    line = sent.id_line(3).decode()
    assert re.fullmatch(r"id: [0-9]{1,6}:[0-9a-f.-]{1,80}\n", line)  # the format that the gateway was promised
    again = parse_resume(line[4:-1])[3]
    assert again == sent
    replay = Replay(3, again)
    texts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)) + [0, len(text)])
    places = sorted(
        data.draw(st.lists(st.integers(0, len(logprobs)), min_size=len(texts) - 2, max_size=len(texts) - 2))
    )
    places = [0, *places, len(logprobs)]
    rest = []
    for i in range(len(texts) - 1):
        delta = Delta(text[texts[i] : texts[i + 1]], logprobs[places[i] : places[i + 1]])
        replay.cut(delta)
        rest.append(delta)
    sent_text, sent_logprobs = merged(deltas[:cut])
    rest_text, rest_logprobs = merged(rest)
    assert sent_text + rest_text == text
    assert list(map(repr, sent_logprobs + rest_logprobs)) == list(map(repr, logprobs))  # NaN is not equal to itself


@given(DELTAS.filter(lambda deltas: any(d.text for d in deltas)), st.data())
@settings(max_examples=100, deadline=None)
def test_one_other_character_is_noticed(deltas, data):
    text, logprobs = merged(deltas)
    sent = Progress()
    sent.advance(text, logprobs)
    place = data.draw(st.integers(0, len(text) - 1))
    other = text[:place] + "b" + text[place + 1 :]
    with pytest.raises(ApiError) as caught:
        Replay(0, sent).cut(Delta(other, logprobs, "stop"))
    assert (caught.value.status, caught.value.code) == (409, "resume_diverged")


def test_one_other_bit_of_a_logprob_is_noticed():
    import math

    sent = Progress()
    sent.advance("ab", [(TokenLogprob(1, -0.5), 0)])
    with pytest.raises(ApiError, match="logprobs differ"):
        Replay(0, sent).cut(Delta("ab", [(TokenLogprob(1, math.nextafter(-0.5, 0)), 0)]))


@pytest.mark.parametrize("delta", [Delta("abc"), Delta("ab", [(TokenLogprob(1, -0.5), 0)]), Delta("a", [], "stop")])
def test_a_finished_choice_must_be_finished_here_too(delta):
    sent = Progress(finished=True)
    sent.advance("ab", [])
    with pytest.raises(ApiError):
        Replay(0, sent).cut(delta)
