"""Rotary embedding settings out of config.json, in each of the forms Hugging Face has used for them.

`rope_theta` + `rope_scaling` with `type` (before 4.43), with `rope_type` (4.43 on), `rope_parameters` (5.0, where
rope_theta moved inside). A kind or key we do not compute is refused by name: ignoring one gives fluent text at first
and nonsense at long positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from engine.errors import ConfigError
from engine.jsonfile import Section, shown

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]

MAX_POSITION = 1 << 27
DEFAULT_THETA = 10_000.0  # of all four families in transformers

_COMMON_KEYS = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}
_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor", "original_max_position_embeddings"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
             "mscale_all_dim", "truncate", "finetuned"},
}  # fmt: skip
_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Inputs of the inverse frequencies, with the meanings of transformers' modeling_rope_utils.py.

    linear: inv_freq / factor. dynamic (NTK): as default up to original_max_position (max_position_embeddings), past it
    the base grows with the length. llama3: low/high_freq_factor and original_max_position. yarn (arXiv 2309.00071):
    beta_*, truncate, and the factor on cos and sin: attention_factor, else from mscale and mscale_all_dim, else
    0.1 ln(factor) + 1.
    """

    theta: float
    kind: RopeKind
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def parse_rope(config: Section, max_position: int) -> RopeConfig:
    """RopeConfig of config.json as a whole; `max_position` is its max_position_embeddings. Raises ConfigError."""
    rope = _rope_section(config)
    kind = _kind(rope)
    theta = _theta(config, rope)
    for place in (config, rope):
        if place.has("partial_rotary_factor") and place.number("partial_rotary_factor", 0, 1) != 1.0:
            place.fail("partial_rotary_factor", "1 (rotating a part of the head is not supported)")
    known = _COMMON_KEYS | _KEYS[kind]
    for key, value in rope.values.items():
        if key not in known and value is not None:
            raise ConfigError(f"{rope.where}: {key} = {shown(value)} is not supported with rope_type {kind!r}")
    if kind == "default":
        return RopeConfig(theta, kind)
    original = _original(config, rope)
    if kind == "linear":
        return RopeConfig(theta, kind, _factor(rope), original)
    if kind == "dynamic":
        if original not in (None, max_position):
            # transformers goes by max_position_embeddings alone; which of the two the author meant is a guess.
            raise ConfigError(
                f"{rope.where}: original_max_position_embeddings is {original} but max_position_embeddings is "
                f"{max_position}; with rope_type 'dynamic' they must be equal",
                hint="Set max_position_embeddings to the trained length, or use rope_type 'yarn'.",
            )
        return RopeConfig(theta, kind, _factor(rope), max_position)
    if kind == "llama3":
        return _llama3(rope, theta, original)
    return _yarn(rope, theta, original, max_position)


def _rope_section(config: Section) -> Section:
    old, new = config.section("rope_scaling"), config.section("rope_parameters")
    if old.values and new.values and old.values != new.values:
        raise ConfigError(f"{config.where}: rope_scaling and rope_parameters are both set and differ; remove one")
    rope = new if new.values else old
    if rope.values and all(key in _LAYER_TYPES for key in rope.values):  # one entry per layer type
        entries = list(rope.values.values())
        if any(entry != entries[0] for entry in entries):
            raise ConfigError(f"{rope.where} differs between layer types ({', '.join(rope.values)}): not supported")
        return rope.section(next(iter(rope.values)))
    return rope


def _kind(rope: Section) -> RopeKind:
    if not rope.has("rope_type") and not rope.has("type"):
        if any(key not in _COMMON_KEYS and value is not None for key, value in rope.values.items()):
            rope.fail("rope_type", f"one of {', '.join(_KEYS)}")
        return "default"
    key = "rope_type" if rope.has("rope_type") else "type"
    kind = rope.text(key)
    if rope.has("type") and rope.values["type"] != kind:
        raise ConfigError(f"{rope.where}: rope_type {shown(kind)} and type {shown(rope.values['type'])} differ")
    if kind not in _KEYS:
        rope.fail(key, f"one of {', '.join(_KEYS)}")
    return cast("RopeKind", kind)


def _theta(config: Section, rope: Section) -> float:
    found = [place.number("rope_theta", 1.0, 1e15) for place in (rope, config) if place.has("rope_theta")]
    if len(set(found)) > 1:
        raise ConfigError(f"{config.where}: rope_theta is {found[1]:g}, but {found[0]:g} inside {rope.where}")
    theta = found[0] if found else DEFAULT_THETA
    if theta == 1.0:
        raise ConfigError(f"{config.where}: rope_theta must be more than 1")
    return theta


def _original(config: Section, rope: Section) -> int | None:
    for place in (rope, config):
        if place.has("original_max_position_embeddings"):
            return place.integer("original_max_position_embeddings", 1, MAX_POSITION)
    return None


def _factor(rope: Section) -> float:
    return rope.number("factor", 1.0, 65536.0)


def _llama3(rope: Section, theta: float, original: int | None) -> RopeConfig:
    if original is None:
        rope.fail("original_max_position_embeddings", "set for rope_type 'llama3'")
    low = rope.number("low_freq_factor", 1e-6, 1e6)
    high = rope.number("high_freq_factor", 1e-6, 1e6)
    if high <= low:
        rope.fail("high_freq_factor", f"more than low_freq_factor ({low:g})")
    return RopeConfig(theta, "llama3", _factor(rope), original, low_freq_factor=low, high_freq_factor=high)


def _yarn(rope: Section, theta: float, original: int | None, max_position: int) -> RopeConfig:
    # transformers 5: an explicit factor counts; a null one is max_position / original.
    if rope.has("factor") or original is None:
        factor = _factor(rope)
    else:
        factor = max_position / original
        if factor < 1.0:
            rope.fail("factor", "set, as max_position_embeddings is less than original_max_position_embeddings")
    # 0 means "the default" there too (`x or 32`).
    fast = rope.number("beta_fast", 0.0, 1e6, 0.0) or 32.0
    slow = rope.number("beta_slow", 0.0, 1e6, 0.0) or 1.0
    if fast <= slow:
        rope.fail("beta_fast", f"more than beta_slow ({slow:g})")

    def optional(key: str, low: float) -> float | None:
        return rope.number(key, low, 1e6) if rope.has(key) else None

    return RopeConfig(
        theta,
        "yarn",
        factor,
        original if original is not None else max_position,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=optional("attention_factor", 1e-6),
        mscale=optional("mscale", 0.0),
        mscale_all_dim=optional("mscale_all_dim", 0.0),
        truncate=rope.boolean("truncate", True),
    )
