"""The CUDA sampler beside engine/sampler.py: the same bodies on the emulator (small) and on a GPU (large)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from engine.errors import NumericError
from engine.sampler import SampleState, sample, token_logprobs
from engine.types import SampleResult, SamplingParams, TokenLogprob
from kernels import sampler
from kernels.launch import Launch


class Machine(Protocol):
    """Device memory and an executor."""

    def zeros(self, num_bytes: int) -> int: ...
    def write(self, address: int, array: np.ndarray) -> None: ...
    def read(self, address: int, shape: Any, dtype: Any) -> np.ndarray: ...
    def run(self, launch: Launch) -> None: ...


@dataclass
class Row:
    """One row of logits and what is asked of it. `target` None: sample."""

    logits: np.ndarray
    slot: int
    state: SampleState
    target: int | None = None


@dataclass
class DeviceSampler:
    machine: Machine
    shape: sampler.SamplerShape
    num_multiprocessors: int = 132
    update_words: int = 1 << 16
    _at: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape, zeros = self.shape, self.machine.zeros
        self.ld = -(-shape.vocab_size // 4) * 4
        self._at = {
            "memory": zeros(shape.num_bytes),
            "logits": zeros(shape.max_rows * self.ld * 4),
            "rows": zeros(shape.max_rows * sampler.ROW_DESCRIPTOR.itemsize),
            "last_token": zeros(shape.num_slots * 4),
            "results": zeros(shape.max_rows * sampler.ROW_RESULT.itemsize),
            "scores": zeros(shape.max_rows * shape.scores.itemsize),
            "updates": zeros(self.update_words * 4),
        }

    def set_slots(self, states: dict[int, SampleState]) -> None:
        packed = [(slot, sampler.pack_slot(self.shape, state)) for slot, state in states.items()]
        for buffer, count in sampler.pack_updates(packed, self.update_words):
            assert buffer.size <= self.update_words
            self.machine.write(self._at["updates"], buffer)
            self.machine.run(sampler.update_launch(self.shape, self._at["memory"], self._at["updates"], count))

    def step(
        self, rows: Sequence[Row | None], greedy_only: bool = False
    ) -> list[SampleResult | TokenLogprob | str | None]:
        """Results of the rows; None = padding. A scoring row that fails gives its error's text."""
        shape = self.shape
        logits = np.full((len(rows), self.ld), np.nan, np.float32)
        descriptors = np.zeros(len(rows), sampler.ROW_DESCRIPTOR)
        descriptors["slot"] = shape.num_slots - 1
        for i, row in enumerate(rows):
            if row is None:
                continue
            logits[i, : shape.vocab_size] = row.logits
            mode = sampler.SAMPLE if row.target is None else sampler.SCORE
            descriptors[i] = (row.slot, row.state.num_generated, mode, row.target or 0, 7)
        self.machine.write(self._at["logits"], logits)
        self.machine.write(self._at["rows"], descriptors)
        poison = np.full(len(rows) * shape.scores.itemsize, 0xCD, np.uint8)
        self.machine.write(self._at["scores"], poison)
        self.machine.write(self._at["results"], poison[: len(rows) * sampler.ROW_RESULT.itemsize])
        for launch in sampler.sample_launches(
            shape, self._at["memory"], logits=self._at["logits"], ld=self.ld, rows=self._at["rows"], num_rows=len(rows),
            last_token=self._at["last_token"], results=self._at["results"], scores=self._at["scores"],
            greedy_only=greedy_only, num_multiprocessors=self.num_multiprocessors,
        ):  # fmt: skip
            self.machine.run(launch)
        results = self.machine.read(self._at["results"], len(rows), sampler.ROW_RESULT)
        scores = self.machine.read(self._at["scores"], len(rows), shape.scores)
        out: list[SampleResult | TokenLogprob | str | None] = []
        for i, row in enumerate(rows):
            if row is None:
                out.append(None)
            elif row.target is None:
                out += sampler.sample_results(results[i : i + 1], scores[i : i + 1], [row.state])
            else:
                try:
                    out.append(sampler.prompt_logprob(results[i], scores[i], shape.vocab_size))
                except NumericError as error:
                    out.append(error.message)
        return out

    def last_tokens(self) -> np.ndarray:
        return self.machine.read(self._at["last_token"], self.shape.num_slots, np.int32)


def expected(row: Row | None) -> SampleResult | TokenLogprob | str | None:
    """engine/sampler.py's answer."""
    if row is None:
        return None
    if row.target is None:
        return sample(row.logits[None, :], [row.state])[0]
    try:
        return token_logprobs(row.logits, row.target, row.state.params.logprobs or 0)
    except NumericError as error:
        return error.message


def bits(result: Any) -> Any:
    """Doubles as their bits: 0.0 and -0.0 are different answers."""
    if isinstance(result, SampleResult):
        return (result.token_id, result.error, bits(result.logprob))
    if isinstance(result, TokenLogprob):
        return (result.token_id, result.logprob.hex(), [(i, value.hex()) for i, value in result.top])
    return result


def check(device: DeviceSampler, rows: Sequence[Row | None], greedy_only: bool = False) -> list[Any]:
    """Run the rows and compare with the CPU; returns the answers."""
    wanted = [expected(row) for row in rows]
    got = device.step(rows, greedy_only)
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        row = rows[i]
        assert bits(a) == bits(b), f"row {i}: {a} instead of {b}; {row and row.state.params}"
    last = device.last_tokens()
    for row, result in zip(rows, wanted, strict=True):
        if row is not None and isinstance(result, SampleResult) and result.error is None:
            assert last[row.slot] == result.token_id
    return got


# ---- rows and parameters ---------------------------------------------------------------------------------------------

KINDS = {
    "peaked": lambda rng, n: rng.normal(0, 3, n) + 12 * (rng.random(n) < 0.01),
    "flat": lambda rng, n: rng.normal(0, 0.1, n),
    "equal": lambda rng, n: np.zeros(n),
    "signed zeros": lambda rng, n: np.where(rng.random(n) < 0.5, -0.0, 0.0),
    "ties": lambda rng, n: np.round(rng.normal(0, 1, n)),
    "two values": lambda rng, n: np.where(rng.random(n) < 0.5, 1.0, 2.0),
    "some -inf": lambda rng, n: np.where(rng.random(n) < 0.3, -np.inf, rng.normal(0, 1, n)),
    "only one finite": lambda rng, n: np.where(np.arange(n) == n // 2, 3.0, -np.inf),
    "huge": lambda rng, n: rng.choice([-3e38, 3e38, 1e38, 0.0], n),
    "tiny steps": lambda rng, n: 1000 + rng.integers(0, 5, n) * 6e-5,
    "cauchy": lambda rng, n: rng.standard_cauchy(n),
    "clumped": lambda rng, n: np.where(rng.random(n) < 0.9, rng.normal(0, 1e-6, n), rng.normal(-15, 5, n)),
    "far below": lambda rng, n: np.where(rng.random(n) < 5 / n, 30.0, rng.normal(-90, 1, n)),
    "denormal": lambda rng, n: rng.integers(-3, 4, n) * 1e-45,
    "like a model's": lambda rng, n: (
        rng.normal(-1, 2.3, n) + np.where(rng.random(n) < 60 / n, rng.uniform(4, 12, n), 0)
    ),
}
BAD_KINDS = {
    "NaN": lambda rng, n: np.where((rng.random(n) < 0.01) | (np.arange(n) == n // 2), np.nan, rng.normal(0, 1, n)),
    "negative NaN": lambda rng, n: np.where(np.arange(n) == n // 3, -np.nan, rng.normal(0, 1, n)),
    "+inf": lambda rng, n: np.where(np.arange(n) >= n - 2, np.inf, rng.normal(0, 1, n)),
    "NaN and inf": lambda rng, n: np.where(np.arange(n) == 0, np.nan, rng.choice([np.nan, np.inf, -np.inf, 0.0], n)),
    "-inf": lambda rng, n: np.full(n, -np.inf),
}


def make_row(kind: str, seed: int, size: int) -> np.ndarray:
    row = {**KINDS, **BAD_KINDS}[kind](np.random.default_rng(seed), size).astype(np.float32)
    if kind in KINDS and not np.isfinite(row.max()):
        row[0] = 0
    return row


def random_params(rng: np.random.Generator, vocab_size: int, max_logprobs: int, max_edits: int) -> SamplingParams:
    """Any mix of the parameters, each off often enough that every path is taken."""

    def maybe(value: Any, off: Any, chance: float = 0.4) -> Any:
        return value if rng.random() < chance else off

    num_bias = int(rng.integers(1, min(max_edits // 2, vocab_size) + 1))
    bias_ids = rng.choice(vocab_size, num_bias, replace=False)
    stops = tuple(int(i) for i in rng.choice(vocab_size, min(3, vocab_size), replace=False))
    return SamplingParams(
        seed=int(rng.integers(0, 2**63)) * 2 + int(rng.integers(0, 2)),
        max_tokens=100,
        min_tokens=maybe(int(rng.integers(1, 4)), 0, 0.3),
        temperature=float(rng.choice([0.0, 1.0, 1.0, 0.7, 0.05, 1.9, float(rng.uniform(0.01, 2))])),
        top_k=maybe(int(rng.choice([1, 2, 20, 50, 700, vocab_size - 1, vocab_size, 2**31 - 1])), 0),
        top_p=maybe(float(rng.choice([0.9, 0.95, 0.3, 1e-12, 0.99999, float(rng.uniform(1e-3, 1))])), 1.0, 0.5),
        min_p=maybe(float(rng.choice([0.05, 1.0, 0.3, 1e-9])), 0.0, 0.3),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2)), 1.0, 0.3),
        presence_penalty=maybe(float(rng.uniform(-2, 2)), 0.0, 0.3),
        frequency_penalty=maybe(float(rng.uniform(-2, 2)), 0.0, 0.3),
        logit_bias={int(i): float(rng.uniform(-100, 100)) for i in bias_ids} if rng.random() < 0.25 else {},
        logprobs=maybe(int(rng.integers(0, max_logprobs + 1)), None, 0.4),
        stop_token_ids=stops[:2],
        eos_token_ids=stops[2:],
    )


def check_random_requests(
    device: DeviceSampler, seed: int, num_rows: int, *, kinds: Sequence[str] = tuple(KINDS), steps: int = 4
) -> None:
    """Random requests over several steps, with scoring, padding and now and then bad rows among them. Counts for
    penalties live on the device: the host's SampleState is told each token, and both must agree to the end."""
    rng = np.random.default_rng(seed)
    vocab_size, limits = device.shape.vocab_size, device.shape
    states = []
    for _ in range(num_rows):
        prompt = [int(i) for i in rng.integers(0, vocab_size, int(rng.integers(0, 30)))]
        params = random_params(rng, vocab_size, limits.max_logprobs, limits.max_edits - 4)
        states.append(SampleState(params, prompt, vocab_size, int(rng.integers(0, 3))))
    slots = [int(i) for i in rng.permutation(limits.num_slots - 1)[:num_rows]]
    device.set_slots(dict(zip(slots, states, strict=True)))
    for step in range(steps):
        rows: list[Row | None] = []
        for slot, state in zip(slots, states, strict=True):
            kind = str(rng.choice(kinds)) if rng.random() < 0.97 else str(rng.choice(list(BAD_KINDS)))
            target = int(rng.integers(0, vocab_size)) if rng.random() < 0.15 else None
            row = Row(make_row(kind, int(rng.integers(0, 2**32)), vocab_size), slot, state, target)
            rows.append(row if step != 2 or rng.random() < 0.9 else None)
        for item, result in zip(rows, check(device, rows), strict=True):
            if item is not None and isinstance(result, SampleResult) and result.error is None:
                item.state.append(result.token_id)
