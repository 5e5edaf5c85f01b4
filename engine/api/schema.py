"""The requests we accept, field by field. Strict: no coercion, unknown fields are refused by name.

A field typed `None` is one of OpenAI's (or vLLM's) that we know and do not support: null is accepted, since clients
send it, anything else is refused with the reason in UNSUPPORTED. Ranges are checked in sampling.py.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from engine.messages import FlipArgs, GoldenArgs, NoArgs

_TOOLS = "tool calling is not implemented; put the tools into the prompt yourself"
_STRUCTURED = 'structured output is not implemented; only response_format {"type": "text"}'
_TEXT_ONLY = "the model reads and writes text only"

UNSUPPORTED: dict[str, str] = {
    "suffix": "infilling is not implemented",
    "best_of": "only best_of equal to n; ask for n choices with logprobs and choose yourself",
    "tools": _TOOLS,
    "tool_choice": _TOOLS,
    "functions": _TOOLS,
    "function_call": _TOOLS,
    "tool_calls": _TOOLS,
    "tool_call_id": _TOOLS,
    "parallel_tool_calls": _TOOLS,
    "response_format": _STRUCTURED,
    "guided_json": _STRUCTURED,
    "guided_regex": _STRUCTURED,
    "guided_choice": _STRUCTURED,
    "guided_grammar": _STRUCTURED,
    "structured_outputs": _STRUCTURED,
    "refusal": "refusals are not part of the template; put the text into `content`",
    "audio": _TEXT_ONLY,
    "modalities": _TEXT_ONLY,
    "image_url": _TEXT_ONLY,
    "input_audio": _TEXT_ONLY,
    "file": _TEXT_ONLY,
    "prediction": "predicted outputs are not implemented",
    "reasoning_effort": "set it through chat_template_kwargs if the model's template has such a switch",
    "verbosity": "the model has no such control",
    "web_search_options": "the appliance does not reach the web",
    "service_tier": 'there is one tier; leave it out or say "auto" or "default"',
    "store": "nothing is stored; leave it out or say false",
    "moderation": "there is no moderation service",
    "metadata": "nothing is stored",
    "chat_template": "the model's own template is used",
    "use_beam_search": "beam search is not implemented",
    "length_penalty": "beam search is not implemented",
    "bad_words": "use logit_bias with -100",
    "allowed_token_ids": "use logit_bias",
    "prompt_logprobs": "use echo with logprobs on /v1/completions",
    "continuous_usage_stats": "use include_usage",
    "include_obfuscation": "streams are not padded; leave it out or say false",
    "stream": "this route answers in one piece; stream with /v1/completions or /v1/chat/completions",
}


class Request(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of every request body."""


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: None = None


class SamplingFields(Request, kw_only=True):
    """What every generating route understands. None = not given."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = None
    timeout: float | None = None  # seconds, then the request ends with 504


class OpenAIFields(SamplingFields, kw_only=True):
    """Shared by /v1/completions and /v1/chat/completions."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    user: str | None = None  # accepted, has no effect
    safety_identifier: str | None = None  # accepted, has no effect
    prompt_cache_key: str | None = None  # a routing hint; with one engine there is nothing to route
    service_tier: Literal["auto", "default"] | None = None
    metadata: None = None
    use_beam_search: Literal[False] | None = None
    length_penalty: None = None
    bad_words: None = None
    allowed_token_ids: None = None
    prompt_logprobs: None = None
    guided_json: None = None
    guided_regex: None = None
    guided_choice: None = None
    guided_grammar: None = None
    structured_outputs: None = None


class CompletionRequest(OpenAIFields, kw_only=True):
    """POST /v1/completions. `prompt`: text, token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: None = None


class ContentPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One message. The null fields are what the official client writes when its own answers are sent back."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]
    name: str | None = None
    refusal: None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None
    tool_call_id: None = None


class TextFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text"]


class ChatRequest(OpenAIFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: TextFormat | None = None
    tool_choice: Literal["none"] | None = None
    modalities: list[Literal["text"]] | None = None
    store: Literal[False] | None = None
    tools: None = None
    functions: None = None
    function_call: None = None
    parallel_tool_calls: None = None
    audio: None = None
    prediction: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None
    moderation: None = None
    chat_template: None = None


class InferRequest(SamplingFields, kw_only=True):
    """POST /infer: one question through the chat template, greedy unless temperature says otherwise."""

    input: str
    system: str | None = None


class GenerateRequest(SamplingFields, kw_only=True):
    """POST /generate: raw continuation of a prompt."""

    prompt: str


class TokenizeRequest(Request, kw_only=True):
    """POST /tokenize: either `prompt` or `messages` (then the chat template is applied)."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None  # default: true for a prompt, false for messages
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Request, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool | None = None  # default false


class DrainRequest(Request, kw_only=True):
    """POST /admin/drain and /admin/undrain."""

    reason: str | None = None


class GoldenRequest(Request, kw_only=True):
    """POST /admin/golden."""

    args: GoldenArgs


class ChecksumRequest(Request, kw_only=True):
    """POST /admin/checksum."""

    args: NoArgs | None = None


class FlipRequest(Request, kw_only=True):
    """POST /admin/flip."""

    args: FlipArgs
