"""The small routes: /infer, /generate, /tokenize, /detokenize, /encoding/detect."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from aiohttp import web

from engine.api import render
from engine.api.body import read_body, read_json
from engine.api.errors import bad_request
from engine.api.openai import json_response, start_run
from engine.api.prompts import as_messages, check_ids, decode, encode, encode_chat
from engine.api.relay import SEED_HEADER, RelayHeaders, bad_resume
from engine.api.run import Prompt
from engine.api.sampling import Plan, check_model, fit, make_plan
from engine.api.schema import DetokenizeRequest, GenerateRequest, InferRequest, TokenizeRequest
from engine.api.service import CONTEXT, SERVICE

_INLINE_IDS = 4096  # longer answers are made off the event loop
_TOKEN_STR_BYTES = 16  # about
_DETECT_CONTEXT = 8192  # bytes before the first bad one that are shown to the detector


async def infer(request: web.Request) -> web.Response:
    """POST /infer {"input": text} -> {"output", "latency_ms", ...}: one answer through the chat template, greedy."""
    service = request.app[SERVICE]
    service.check_ready()
    body = await read_json(request, InferRequest)
    plan = make_plan(service, body, default_temperature=0.0, relay=_relay(request))
    if not body.input:
        raise bad_request("`input` is empty", "input", "empty_prompt")
    messages: list[dict[str, Any]] = [{"role": "user", "content": body.input}]
    if body.system is not None:
        messages.insert(0, {"role": "system", "content": body.system})
    ids = await encode_chat(service, messages, param="input")
    return json_response(*await _one_answer(request, plan, ids, "output"))


async def generate(request: web.Request) -> web.Response:
    """POST /generate {"prompt": text} -> {"text", "latency_ms", ...}: the raw continuation, greedy; with
    `Accept: text/plain` just the text."""
    service = request.app[SERVICE]
    service.check_ready()
    body = await read_json(request, GenerateRequest)
    plan = make_plan(service, body, default_temperature=0.0, relay=_relay(request))
    ids = await encode(service, body.prompt, add_special_tokens=True, param="prompt")
    answer, headers = await _one_answer(request, plan, ids, "text")
    if request.headers.get("Accept", "").split(";")[0].strip().lower() == "text/plain":
        return web.Response(text=answer["text"], content_type="text/plain", charset="utf-8", headers=headers)
    return json_response(answer, headers)


def _relay(request: web.Request) -> RelayHeaders:
    relay = request[CONTEXT].relay
    if relay.resume is not None:
        raise bad_resume("this route does not stream")
    return relay


async def _one_answer(
    request: web.Request, plan: Plan, ids: list[int], name: str
) -> tuple[dict[str, Any], dict[str, str]]:
    service = request.app[SERVICE]
    prompt = Prompt(ids, fit(service, plan, len(ids), service.config.default_max_tokens))
    async with start_run(request, plan, [prompt], stream=False) as run:
        await run.wait()
        choice = prompt.choices[0]
        answer = {
            name: choice.take().text,
            "latency_ms": round(1000 * (time.monotonic() - request[CONTEXT].arrival), 3),
            "request_id": request[CONTEXT].request_id,
            "model": service.config.model,
            "system_fingerprint": service.fingerprint,
            "finish_reason": choice.finish_reason,
            "seed": plan.params.seed,
            "usage": render.usage(run),
        }
    return answer, {SEED_HEADER: str(plan.params.seed)}


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize {"prompt": text} or {"messages": [...]} -> {"tokens", "count", "max_model_len"}."""
    service = request.app[SERVICE]
    body = await read_json(request, TokenizeRequest)
    check_model(service, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either `prompt` or `messages`", "prompt")
    if body.prompt is not None:
        if body.add_generation_prompt is not None:
            raise bad_request("`add_generation_prompt` needs `messages`", "add_generation_prompt")
        special = body.add_special_tokens is not False
        # An empty text is a fair question here: the answer is no token, or BOS alone.
        ids = (
            await encode(service, body.prompt, add_special_tokens=special, param="prompt")
            if body.prompt
            else service.tokenizer.encode("", add_special_tokens=special)
        )
    else:
        ids = await encode_chat(
            service,
            as_messages(service, body.messages or []),
            add_generation_prompt=body.add_generation_prompt is not False,
            add_special_tokens=bool(body.add_special_tokens),
        )
    answer: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": service.max_model_len}

    def encoded() -> bytes:
        if body.return_token_strs:
            texts = {token: render.token_text(service.tokenizer, token) for token in set(ids)}
            answer["token_strs"] = [texts[token] for token in ids]
        return msgspec.json.encode(answer)

    size = len(ids) * (_TOKEN_STR_BYTES if body.return_token_strs else 1)
    raw = encoded() if len(ids) <= _INLINE_IDS else await service.offload(encoded, size=size)
    return web.Response(body=raw, content_type="application/json")


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize {"tokens": [ids]} -> {"prompt": text}. Special tokens are shown unless asked otherwise."""
    service = request.app[SERVICE]
    body = await read_json(request, DetokenizeRequest)
    check_model(service, body.model)
    ids = check_ids(service, body.tokens, "tokens") if body.tokens else []
    text = await decode(service, ids, skip_special_tokens=bool(body.skip_special_tokens))
    return json_response({"prompt": text})


async def detect_encoding(request: web.Request) -> web.Response:
    """POST /encoding/detect: what the raw body (any bytes) probably is, judged on at most max_detect_bytes."""
    service = request.app[SERVICE]
    raw = await read_body(request)
    if not raw:
        raise bad_request("the body is empty; post the bytes to look at", None, "empty_body")
    limit = service.config.limits.max_detect_bytes
    return json_response(await service.offload(detect, raw, limit, size=min(len(raw), limit)))


def detect(raw: bytes, limit: int) -> dict[str, Any]:
    """UTF-8 with the position of the first invalid byte, and charset-normalizer's guesses for everything else."""
    from charset_normalizer import from_bytes

    answer: dict[str, Any] = {"bytes": len(raw), "valid_utf8": True, "error_position": None}
    try:
        raw.decode()
        return answer | {"encoding": "ascii" if raw.isascii() else "utf_8", "language": None, "alternatives": []}
    except UnicodeDecodeError as exc:
        answer |= {"valid_utf8": False, "error_position": exc.start, "error_byte": f"0x{raw[exc.start]:02x}"}
        start = max(0, exc.start - _DETECT_CONTEXT) if exc.start >= limit else 0
    sample = raw[start : start + limit]
    guesses = list(from_bytes(sample))
    return answer | {
        "encoding": guesses[0].encoding if guesses else None,
        "language": guesses[0].language if guesses else None,
        "alternatives": [guess.encoding for guess in guesses[1:6]],
        "judged_bytes": len(sample),
        "hint": "convert the text to UTF-8 before sending it, e.g. with iconv",
    }
