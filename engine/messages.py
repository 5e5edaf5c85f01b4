"""The wire between engine-api and engine-core: msgpack of these structs through two shared-memory rings (ring.py).

Times are CLOCK_MONOTONIC seconds, which both processes share.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from engine.types import DeviceId, FinishReason, SamplingParams, TokenLogprob


class _Message(msgspec.Struct, kw_only=True, tag_field="t", omit_defaults=True):
    pass


# ---- api -> core ----------------------------------------------------------------------------------------------------


class Generate(_Message, tag="gen"):
    request_id: str  # unique
    prompt_ids: list[int]
    params: SamplingParams
    client_id: str = ""  # what the client calls it; in every log line
    n: int = 1  # choices 0..n-1; choice i samples with seed derived from (seed, i)
    echo_logprobs: bool = False  # also return logprobs of the prompt's tokens (costs logits at every position)
    deadline: float | None = None
    cache_salt: str = ""  # prefixes are shared only between requests with the same salt


class Abort(_Message, tag="abort"):
    request_id: str
    index: int | None = None  # None = every choice


class Control(_Message, tag="ctl"):
    control_id: int
    op: str  # "golden", "checksum", "flip", "drop_prefix_cache", "cancel" (of control_id), "stop"
    args: dict[str, Any] = {}


TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class GoldenArgs(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of Control "golden": a prompt, each id a row of the embedding."""

    prompt_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]


class FlipArgs(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of Control "flip": one bit of the weights. `offset` counts bytes from the tensor's start, without one
    from the arena's; on CUDA the bytes of a matrix lie tile by tile (kernels/layout.py)."""

    bit: Annotated[int, msgspec.Meta(ge=0, le=7)]
    offset: Annotated[int, msgspec.Meta(ge=0, lt=2**48)] = 0
    tensor: str | None = None


class NoArgs(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of every other Control."""


ApiMessage = Generate | Abort | Control

# ---- core -> api ----------------------------------------------------------------------------------------------------


LoadPhase = Literal["weights", "checksum", "warm-up"]  # in this order


class Loading(_Message, tag="loading"):
    """How far engine-core has come, at least ten times a second while something moves."""

    phase: LoadPhase
    done: int  # weights, checksum: bytes; warm-up: batch sizes tried
    total: int


class Ready(_Message, tag="ready"):
    kv_pages: int
    max_model_len: int
    vocab_size: int
    weights_bytes: int
    weights_checksum: str
    load_seconds: float
    backend: str
    device: DeviceId


class Tokens(_Message, tag="tok"):
    request_id: str
    index: int
    token_ids: list[int]  # new ones since the last message; a stop token that ended the choice is not among them
    logprobs: list[TokenLogprob] | None = None  # one per token id
    prompt_logprobs: list[TokenLogprob | None] | None = None  # of the next prompt tokens; index 0 only, [None, ...]
    cached_tokens: int = 0  # of the prompt, taken from the prefix cache (sent with the first message)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the EOS or stop id that ended it
    error: str | None = None  # with finish_reason "error"
    refused: bool = False  # with error: the request can never be served, the fault is the client's
    error_where: dict[str, Any] | None = None  # layer, op, position


class Fault(_Message, tag="fault"):
    """Something went wrong on the device or in a step; the requests that it cost are told by their Tokens as well. A
    lost device ends the process: Fatal tells."""

    number: int  # 1, 2 ... since start
    kind: str  # "nonfinite", "page_range", "position_range", "token_range", "logits"; "step"
    error: str
    where: dict[str, Any]  # as far as known: op (the kernel), layer, head, position, value, sm, step
    at: float


class Stats(_Message, tag="stats"):
    """Sent after every step and when idle at least once a second: also engine-core's heartbeat."""

    steps: int
    kv_pages_free: int
    kv_pages_total: int
    kv_slots_unused: int  # unused token slots in the last pages of running sequences
    running: int
    waiting: int
    waiting_by_bucket: dict[str, int] = {}
    prefix_hit_tokens: int = 0  # totals since start
    prefix_query_tokens: int = 0
    preemptions: int = 0
    step_seconds: float = 0.0
    longest_step_seconds: float = 0.0  # seen so far, or to be expected from warm-up
    rss_bytes: int = 0  # resident memory of engine-core


class ControlReply(_Message, tag="ctlr"):
    control_id: int
    ok: bool
    result: dict[str, Any] = {}
    error: str | None = None
    refused: bool = False  # the arguments are wrong


class Fatal(_Message, tag="fatal"):
    error: str
    hint: str | None = None
    exit_code: int = 1


CoreMessage = Loading | Ready | Tokens | Fault | Stats | ControlReply | Fatal
