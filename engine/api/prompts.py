"""Prompts to token ids: short text inline, long text in the tokenizer's threads so that /livez is never late."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec

from engine.api.errors import bad_request, from_engine
from engine.api.sampling import token_id
from engine.errors import TemplateError, TextError

if TYPE_CHECKING:
    from engine.api.schema import Message
    from engine.api.service import Service

_INLINE_IDS = 4096
_RESERVED = frozenset(
    ("messages", "tools", "self", "tokenize", "chat_template", "add_generation_prompt")
    + ("bos_token", "eos_token", "pad_token", "unk_token", "raise_exception", "strftime_now")
    + ("range", "dict", "lipsum", "cycler", "joiner", "namespace", "loop", "caller", "varargs", "kwargs")
)
"""Names that a request may not set in the template: our arguments, special tokens, and jinja's own globals."""


async def encode(
    service: Service, text: str, *, add_special_tokens: bool, param: str, total_chars: int = 0
) -> list[int]:
    """Token ids of `text`, one of several texts with `total_chars` together; 400 when there are none (an empty prompt
    and a tokenizer without BOS)."""
    try:
        if max(len(text), total_chars) <= service.config.inline_encode_chars:
            ids = service.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            ids = await service.offload(
                lambda: service.tokenizer.encode(text, add_special_tokens=add_special_tokens), size=len(text)
            )
    except TextError as exc:
        raise from_engine(exc, param) from exc
    if not ids:
        raise bad_request(f"`{param}` is empty: it has no tokens", param, "empty_prompt")
    if service.tokenizer.vocab_size > service.vocab_size and max(ids) >= service.vocab_size:
        text = service.tokenizer.token_text(max(ids))[:40]
        raise bad_request(f"`{param}` needs the token {text!r}, which this model has no row for", param, "invalid_text")
    return ids


async def decode(service: Service, ids: list[int], *, skip_special_tokens: bool) -> str:
    """Text of `ids`, off the event loop when they are many."""
    if len(ids) <= _INLINE_IDS:
        return service.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    return await service.offload(
        lambda: service.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens), size=4 * len(ids)
    )


def split_prompts(service: Service, prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The prompts of a /v1/completions request: one text, one list of ids, or a list of texts or of lists of ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("`prompt` is empty", "prompt", "empty_prompt")
    kinds = set(map(type, prompt))
    if len(kinds) > 1:
        raise bad_request("`prompt` must hold only strings, only token ids or only lists of token ids", "prompt")
    if kinds == {int}:
        return [check_ids(service, prompt, "prompt")]
    limit = service.config.limits.max_prompts
    if len(prompt) > limit:
        raise bad_request(f"`prompt` has {len(prompt)} prompts, the limit is {limit}", "prompt")
    out: list[str | list[int]] = []
    for index, item in enumerate(prompt):
        out.append(item if isinstance(item, str) else check_ids(service, cast("list[int]", item), f"prompt[{index}]"))
    return out


def check_ids(service: Service, ids: list[Any], param: str) -> list[int]:
    """Every id must be a row of the embedding (an id outside reads foreign memory on a GPU)."""
    if not ids:
        raise bad_request(f"`{param}` is empty", param, "empty_prompt")
    vocab_size = service.vocab_size
    if min(ids) < 0 or max(ids) >= vocab_size:
        index = next(i for i, value in enumerate(ids) if not 0 <= value < vocab_size)
        token_id(f"{param}[{index}]", ids[index], vocab_size)
    return ids


def as_messages(service: Service, messages: list[Message], param: str = "messages") -> list[dict[str, Any]]:
    """Messages as the template sees them: text parts joined with a newline, `developer` as `system`."""
    limit = service.config.limits.max_messages
    if not messages:
        raise bad_request(f"`{param}` is empty", param, "empty_prompt")
    if len(messages) > limit:
        raise bad_request(f"`{param}` has {len(messages)} messages, the limit is {limit}", param)
    out = []
    for message in messages:
        content = message.content
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        role = "system" if message.role == "developer" else message.role
        one = {"role": role, "content": text}
        if message.name is not None:
            one["name"] = message.name
        out.append(one)
    return out


async def render_chat(
    service: Service,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool = True,
    kwargs: dict[str, Any] | None = None,
    param: str = "messages",
) -> str:
    """The chat template's text; 400 when the template rejects the messages."""
    limits = service.config.limits
    if kwargs and (
        len(kwargs) > limits.max_template_kwargs or len(msgspec.json.encode(kwargs)) > limits.max_template_kwargs_bytes
    ):
        raise bad_request(
            f"`chat_template_kwargs` may hold {limits.max_template_kwargs} keys and "
            f"{limits.max_template_kwargs_bytes} bytes",
            "chat_template_kwargs",
        )
    for name in kwargs or {}:
        if name in _RESERVED or not name.isidentifier():
            raise bad_request(f"`chat_template_kwargs` may not set `{name[:64]}`", "chat_template_kwargs")

    def render() -> str:
        return service.tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, **(kwargs or {})
        )

    try:
        size = sum(len(message["content"]) for message in messages)
        return render() if size <= service.config.inline_encode_chars else await service.offload(render, size=size)
    except (TemplateError, TextError) as exc:
        raise from_engine(exc, param) from exc


async def encode_chat(
    service: Service,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool = True,
    add_special_tokens: bool = False,
    kwargs: dict[str, Any] | None = None,
    param: str = "messages",
) -> list[int]:
    """Ids of a conversation. No BOS is added: the template has printed it already (vllm-project/vllm#16976)."""
    text = await render_chat(service, messages, add_generation_prompt=add_generation_prompt, kwargs=kwargs, param=param)
    return await encode(service, text, add_special_tokens=add_special_tokens, param=param)
