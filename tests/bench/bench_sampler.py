"""Time of one sampled row by parameters and shape of the distribution: python tests/bench/bench_sampler.py [--json].

Targets at a vocabulary of 49,152: greedy <= 50 us, sampled <= 1 ms a row. numpy on one thread; microseconds, the least
and the median of many calls (they differ on a busy machine). `peaked` rows look like a language model's (a few likely
tokens), `flat` rows are the worst case for the filters (a nucleus of tens of thousands).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engine.sampler import SampleState, sample
from engine.stop import StopMatcher
from engine.types import SamplingParams

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy + penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "temperature": {},
    "top_k 50": {"top_k": 50},
    "top_p 0.95": {"top_p": 0.95},
    "top_p 0.9999": {"top_p": 0.9999},
    "min_p 0.05": {"min_p": 0.05},
    "all filters": {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1},
    "temperature + 5 logprobs": {"logprobs": 5},
    "greedy + 5 logprobs": {"temperature": 0.0, "logprobs": 5},
}


def make_row(kind: str, vocab_size: int) -> np.ndarray:
    rng = np.random.default_rng(vocab_size)
    row = rng.normal(0.0, 3.0 if kind == "peaked" else 0.3, (1, vocab_size)).astype(np.float32)
    if kind == "peaked":
        row[0, rng.choice(vocab_size, 40, replace=False)] += np.linspace(4, 12, 40, dtype=np.float32)
    return row


def measure(row: np.ndarray, params: SamplingParams, calls: int) -> tuple[float, float]:
    """(least, median) microseconds of sample() + append(), prompt of 1000 tokens, output growing by one a call."""
    rng = np.random.default_rng(1)
    state = SampleState(params, rng.integers(0, row.shape[1], 1000).tolist(), row.shape[1], 0)
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        result = sample(row, [state])[0]
        state.append(result.token_id)
        seconds.append(time.perf_counter() - start)
    return min(seconds) * 1e6, statistics.median(seconds) * 1e6


def stop_rate(text: str) -> float:
    """Million characters a second through a StopMatcher of four stop strings, four characters a push."""
    text *= 200_000 // len(text)
    pieces = [text[i : i + 4] for i in range(0, len(text), 4)]
    matcher = StopMatcher(["<|im_start|>", "<|im_end|>", "\n\nHuman:", "###"])
    start = time.perf_counter()
    for piece in pieces:
        matcher.push(piece)
    return len(text) / (time.perf_counter() - start) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--calls", type=int, default=100)
    args = parser.parse_args()
    results = []
    for vocab_size in (49_152, 151_936):
        for kind in ("peaked", "flat"):
            row = make_row(kind, vocab_size)
            for name, options in CASES.items():
                least, median = measure(row, SamplingParams(seed=1, max_tokens=1, **options), args.calls)
                results.append(
                    {"vocab": vocab_size, "row": kind, "case": name, "min_us": round(least), "p50_us": round(median)}
                )
                if not args.json:
                    print(f"{vocab_size:>7}  {kind:<6}  {name:<26} min {least:7.0f} us   p50 {median:7.0f} us")
    for name, text in (("plain text", "The quick brown fox. "), ("nearly a stop", "<|im_star ")):
        rate = stop_rate(text)
        results.append({"case": f"stop strings, {name}", "million_characters_per_second": round(rate, 2)})
        if not args.json:
            print(f"stop strings, {name}: {rate:.2f} million characters/s in tokens of 4")
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
