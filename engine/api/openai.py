"""POST /v1/completions and /v1/chat/completions, GET /v1/models."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from engine.api import render
from engine.api.body import read_json
from engine.api.choice import Delta
from engine.api.errors import bad_request
from engine.api.offsets import added_tokens
from engine.api.prompts import as_messages, decode, encode, encode_chat, split_prompts
from engine.api.relay import CREATED_HEADER, SEED_HEADER, Bounds, Progress, bad_resume, check_resume
from engine.api.run import Prompt, Run
from engine.api.sampling import check_model, check_openai, fit, make_plan
from engine.api.schema import ChatRequest, CompletionRequest
from engine.api.service import CONTEXT, SERVICE, Service
from engine.api.sse import INLINE_LOGPROBS, LOGPROB_BYTES, event, stream

if TYPE_CHECKING:
    from engine.api.choice import Choice
    from engine.api.sampling import Plan


def json_response(payload: Any, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(payload), content_type="application/json", headers=headers)


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    service = request.app[SERVICE]
    service.check_ready()
    body = await read_json(request, CompletionRequest)
    check_openai(service, body)
    n = 1 if body.n is None else body.n
    if body.best_of is not None and body.best_of != n:
        raise bad_request("`best_of` must equal `n`: other choices would be thrown away", "best_of")
    echo = bool(body.echo)
    relay = request[CONTEXT].relay
    plan = make_plan(service, body, logprobs=body.logprobs, n=n, min_max_tokens=0 if echo else 1, relay=relay)
    prompts = await _completion_prompts(service, body, plan, echo)
    _check_choices(service, len(prompts), plan.n, "prompt")
    answer = _Answer(request, service, plan, "cmpl", "text_completion", logprobs=body.logprobs is not None)
    return await answer.run(prompts, body.stream, _wants_usage(body))


async def _completion_prompts(service: Service, body: CompletionRequest, plan: Plan, echo: bool) -> list[Prompt]:
    prompts = []
    parts = split_prompts(service, body.prompt)
    total_chars = sum(len(part) for part in parts if isinstance(part, str))
    special = body.add_special_tokens is not False
    for index, part in enumerate(parts):
        param = f"prompt[{index}]" if isinstance(body.prompt, list) and len(parts) > 1 else "prompt"
        if isinstance(part, str):
            ids = await encode(service, part, add_special_tokens=special, param=param, total_chars=total_chars)
        else:
            ids = part
        text, added = None, None
        max_tokens = fit(service, plan, len(ids), service.config.completions_max_tokens)
        if echo:
            skip = plan.skip_special_tokens
            text = part if isinstance(part, str) else await decode(service, ids, skip_special_tokens=skip)
            if isinstance(part, str):
                added = added_tokens(service) if special else (0, 0)
        prompts.append(Prompt(ids, max_tokens, text, added))
    return prompts


def _check_choices(service: Service, prompts: int, n: int, param: str) -> None:
    limit = service.config.limits.max_choices
    if prompts * n > limit:
        raise bad_request(f"{prompts} prompts x n = {n} are more than the limit of {limit} choices", param)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    service = request.app[SERVICE]
    service.check_ready()
    body = await read_json(request, ChatRequest)
    check_openai(service, body)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("`top_logprobs` needs `logprobs`: true", "top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise bad_request("`max_tokens` and `max_completion_tokens` contradict each other", "max_completion_tokens")
    limit = service.config.limits.max_logprobs
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= limit:
        raise bad_request(f"`top_logprobs` must be between 0 and {limit}", "top_logprobs")
    plan = make_plan(
        service,
        body,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        max_tokens=body.max_completion_tokens,
        max_tokens_param="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        n=1 if body.n is None else body.n,
        relay=request[CONTEXT].relay,
    )
    ids = await encode_chat(
        service,
        as_messages(service, body.messages),
        add_generation_prompt=body.add_generation_prompt is not False,
        add_special_tokens=bool(body.add_special_tokens),
        kwargs=body.chat_template_kwargs,
    )
    prompt = Prompt(ids, fit(service, plan, len(ids), service.config.default_max_tokens))
    answer = _Answer(request, service, plan, "chatcmpl", "chat.completion", logprobs=bool(body.logprobs))
    return await answer.run([prompt], body.stream, _wants_usage(body))


def _wants_usage(body: CompletionRequest | ChatRequest) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


class _Answer:
    """Answers one OpenAI request in either shape."""

    def __init__(
        self, request: web.Request, service: Service, plan: Plan, prefix: str, kind: str, *, logprobs: bool
    ) -> None:
        self.request, self.service, self.plan, self.logprobs = request, service, plan, logprobs
        self.chat = kind == "chat.completion"
        self.relay = request[CONTEXT].relay
        self.head = {
            "id": f"{prefix}-{request[CONTEXT].request_id}",
            "object": kind,
            "created": int(time.time()) if self.relay.created is None else self.relay.created,
            "model": service.config.model,
            "system_fingerprint": service.fingerprint,
        }
        sent = self.relay.resume or {}
        self.progress = {index: dataclasses.replace(progress) for index, progress in sent.items()}  # so far, by choice

    async def run(self, prompts: list[Prompt], streaming: bool | None, with_usage: bool) -> web.StreamResponse:
        headers = {SEED_HEADER: str(self.plan.params.seed)}
        if self.relay.relay:
            headers[CREATED_HEADER] = str(self.head["created"])
        if self.relay.resume is not None:
            if not streaming:
                raise bad_resume("`stream` is not true")
            await self._check_resume(self.relay.resume, prompts, with_usage)
        async with start_run(self.request, self.plan, prompts, stream=bool(streaming)) as run:
            if not streaming:
                await run.wait()
                count = run.completion_tokens + run.prompt_tokens
                if self.logprobs and count > INLINE_LOGPROBS:
                    size = count * LOGPROB_BYTES
                    body = await self.service.offload(lambda: msgspec.json.encode(self._whole(run)), size=size)
                    return web.Response(body=body, content_type="application/json", headers=headers)
                return json_response(self._whole(run), headers)
            if self.chat:
                self.head["object"] = "chat.completion.chunk"
            tail = {"usage": None} if with_usage else {}

            return await stream(
                self.request,
                run,
                headers,
                render=lambda choice, delta: self._chunk(choice, delta, tail),
                last=lambda: self._usage(run) if with_usage else b"",
            )

    async def _check_resume(self, resume: dict[int, Progress], prompts: list[Prompt], with_usage: bool) -> None:
        """400 for a position that this request's stream cannot have had."""
        self.service.metrics.resumes.inc()
        longest = await self.service.longest_token()
        spare = self.service.config.limits.max_stop_chars + longest  # a stop that is shown; half characters at the end
        bounds = []
        for prompt in prompts:
            echoed = len(prompt.ids) if prompt.echo is not None else 0
            most = Bounds(
                text=len(prompt.echo or "") + prompt.max_tokens * longest + spare,
                logprobs=echoed + prompt.max_tokens if self.logprobs else 0,
                cached=len(prompt.ids),
            )
            bounds += [most] * self.plan.n
        check_resume(resume, bounds, chat=self.chat, with_usage=with_usage)

    def _whole(self, run: Run) -> dict[str, Any]:
        choices = [choice for prompt in run.prompts for choice in prompt.choices]
        make = render.chat_choice if self.chat else render.completion_choice
        rendered = [make(self.service, choice.index, choice.take(), self.logprobs) for choice in choices]
        return self.head | {"choices": rendered, "usage": render.usage(run), "seed": self.plan.params.seed}

    def _chunk(self, choice: Choice, delta: Delta, tail: dict[str, Any]) -> bytes:
        """The events of one delta."""
        index = choice.index
        progress = self.progress.setdefault(index, Progress())
        progress.cached = choice.cached_tokens
        if not self.chat:
            rendered = render.completion_choice(self.service, index, delta, self.logprobs)
            return self._event(rendered, tail, index, delta)
        events = b""
        if not progress.role:
            progress.role = True
            events = self._event(render.role_chunk_choice(index), tail, index, Delta())
        if delta.text or delta.logprobs:
            # As OpenAI does, the finish reason comes in a chunk of its own with an empty delta.
            part = Delta(delta.text, delta.logprobs)
            events += self._event(render.chat_chunk_choice(self.service, index, part, self.logprobs), tail, index, part)
        if delta.finish_reason is not None:
            part = Delta(finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)
            events += self._event(render.chat_chunk_choice(self.service, index, part, False), tail, index, part)
        return events

    def _event(self, choice: dict[str, Any], tail: dict[str, Any], index: int, delta: Delta) -> bytes:
        """One event of a choice; `delta`: what of it the event brings."""
        line = b""
        if self.relay.relay:
            progress = self.progress[index]
            progress.advance(delta.text, delta.logprobs)
            progress.finished = delta.finish_reason is not None
            line = progress.id_line(index)
        return event(self.head | {"choices": [choice]} | tail, line)

    def _usage(self, run: Run) -> bytes:
        """The last event before [DONE], unless it was sent before the stream was cut. Its index is the number of
        choices, which no choice has."""
        index = sum(len(prompt.choices) for prompt in run.prompts)
        if index in self.progress:
            return b""
        line = Progress(finished=True).id_line(index) if self.relay.relay else b""
        return event(self.head | {"choices": [], "usage": render.usage(run)}, line)


def start_run(request: web.Request, plan: Plan, prompts: list[Prompt], *, stream: bool) -> Run:
    """The Run of this HTTP request; noted on it for the log line."""
    service, context = request.app[SERVICE], request[CONTEXT]
    context.run = run = Run(
        service, plan, prompts, request_id=context.request_id, arrival=context.arrival, stream=stream,
        resume=context.relay.resume,
    )  # fmt: skip
    service.release(context)
    return run


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.config.model,
        "object": "model",
        "created": service.config.created or int(service.started),
        "owned_by": "appliance",
        "max_model_len": service.max_model_len,
    }


async def list_models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    return json_response({"object": "list", "data": [_model(request.app[SERVICE])]})


async def get_model(request: web.Request) -> web.Response:
    """GET /v1/models/{model}; 404 model_not_found."""
    service = request.app[SERVICE]
    check_model(service, request.match_info["model"])
    return json_response(_model(service))
