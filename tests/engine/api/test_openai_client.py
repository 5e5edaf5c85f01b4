"""The official `openai` client, unmodified, against the endpoint. Its types and exception classes are the oracle."""

from __future__ import annotations

import asyncio

import openai
import pytest

from .fakes import IM_END, Script

CHAT = [{"role": "user", "content": "hi"}]


def text_reply(text: str, end: int | None = None):
    ids = list(text.encode())
    return lambda msg, index: ids + ([end] if end is not None else [])


async def test_completion(endpoint):
    answer = await endpoint.openai().completions.create(model="tiny", prompt="hi", max_tokens=5, seed=1)
    assert answer.object == "text_completion"
    assert len(answer.choices[0].text) == 5
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == 3  # BOS and two bytes
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == 8


async def test_completion_default_max_tokens_is_openais_16(endpoint):
    answer = await endpoint.openai().completions.create(model="tiny", prompt="hi")
    assert answer.usage.completion_tokens == 16


async def test_chat_default_max_tokens_is_cut_to_the_context(make_endpoint):
    endpoint = await make_endpoint(max_model_len=64, default_max_tokens=1000)
    answer = await endpoint.openai().chat.completions.create(model="tiny", messages=CHAT)
    assert answer.usage.total_tokens == 64
    assert answer.choices[0].finish_reason == "length"


async def test_chat_stops_at_eos(make_endpoint):
    endpoint = await make_endpoint(Script(reply=text_reply("Hello.", IM_END)))
    answer = await endpoint.openai().chat.completions.create(model="tiny", messages=CHAT)
    assert answer.choices[0].message.content == "Hello."
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"


async def test_chat_prompt_is_the_template_and_has_no_second_bos(endpoint):
    await endpoint.openai().chat.completions.create(
        model="tiny",
        messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": [
            {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        max_tokens=1,
    )  # fmt: skip
    ids = endpoint.client.submitted[0].prompt_ids
    text = endpoint.tokenizer.decode(ids, skip_special_tokens=False)
    assert text == ("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n")


async def test_an_answer_can_be_sent_back_as_it_is(endpoint):
    client = endpoint.openai()
    answer = await client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=2)
    message = answer.choices[0].message
    again = [*CHAT, message, {"role": "user", "content": "go on"}]
    await client.chat.completions.create(model="tiny", messages=again, max_tokens=2)
    again[1] = message.model_dump()
    await client.chat.completions.create(model="tiny", messages=again, max_tokens=2)


async def test_stream_text_equals_the_whole_answer(endpoint):
    client = endpoint.openai()
    whole = await client.completions.create(model="tiny", prompt="hi", max_tokens=9, seed=5, n=3)
    stream = await client.completions.create(
        model="tiny", prompt="hi", max_tokens=9, seed=5, n=3, stream=True, stream_options={"include_usage": True}
    )
    texts, reasons, usage = ["", "", ""], {}, None
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
        usage = chunk.usage or usage
    assert texts == [choice.text for choice in whole.choices]
    assert len(set(texts)) == 3
    assert reasons == {0: "length", 1: "length", 2: "length"}
    assert usage == whole.usage
    assert usage.completion_tokens == 27


async def test_chat_stream(make_endpoint):
    endpoint = await make_endpoint(Script(reply=text_reply("Grüße 🫠!", IM_END)))
    stream = await endpoint.openai().chat.completions.create(model="tiny", messages=CHAT, stream=True)
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
    assert "".join(pieces) == "Grüße 🫠!"
    assert all("�" not in piece for piece in pieces)
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert {chunk.usage for chunk in chunks} == {None}
    assert len({chunk.id for chunk in chunks}) == 1


async def test_chat_stream_helper_accumulates(make_endpoint):
    endpoint = await make_endpoint(Script(reply=text_reply("Hello.", IM_END)))
    async with endpoint.openai().chat.completions.stream(model="tiny", messages=CHAT) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Hello."


async def test_completion_logprobs(make_endpoint):
    endpoint = await make_endpoint(Script(reply=text_reply("a€")))
    answer = await endpoint.openai().completions.create(model="tiny", prompt="hi", max_tokens=4, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
    assert logprobs.token_logprobs == [-0.5] * 4
    assert logprobs.top_logprobs[0] == {"a": -0.5, "b": -1.5}
    assert logprobs.text_offset == [0, 1, 1, 1]
    assert answer.choices[0].text == "a€"


async def test_chat_logprobs_carry_bytes_and_join_to_the_text(make_endpoint):
    endpoint = await make_endpoint(Script(reply=text_reply("a€")))
    client = endpoint.openai()
    arguments = {"model": "tiny", "messages": CHAT, "max_tokens": 4, "logprobs": True, "top_logprobs": 3}
    answer = await client.chat.completions.create(**arguments)
    content = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == answer.choices[0].message.content == "a€"
    assert [len(entry.top_logprobs) for entry in content] == [3] * 4
    assert content[0].top_logprobs[2].logprob == -9999.0  # -inf, which JSON does not have
    stream = await client.chat.completions.create(**arguments, stream=True)
    streamed = [entry async for chunk in stream for entry in (chunk.choices[0].logprobs or _Empty).content]
    assert streamed == content


class _Empty:
    content: tuple[()] = ()


async def test_logprobs_zero_gives_the_sampled_tokens_only(endpoint):
    answer = await endpoint.openai().completions.create(model="tiny", prompt="hi", max_tokens=2, logprobs=0)
    assert answer.choices[0].logprobs.top_logprobs == [{}, {}]
    assert len(answer.choices[0].logprobs.token_logprobs) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_covers_the_prompt(make_endpoint, stream):
    endpoint = await make_endpoint(Script(reply=text_reply("xy")))
    client = endpoint.openai()
    answer = await client.completions.create(
        model="tiny", prompt="hé", max_tokens=2, echo=True, logprobs=1, n=2, stream=stream
    )
    chunks = [chunk async for chunk in answer] if stream else [answer]
    for index in (0, 1):
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.text for choice in choices) == "héxy"
        assert [t for c in choices for t in c.logprobs.tokens] == [
            "<s>", "h", "bytes:\\xc3", "bytes:\\xa9", "x", "y",
        ]  # fmt: skip
        assert [p for c in choices for p in c.logprobs.token_logprobs] == [None] + [-0.5] * 5
        assert [o for c in choices for o in c.logprobs.text_offset] == [0, 0, 1, 1, 2, 3]


async def test_echo_without_generation(endpoint):
    answer = await endpoint.openai().completions.create(model="tiny", prompt="hi", max_tokens=0, echo=True, logprobs=1)
    assert answer.choices[0].text == "hi"
    assert answer.usage.completion_tokens == 0
    assert answer.choices[0].logprobs.tokens == ["<s>", "h", "i"]


async def test_echo_of_token_ids_is_their_text(endpoint):
    answer = await endpoint.openai().completions.create(model="tiny", prompt=[104, 105], max_tokens=1, echo=True)
    assert answer.choices[0].text.startswith("hi")
    assert answer.usage.prompt_tokens == 2


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (["a", "bc"], [[256, 97], [256, 98, 99]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
async def test_every_prompt_form_and_the_order_of_choices(endpoint, prompt, expected):
    answer = await endpoint.openai().completions.create(model="tiny", prompt=prompt, max_tokens=3, n=2, seed=3)
    assert [msg.prompt_ids for msg in endpoint.client.submitted] == expected
    assert [choice.index for choice in answer.choices] == list(range(2 * len(expected)))
    assert answer.usage.prompt_tokens == sum(map(len, expected))  # once, not n times
    assert answer.usage.completion_tokens == 3 * 2 * len(expected)


async def test_stop_string_over_several_tokens(make_endpoint):
    endpoint = await make_endpoint(Script(reply=text_reply("one two three four"), token_delay=0.005))
    client = endpoint.openai()
    answer = await client.completions.create(model="tiny", prompt="x", max_tokens=18, stop=["two", "zzz"])
    assert answer.choices[0].text == "one "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 7
    assert endpoint.client.handles[0].aborts[:1] == [0]  # the engine was told at once
    assert not endpoint.client.running
    stream = await client.completions.create(model="tiny", prompt="x", max_tokens=18, stop="two", stream=True)
    pieces = [chunk.choices[0].text async for chunk in stream]
    assert "".join(pieces) == "one "
    assert not any("t" in piece for piece in pieces)


async def test_seed_is_told_and_replays(endpoint):
    client = endpoint.openai()
    raw = await client.completions.with_raw_response.create(model="tiny", prompt="hi", max_tokens=8)
    seed = int(raw.headers["X-Appliance-Seed"])
    first = raw.parse()
    assert first.seed == seed < 2**53
    again = await client.completions.create(model="tiny", prompt="hi", max_tokens=8, seed=seed)
    assert again.choices[0].text == first.choices[0].text
    assert again.system_fingerprint == first.system_fingerprint


async def test_models(endpoint):
    client = endpoint.openai()
    assert [model.id async for model in await client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("gpt-5")
    assert caught.value.code == "model_not_found"


async def test_errors_map_to_the_clients_classes(make_endpoint, tmp_path):
    endpoint = await make_endpoint(Script(max_queue=1, never_answer=True))
    client = endpoint.openai()
    with pytest.raises(openai.NotFoundError) as caught:
        await client.completions.create(model="nope", prompt="x")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="tiny", prompt="x", temperature=3)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.APIStatusError) as caught:
        await client.completions.create(model="tiny", prompt="x", max_tokens=600)
    assert caught.value.status_code == 413
    assert caught.value.code == "context_length_exceeded"
    hanging = asyncio.create_task(client.completions.create(model="tiny", prompt="x"))
    while not endpoint.client.running:
        await asyncio.sleep(0.01)
    with pytest.raises(openai.RateLimitError) as caught:
        await client.completions.create(model="tiny", prompt="x")
    assert caught.value.response.headers["Retry-After"] == "3"
    endpoint.client.die()
    with pytest.raises(openai.InternalServerError) as caught:
        await hanging
    assert caught.value.code == "engine_dead"


async def test_wrong_key_is_an_authentication_error(make_endpoint, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b alice\n")  # sha256("secret")
    endpoint = await make_endpoint(key_file=keys)
    with pytest.raises(openai.AuthenticationError):
        await endpoint.openai("wrong").models.list()
    assert (await endpoint.openai("secret").models.list()).data[0].id == "tiny"


async def test_error_in_mid_stream_raises(make_endpoint):
    endpoint = await make_endpoint(Script(fail_after=3))
    stream = await endpoint.openai().completions.create(model="tiny", prompt="x", max_tokens=9, stream=True)
    seen = []
    with pytest.raises(openai.APIError, match="NaN logits"):
        async for chunk in stream:
            seen.append(chunk.choices[0].text)
    assert len("".join(seen)) == 2


async def test_sync_client(endpoint):
    def work():
        client = openai.OpenAI(base_url=endpoint.url + "/v1", api_key="none", max_retries=0)
        whole = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=4, seed=2)
        stream = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=4, seed=2, stream=True)
        return whole.choices[0].message.content, "".join(c.choices[0].delta.content or "" for c in stream)

    whole, streamed = await asyncio.to_thread(work)
    assert whole == streamed
    assert len(whole) == 4


async def test_extra_body_fields(endpoint):
    await endpoint.openai().completions.create(
        model="tiny",
        prompt="hi",
        max_tokens=4,
        logit_bias={"97": -100, "98": 1.5},
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        top_p=0.9,
        user="someone",
        extra_body={
            "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True,
            "stop_token_ids": [7], "skip_special_tokens": False, "cache_salt": "tenant",
        },
    )  # fmt: skip
    msg = endpoint.client.submitted[0]
    assert msg.cache_salt == "tenant"
    params = msg.params
    assert (params.top_k, params.min_p, params.repetition_penalty, params.min_tokens) == (5, 0.1, 1.1, 2)
    assert params.logit_bias == {97: -100.0, 98: 1.5}
    assert (params.presence_penalty, params.frequency_penalty, params.top_p) == (0.5, -0.5, 0.9)
    assert params.stop_token_ids == (7,)
    assert params.ignore_eos


async def test_request_id_goes_through(endpoint):
    request = endpoint.http.post(
        endpoint.url + "/v1/completions",
        json={"prompt": "x", "max_tokens": 1},
        headers={"X-Request-Id": "trace-1"},
    )
    async with request as response:
        assert response.headers["X-Request-Id"] == "trace-1"
        assert (await response.json())["id"] == "cmpl-trace-1"
    assert endpoint.client.submitted[0].request_id.startswith("trace-1.")
