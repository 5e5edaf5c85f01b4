"""From request fields to SamplingParams: every range check, with the peers' edges, and the documented defaults.

Edges that differ between peers are settled here: top_k 0 and -1 both mean off, temperature below 1e-5 is greedy (vLLM),
seed -1 means "draw one" (vLLM), n > 1 with greedy is allowed (OpenAI). A drawn seed is below 2**53, so that a
client in JavaScript reads it back exactly.
"""

from __future__ import annotations

import math
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.api.errors import ApiError, bad_request, too_large
from engine.api.relay import NO_RELAY, SEED_HEADER, RelayHeaders, cache_salt
from engine.types import SamplingParams

if TYPE_CHECKING:
    from engine.api.schema import OpenAIFields, SamplingFields
    from engine.api.service import Service

_GREEDY_BELOW = 1e-5


@dataclass(slots=True)
class Plan:
    """A validated request, but for its prompts. `max_tokens` None = the route's default."""

    params: SamplingParams
    max_tokens: int | None
    max_tokens_param: str
    n: int
    stops: list[str] = field(default_factory=list)
    stop_ids_text: dict[int, str] = field(default_factory=dict)  # stop ids that the client gave as text (B-07)
    include_stop: bool = False
    skip_special_tokens: bool = True
    cache_salt: str = ""
    deadline: float = 0.0  # CLOCK_MONOTONIC seconds


def _in_range(name: str, value: float | int, low: float, high: float, *, open_low: bool = False) -> None:
    if not math.isfinite(value) or value > high or value < low or (open_low and value == low):
        raise bad_request(f"`{name}` must be {'>' if open_low else '>='} {low:g} and <= {high:g}, got {value:g}", name)


def _count(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise bad_request(f"`{name}` must be between {low} and {high}, got {_short(value)}", name)


def _short(value: int) -> str:
    return str(value) if abs(value) < 10**20 else f"an integer of {value.bit_length()} bits"


def token_id(name: str, value: int, vocab_size: int) -> int:
    """`value` if it is a row of the embedding; 400 otherwise."""
    if not 0 <= value < vocab_size:
        raise bad_request(
            f"`{name}`: token id {_short(value)} is not in the vocabulary (0 to {vocab_size - 1})",
            name,
            "invalid_token",
        )
    return value


def draw_seed() -> int:
    """A fresh seed that survives a double (2**53)."""
    return secrets.randbits(53)


def make_plan(
    service: Service,
    request: SamplingFields,
    *,
    logprobs: int | None = None,
    max_tokens: int | None = None,
    max_tokens_param: str = "max_tokens",
    min_max_tokens: int = 1,
    n: int = 1,
    default_temperature: float = 1.0,
    relay: RelayHeaders = NO_RELAY,
) -> Plan:
    """Check everything but the prompt. `max_tokens` overrides the field of that name (max_completion_tokens)."""
    config, vocab_size = service.config, service.vocab_size
    limits = config.limits
    max_tokens = request.max_tokens if max_tokens is None else max_tokens
    if max_tokens is not None and max_tokens < min_max_tokens:
        raise bad_request(
            f"`{max_tokens_param}` must be >= {min_max_tokens}, got {_short(max_tokens)}", max_tokens_param
        )
    stops, stop_ids_text = _stops(service, request)
    seed = _seed(request, relay)
    timeout = config.timeouts.request if request.timeout is None else request.timeout
    _in_range("timeout", timeout, 0, config.timeouts.max_request, open_low=True)
    params = _params(service, request, seed, logprobs, default_temperature, vocab_size, stop_ids_text)
    _count("n", n, 1, limits.max_n)
    salt = request.cache_salt or ""
    if len(salt) > 256 or (request.cache_salt is not None and not salt):
        raise bad_request("`cache_salt` must have 1 to 256 characters", "cache_salt")
    return Plan(
        params=params,
        max_tokens=max_tokens,
        max_tokens_param=max_tokens_param,
        n=n,
        stops=stops,
        stop_ids_text=stop_ids_text,
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        cache_salt=cache_salt(relay.tenant, salt),
        deadline=time.monotonic() + timeout,
    )


def _seed(request: SamplingFields, relay: RelayHeaders) -> int:
    """The client's seed; else what a gateway saw drawn the first time; else a fresh one."""
    seed = request.seed
    if seed is None or seed == -1:
        return draw_seed() if relay.seed is None else relay.seed
    if not 0 <= seed < 2**64:
        raise bad_request(f"`seed` must be between 0 and 2**64 - 1 (or -1: draw one), got {_short(seed)}", "seed")
    if relay.seed not in (None, seed):
        raise bad_request(f"`seed` is {seed}, but `{SEED_HEADER}` says {relay.seed}", SEED_HEADER, "relay_header")
    return seed


def _params(
    service: Service,
    request: SamplingFields,
    seed: int,
    logprobs: int | None,
    default_temperature: float,
    vocab_size: int,
    stop_ids_text: dict[int, str],
) -> SamplingParams:
    limits = service.config.limits
    temperature = default_temperature if request.temperature is None else request.temperature
    _in_range("temperature", temperature, 0, 2)
    top_p = 1.0 if request.top_p is None else request.top_p
    _in_range("top_p", top_p, 0, 1, open_low=True)
    top_k = 0 if request.top_k is None else request.top_k
    _count("top_k", top_k, -1, 2**31 - 1)
    min_p = request.min_p or 0.0
    _in_range("min_p", min_p, 0, 1)
    repetition = 1.0 if request.repetition_penalty is None else request.repetition_penalty
    _in_range("repetition_penalty", repetition, 0.01, 10)
    presence, frequency = request.presence_penalty or 0.0, request.frequency_penalty or 0.0
    _in_range("presence_penalty", presence, -2, 2)
    _in_range("frequency_penalty", frequency, -2, 2)
    min_tokens = request.min_tokens or 0
    _count("min_tokens", min_tokens, 0, service.max_model_len)
    if logprobs is not None:
        _count("logprobs", logprobs, 0, min(limits.max_logprobs, vocab_size))
    return SamplingParams(
        seed=seed,
        max_tokens=1,  # set per prompt, when its length is known
        min_tokens=min_tokens,
        temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
        top_k=max(top_k, 0),
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=_logit_bias(request, limits.max_logit_bias, vocab_size),
        logprobs=logprobs,
        stop_token_ids=_stop_token_ids(request, limits.max_stop_token_ids, vocab_size, stop_ids_text),
        eos_token_ids=service.config.eos_token_ids,
        ignore_eos=bool(request.ignore_eos),
    )


def _logit_bias(request: SamplingFields, limit: int, vocab_size: int) -> dict[int, float]:
    bias = request.logit_bias or {}
    if len(bias) > limit:
        raise bad_request(f"`logit_bias` has {len(bias)} entries, the limit is {limit}", "logit_bias")
    for key, value in bias.items():
        token_id("logit_bias", key, vocab_size)
        _in_range("logit_bias", value, -100, 100)
    return bias


def _stop_token_ids(
    request: SamplingFields, limit: int, vocab_size: int, stop_ids_text: dict[int, str]
) -> tuple[int, ...]:
    ids = request.stop_token_ids or []
    if len(ids) > limit:
        raise bad_request(f"`stop_token_ids` has {len(ids)} entries, the limit is {limit}", "stop_token_ids")
    for value in ids:
        token_id("stop_token_ids", value, vocab_size)
    return tuple(dict.fromkeys([*ids, *stop_ids_text]))


def _stops(service: Service, request: SamplingFields) -> tuple[list[str], dict[int, str]]:
    """Stop strings, and the ids of those that are the text of a special token: such a token is never detokenized into
    text, so that the string alone would not be seen (ggml-org/llama.cpp#6772)."""
    limits = service.config.limits
    stops = [request.stop] if isinstance(request.stop, str) else list(request.stop or [])
    if len(stops) > limits.max_stops:
        raise bad_request(f"`stop` has {len(stops)} strings, the limit is {limits.max_stops}", "stop")
    for stop in stops:
        if not stop:
            raise bad_request("`stop` must not hold an empty string", "stop")
        if len(stop) > limits.max_stop_chars:
            raise bad_request(
                f"a string in `stop` has {len(stop)} characters, the limit is {limits.max_stop_chars}", "stop"
            )
    special = service.tokenizer.special_ids
    return list(dict.fromkeys(stops)), {special[stop]: stop for stop in stops if stop in special}


def fit(service: Service, plan: Plan, prompt_tokens: int, default_max_tokens: int) -> int:
    """max_tokens of one prompt. Asked for: it must fit (413). Not asked for: the default, cut to what is left."""
    context = service.max_model_len
    room = context - prompt_tokens
    if plan.max_tokens is not None:
        if plan.max_tokens > room:
            raise too_large(
                f"the context holds {context} tokens, but the prompt has {prompt_tokens} and "
                f"`{plan.max_tokens_param}` asks for {_short(plan.max_tokens)} more",
                plan.max_tokens_param if prompt_tokens < context else None,
                "context_length_exceeded",
            )
        wanted = plan.max_tokens
    elif room < 1:
        raise too_large(
            f"the context holds {context} tokens, but the prompt has {prompt_tokens} and at least one must be "
            "generated",
            None,
            "context_length_exceeded",
        )
    else:
        wanted = min(default_max_tokens, room)
    if plan.params.min_tokens > wanted:
        raise bad_request(
            f"`min_tokens` ({plan.params.min_tokens}) is more than the {wanted} tokens to be generated", "min_tokens"
        )
    return wanted


def check_openai(service: Service, request: OpenAIFields) -> None:
    """What both OpenAI routes check alike: `model` and stream_options."""
    check_model(service, request.model)
    if request.stream_options is not None and not request.stream:
        raise bad_request("`stream_options` needs `stream`: true", "stream_options")


def check_model(service: Service, name: str | None) -> None:
    """404 unless `name` is the served model (or left out)."""
    if name is not None and name != service.config.model:
        raise ApiError(
            404,
            f"the model `{name[:100]}` does not exist; this endpoint serves `{service.config.model}`",
            param="model",
            code="model_not_found",
        )
