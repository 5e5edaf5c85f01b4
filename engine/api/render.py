"""The JSON of answers: choices, logprobs, usage, for whole answers and stream chunks alike."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.api.choice import Delta
    from engine.api.run import Run
    from engine.api.service import Service, Tokenizer
    from engine.types import TokenLogprob

_LOWEST = -9999.0  # what OpenAI sends for -inf, which JSON cannot


def _number(logprob: float) -> float:
    return max(logprob, _LOWEST)


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token as text; one that is not UTF-8 by itself is written as OpenAI writes it, `bytes:\\xf0\\x9f`."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def usage(run: Run) -> dict[str, Any]:
    """Every prompt counts once, whatever n is; completion tokens count all choices, up to the one that ended a stop."""
    return {
        "prompt_tokens": run.prompt_tokens,
        "completion_tokens": run.completion_tokens,
        "total_tokens": run.prompt_tokens + run.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": run.cached_tokens},
    }


def completion_logprobs(service: Service, entries: list[tuple[TokenLogprob, int]]) -> dict[str, Any]:
    """The legacy shape: parallel lists. text_offset counts characters from the start of the choice's text."""
    tokenizer = service.tokenizer
    tokens: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for entry, _ in entries:
        tokens.append(token_text(tokenizer, entry.token_id))
        first = math.isnan(entry.logprob)  # the prompt's first token: nothing came before it
        logprobs.append(None if first else _number(entry.logprob))
        top: dict[str, float] = {}
        for token, logprob in entry.top:
            top.setdefault(token_text(tokenizer, token), _number(logprob))
        tops.append(None if first else top)
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": [offset for _, offset in entries],
    }


def chat_logprobs(service: Service, entries: list[tuple[TokenLogprob, int]]) -> dict[str, Any]:
    """The chat shape: one object per token, with its bytes."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        raw = service.tokenizer.token_bytes(token)
        return {"token": token_text(service.tokenizer, token), "logprob": _number(logprob), "bytes": list(raw)}

    content = []
    for entry, _ in entries:
        item = one(entry.token_id, entry.logprob)
        item["top_logprobs"] = [one(token, logprob) for token, logprob in entry.top]
        content.append(item)
    return {"content": content, "refusal": None}


def completion_choice(service: Service, index: int, delta: Delta, logprobs: bool) -> dict[str, Any]:
    """A choice of /v1/completions, whole or as a chunk."""
    choice = {
        "index": index,
        "text": delta.text,
        "logprobs": completion_logprobs(service, delta.logprobs) if logprobs else None,
        "finish_reason": delta.finish_reason,
    }
    if delta.finish_reason is not None:
        choice["stop_reason"] = delta.stop_reason
    return choice


def chat_choice(service: Service, index: int, delta: Delta, logprobs: bool) -> dict[str, Any]:
    """A choice of a whole chat answer."""
    return {
        "index": index,
        "message": {"role": "assistant", "content": delta.text, "refusal": None},
        "logprobs": chat_logprobs(service, delta.logprobs) if logprobs else None,
        "finish_reason": delta.finish_reason,
        "stop_reason": delta.stop_reason,
    }


def chat_chunk_choice(service: Service, index: int, delta: Delta, logprobs: bool) -> dict[str, Any]:
    """A choice of a chat chunk."""
    choice: dict[str, Any] = {
        "index": index,
        "delta": {"content": delta.text} if delta.text or delta.logprobs else {},
        "logprobs": chat_logprobs(service, delta.logprobs) if logprobs and delta.logprobs else None,
        "finish_reason": delta.finish_reason,
    }
    if delta.finish_reason is not None:
        choice["stop_reason"] = delta.stop_reason
    return choice


def role_chunk_choice(index: int) -> dict[str, Any]:
    """The first chunk of a chat choice."""
    delta = {"role": "assistant", "content": "", "refusal": None}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
