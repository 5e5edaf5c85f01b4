"""Every wrong input: 400 (or 413, 415) in OpenAI's error shape, naming the field; nothing of it reaches the engine."""

from __future__ import annotations

import json

import msgspec
import pytest

from engine.api import schema
from engine.api.body import check_nesting, parse
from engine.api.config import Limits
from engine.api.errors import ApiError

from .fakes import VOCAB, Script

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


async def refused(endpoint, path, body, status=400):
    got, answer = await endpoint.post(path, body)
    assert got == status, answer
    error = answer["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert endpoint.client.submitted == []
    return error


def chat(**fields):
    return {"messages": [{"role": "user", "content": "hi"}]} | fields


def completion(**fields):
    return {"prompt": "hi"} | fields


# (field, refused values, accepted values): peers' edges (vLLM, SGLang, OpenAI), see docs of sampling.py
EDGES = [
    ("temperature", [-0.001, 2.001, 1e300, "1", True], [0, 1e-9, 2, 2.0, None]),
    ("top_p", [0, -0.1, 1.0001, "1", False], [1e-9, 1, 1.0, None]),
    ("top_k", [-2, 2**31, 1.0, True, "5"], [-1, 0, 1, 2**31 - 1, None]),
    ("min_p", [-0.1, 1.1, [0.1]], [0, 1, None]),
    ("presence_penalty", [-2.01, 2.01], [-2, 2, None]),
    ("frequency_penalty", [-2.01, 2.01], [-2, 2, None]),
    ("repetition_penalty", [0, -1, 0.009, 10.1], [0.01, 10, None]),
    ("max_tokens", [0, -1, 1.0, 1.5, "5", True, {}], [1, None]),
    ("min_tokens", [-1, 513, 1.0], [0, 1, None]),
    ("n", [0, -1, 17, 1.0, True], [1, 16, None]),
    ("seed", [-2, 2**64, 1.0, True, "1"], [-1, 0, 2**64 - 1, None]),
    ("stop", ["", [""], ["a", ""], ["x"] * 17, "y" * 257, [1], 1], ["a", ["a", "b"], ["x"] * 16, "y" * 256, [], None]),
    ("stop_token_ids", [[-1], [VOCAB], [2**31], [1.0], [True], [1] * 65, 1], [[0], [VOCAB - 1], [], [1] * 64, None]),
    (
        "logit_bias",
        [{"-1": 1}, {str(VOCAB): 1}, {"x": 1}, {"1.0": 1}, {"1": 101}, {"1": -101}, {"1": True}, {"1": None}, [1]],
        [{"0": 100}, {str(VOCAB - 1): -100}, {}, None],
    ),
    ("timeout", [0, -1, 3601, "1"], [0.5, 3600, None]),
    ("cache_salt", ["", "x" * 257, 1], ["x", "x" * 256, None]),
    ("ignore_eos", [1, 0, "true"], [True, False, None]),
    ("include_stop_str_in_output", [1], [True, None]),
    ("skip_special_tokens", ["no"], [False, None]),
    ("stream", [1, "true"], [False, None]),
    ("user", [1], ["u", None]),
    ("service_tier", ["flex", "priority"], ["auto", "default", None]),
]


@pytest.mark.parametrize(("field", "bad", "good"), EDGES, ids=[edge[0] for edge in EDGES])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_edges_of_every_field(endpoint, path, field, bad, good):
    make = chat if path == CHAT else completion
    for value in bad:
        error = await refused(endpoint, path, make(**{field: value}))
        assert error["param"].startswith(field), (value, error)
    for value in good:
        fields = {"max_tokens": 4} | {field: value}
        status, answer = await endpoint.post(path, make(**fields))
        assert status == 200, (value, answer)


@pytest.mark.parametrize("value", [-1, 21, 1.0, True, "2"])
async def test_completion_logprobs_edges(endpoint, value):
    error = await refused(endpoint, COMPLETIONS, completion(logprobs=value))
    assert error["param"] == "logprobs"


async def test_completion_logprobs_at_the_limit(endpoint):
    status, _ = await endpoint.post(COMPLETIONS, completion(logprobs=20))
    assert status == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"nope": 1}}, "stream_options.nope"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"raise_exception": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"": 1}}, "chat_template_kwargs"),
    ],
)
async def test_chat_combinations(endpoint, fields, param):
    error = await refused(endpoint, CHAT, chat(**fields))
    assert error["param"] == param


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{}], "messages[0]"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "text"}]}],
         "messages[1].content[0].text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
         "messages[0].content[0].type"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "user", "content": "x", "colour": 1}], "messages[0].colour"),
        ([{"role": "assistant", "content": "x"}], "messages"),  # the template rejects it
    ],
)  # fmt: skip
async def test_messages(endpoint, messages, param):
    error = await refused(endpoint, CHAT, {"messages": messages})
    assert error["param"].startswith(param)


UNSUPPORTED_COMPLETION = {
    "suffix": "x", "best_of": 2, "use_beam_search": True, "length_penalty": 1.0, "bad_words": ["x"],
    "allowed_token_ids": [1], "prompt_logprobs": 1, "guided_json": {}, "guided_regex": "x", "guided_choice": ["a"],
    "guided_grammar": "x", "structured_outputs": {}, "metadata": {"a": "b"},
}  # fmt: skip
UNSUPPORTED_CHAT = {
    "tools": [{"type": "function"}], "tool_choice": "auto", "functions": [{}], "function_call": "auto",
    "parallel_tool_calls": True, "response_format": {"type": "json_object"}, "modalities": ["audio"],
    "audio": {"voice": "x"}, "prediction": {}, "reasoning_effort": "low", "verbosity": "low", "store": True,
    "web_search_options": {}, "metadata": {"a": "b"}, "chat_template": "{{ x }}", "moderation": {},
    "stream_options": {"continuous_usage_stats": True},
}  # fmt: skip


@pytest.mark.parametrize("field", UNSUPPORTED_COMPLETION)
async def test_unsupported_completion_fields_are_refused_by_name(endpoint, field):
    error = await refused(endpoint, COMPLETIONS, completion(**{field: UNSUPPORTED_COMPLETION[field]}))
    assert error["param"].startswith(field)
    assert field in error["message"]
    status, _ = await endpoint.post(COMPLETIONS, completion(**{field: None}))
    assert status == 200


@pytest.mark.parametrize("field", UNSUPPORTED_CHAT)
async def test_unsupported_chat_fields_are_refused_by_name(endpoint, field):
    error = await refused(endpoint, CHAT, chat(**{field: UNSUPPORTED_CHAT[field]}))
    assert error["param"].startswith(field)
    assert "not supported" in error["message"] or field == "stream_options"
    status, _ = await endpoint.post(CHAT, chat(**{field: None}))
    assert status == 200


@pytest.mark.parametrize("kind", [schema.CompletionRequest, schema.ChatRequest, schema.InferRequest])
def test_a_supported_field_of_the_wrong_type_is_not_called_unsupported(kind):
    supported = set()
    for field in msgspec.inspect.type_info(kind).fields:
        choices = getattr(field.type, "types", [field.type])
        plain = (msgspec.inspect.BoolType, msgspec.inspect.IntType, msgspec.inspect.FloatType, msgspec.inspect.StrType)
        if any(isinstance(choice, plain) for choice in choices):
            supported.add(field.name)
    assert kind is schema.InferRequest or "stream" in supported
    for name in sorted(supported):
        for value in ({"a": 1}, "true", 1):
            body = {field.name: "x" for field in msgspec.inspect.type_info(kind).fields if field.required}
            if "messages" in body:
                body["messages"] = [{"role": "user", "content": "x"}]
            try:
                parse(json.dumps(body | {name: value}).encode(), kind, Limits())
            except ApiError as error:
                assert (error.code, error.param) == ("invalid_type", name)
                assert error.message.startswith(f"`{name}`: expected ")
            else:
                assert value != {"a": 1}


async def test_the_reason_belongs_to_the_place(endpoint):
    error = await refused(endpoint, COMPLETIONS, completion(best_of="2"))
    assert error["message"] == "`best_of`: expected `int | null`, got `str`"
    for path, body in ((CHAT, chat(stream=1)), (COMPLETIONS, completion(stream="true"))):
        error = await refused(endpoint, path, body)
        assert error["message"].startswith("`stream`: expected `bool | null`")
    error = await refused(endpoint, CHAT, {"messages": [{"role": "user", "content": "x", "stream": True}]})
    assert (error["code"], error["param"]) == ("unknown_field", "messages[0].stream")
    error = await refused(endpoint, CHAT, chat(best_of=2))
    assert error["code"] == "unsupported_field"


@pytest.mark.parametrize("fields", [
    {"response_format": {"type": "text"}}, {"modalities": ["text"]}, {"tool_choice": "none"}, {"store": False},
    {"max_tokens": 3, "max_completion_tokens": 3}, {"add_generation_prompt": False},
    {"chat_template_kwargs": {"enable_thinking": False}}, {"safety_identifier": "x", "prompt_cache_key": "y"},
    {"stream": True, "stream_options": {"include_obfuscation": False}},
])  # fmt: skip
async def test_trivial_forms_are_accepted(endpoint, fields):
    async with endpoint.http.post(endpoint.url + CHAT, json=chat(max_tokens=2) | fields if "max_tokens" not in fields
                                  else chat(**fields)) as response:  # fmt: skip
        assert response.status == 200
        await response.read()
    if "chat_template_kwargs" in fields:
        assert endpoint.tokenizer.template_kwargs == {"enable_thinking": False}


async def test_unknown_fields_get_a_hint(endpoint):
    error = await refused(endpoint, COMPLETIONS, completion(max_token=3))
    assert error["param"] == "max_token"
    assert "`max_tokens`" in error["message"]
    assert error["code"] == "unknown_field"


@pytest.mark.parametrize(
    "prompt",
    [
        [-1], [VOCAB], [2**31], [2**63], [10**30], [1.5], [1.0], [True], [None], [[-1]], [[1], [VOCAB]], [[True]], [[]],
        [], [1, "a"], [[1], "a"], [1, [1]], ["a", [1]], [[["a"]]], {}, None, 5, True,
    ],
)  # fmt: skip
async def test_prompts_that_are_no_prompts(endpoint, prompt):
    error = await refused(endpoint, COMPLETIONS, {"prompt": prompt})
    assert error["param"].startswith("prompt")


async def test_the_largest_id_is_a_row_of_the_embedding_not_of_the_tokenizer(endpoint):
    assert endpoint.tokenizer.vocab_size < VOCAB
    status, _ = await endpoint.post(COMPLETIONS, {"prompt": [0, VOCAB - 1]})
    assert status == 200


@pytest.mark.parametrize(("path", "body", "param"), [
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", ""]}, "prompt[1]"),
    ("/generate", {"prompt": ""}, "prompt"),
    ("/infer", {"input": ""}, "input"),
])  # fmt: skip
async def test_empty_prompt_without_bos(make_endpoint, path, body, param):
    endpoint = await make_endpoint(bos=False)
    error = await refused(endpoint, path, body)
    assert error["param"] == param


async def test_empty_prompt_with_bos_is_bos(endpoint):
    status, _ = await endpoint.post(COMPLETIONS, {"prompt": ""})
    assert status == 200
    assert endpoint.client.submitted[0].prompt_ids == [256]


BAD_JSON = [
    (b"", "empty"),
    (b"   \n", "empty"),
    (b"{", "byte 1"),
    (b'{"prompt": "x"', "byte 14"),
    (b'{"prompt": "x"}}', "byte 15"),
    (b'{"prompt": nope}', "byte 11"),
    (b'{"prompt": "x", "temperature": NaN}', "byte 31"),
    (b'{"prompt": "x", "temperature": Infinity}', "byte 31"),
    (b"{'prompt': 'x'}", "byte 1"),
    (b'{"prompt": "a\nb"}', "byte 13"),
    (b"\xef\xbb\xbf{}", "byte 0"),
    (b'{"prompt": "\\ud800"}', "surrogate escape at byte 12"),
    (b'{"prompt": "\\udc00"}', "surrogate escape at byte 12"),
    (b'{"prompt": "a\\ud83d\\ud83d"}', "surrogate escape at byte 13"),
    (b'{"prompt": "\\\\\\ud800 x"}', "surrogate escape at byte 14"),
    (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "surrogate"),
    ('{"prompt": "é"}'.encode("latin-1"), "byte 12"),
    (b'{"prompt": "\xed\xa0\x80"}', "byte 12"),
    (b'{"prompt": "\xf0\x9f\xab"}', "byte 12"),
    (b'{"prompt": "\xc0\xaf"}', "byte 12"),
    ('{"prompt": "x"}'.encode("utf-16"), "byte 0"),
    (b"[]", "object"),
    (b'"prompt"', "object"),
    (b"null", "object"),
    (b"1" * 5000, "object"),
]


@pytest.mark.parametrize(("body", "where"), BAD_JSON)
async def test_invalid_json_names_the_position(endpoint, body, where):
    error = await refused(endpoint, CHAT if b"messages" in body else COMPLETIONS, body)
    assert where in error["message"]


async def test_invalid_utf8_points_at_the_detector(endpoint):
    error = await refused(endpoint, COMPLETIONS, b'{"prompt": "d\xe9j\xe0"}')
    assert error["code"] == "invalid_utf8"
    assert "0xe9 at byte 13" in error["message"]
    assert "/encoding/detect" in error["message"]


async def test_surrogate_pairs_are_text(endpoint):
    status, answer = await endpoint.post("/tokenize", b'{"prompt": "\\ud83e\\udee0"}')
    assert (status, answer["tokens"]) == (200, [256, *"🫠".encode()])


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "multipart/form-data; boundary=x"},
        {"Content-Type": "application/json; charset=latin-1"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
        {"Content-Type": "application/json", "Content-Encoding": "br"},
    ],
)
async def test_wrong_content_type_or_encoding(endpoint, headers):
    status, answer = await endpoint.post(COMPLETIONS, b'{"prompt": "x"}', headers=headers)
    assert status == 415
    assert answer["error"]["type"] == "invalid_request_error"


async def test_charset_utf8_is_fine(endpoint):
    headers = {"Content-Type": "application/json; charset=UTF-8"}
    status, _ = await endpoint.post(COMPLETIONS, b'{"prompt": "x"}', headers=headers)
    assert status == 200


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "é", 'a"b', "a;b"])
async def test_bad_request_ids(endpoint, name):
    status, answer = await endpoint.post(COMPLETIONS, {"prompt": "x"}, headers={"X-Request-Id": name})
    assert (status, answer["error"]["param"]) == (400, "X-Request-Id")


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/v1/completions", 405), ("PUT", "/infer", 405), ("DELETE", "/v1/models/tiny", 405),
    ("OPTIONS", "/v1/chat/completions", 405), ("POST", "/livez", 405), ("GET", "/nope", 404), ("POST", "/", 404),
    ("GET", "/v1/models/..%2f", 404), ("BREW", "/coffee", 400), ("GET", "/%ff%00", 404),
])  # fmt: skip
async def test_unknown_routes_and_methods_have_the_error_shape(endpoint, method, path, status):
    async with endpoint.http.request(method, endpoint.url + path) as response:
        assert response.status == status
        assert (await response.json())["error"]["type"] in ("not_found_error", "invalid_request_error")
        if status == 405:
            assert response.headers["Allow"]


def test_depth_counts_brackets_outside_strings_only():
    check_nesting(b"[" * 32 + b"]" * 32, 32, 1000)
    with pytest.raises(ApiError, match="deeper than 32"):
        check_nesting(b"[" * 33, 32, 1000)
    check_nesting(json.dumps(["[" * 1000, '\\"[{' * 100, *[[] for _ in range(100)]]).encode(), 32, 1000)
    with pytest.raises(ApiError, match="deeper than 2"):
        check_nesting(b'["]", ["a\\"", {"x": 1}]]', 2, 1000)


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_deep_nesting_never_reaches_the_parser(opening):
    with pytest.raises(ApiError) as caught:
        parse(b'{"prompt": ' + opening * 1_000_000, schema.CompletionRequest, Limits())
    assert (caught.value.status, caught.value.code) == (400, "too_deep")


def test_every_null_only_field_has_a_reason():
    """A field that accepts nothing but null must say why (and the table must not rot)."""
    for kind in (schema.CompletionRequest, schema.ChatRequest, schema.Message, schema.StreamOptions):
        for field in msgspec.structs.fields(kind):
            if field.type is type(None):
                assert field.name in schema.UNSUPPORTED, field.name


async def test_stop_that_is_a_special_token_becomes_a_stop_id(make_endpoint):
    reply = [*b"Hello", 259, *b"never"]
    endpoint = await make_endpoint(Script(reply=lambda msg, index: reply), eos_token_ids=())
    body = completion(stop=["<|im_end|>"], max_tokens=20)
    status, answer = await endpoint.post(COMPLETIONS, body)
    assert status == 200
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Hello", "stop", "<|im_end|>")
    assert endpoint.client.submitted[0].params.stop_token_ids == (259,)
    _, answer = await endpoint.post(COMPLETIONS, body | {"include_stop_str_in_output": True})
    assert answer["choices"][0]["text"] == "Hello<|im_end|>"


async def test_stop_token_id_is_reported(make_endpoint):
    endpoint = await make_endpoint(Script(reply=lambda msg, index: list(b"abcdef")))
    _, answer = await endpoint.post(COMPLETIONS, completion(stop_token_ids=[ord("d")]))
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "stop", ord("d"))


def test_masses_of_containers_are_refused_before_they_are_built():
    """1.39 million empty lists in 4 MB held the interpreter for a second (and every stream with it)."""
    for body in (b'{"prompt":[' + b"[]," * 1_000_000 + b"[]]}", b'{"messages":[' + b"{}," * 60_000 + b"{}]}"):
        with pytest.raises(ApiError) as caught:
            parse(body, schema.CompletionRequest, Limits())
        assert (caught.value.status, caught.value.code) == (400, "too_complex")
    ok = parse(json.dumps({"prompt": "[{" * 100_000}).encode(), schema.CompletionRequest, Limits())
    assert ok.prompt == "[{" * 100_000  # brackets of a text are text


@pytest.mark.parametrize(
    "body",
    [
        {"x" * 3_000_000: 1},
        {"messages": [{"role": "x" * 3_000_000, "content": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": "y" * 3_000_000}]}]},
        {"messages": [{"role": "user", "content": "a", "z" * 3_000_000: 1}]},
        {"a - at `$.b" * 100_000: 1},
        {"chat_template_kwargs": {"k" * 3_000_000: 1}, "messages": [{"role": "user", "content": "a"}]},
        {"logit_bias": {"9" * 3_000_000: 1}, "messages": [{"role": "user", "content": "a"}]},
        {"messages": [{"role": "user", "content": "a"}], "model": "m" * 3_000_000},
        {"messages": [{"role": "user", "content": "a"}], "stop": ["s" * 3_000_000]},
    ],
)
async def test_an_error_never_echoes_megabytes(endpoint, body):
    status, answer = await endpoint.post("/v1/chat/completions", body)
    assert status in (400, 404, 413)
    assert len(json.dumps(answer)) < 2000


async def test_template_arguments_are_bounded(endpoint):
    for kwargs in ({f"k{i}": 1 for i in range(65)}, {"a": "x" * 20_000}, {"a": [1] * 9000}):
        body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": kwargs}
        status, answer = await endpoint.post("/v1/chat/completions", body)
        assert (status, answer["error"]["param"]) == (400, "chat_template_kwargs")
