"""Tokenizer speed, beside the peers, in one run: python -m tests.bench.bench_tokenizer [--json] [TOKENIZER ...]

MB/s (10**6 bytes of UTF-8) on one thread of `tokenizers`, `tiktoken` (an Encoding made from the mergeable ranks of the
same file) and ours; then the worst time(2n)/time(n) of the hostile inputs, from 50 000 characters up. Best of several
runs, in thread CPU time, so that a busy machine hurts all of them alike.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path[:0] = [str(Path(__file__).parents[1] / "engine"), str(Path(__file__).parents[2])]

import pytest  # noqa: E402
import tiktoken  # noqa: E402
import tokenizers  # noqa: E402
from tokenizer_files import REAL, hostile_texts, real_dir  # noqa: E402

from engine.tokenizer import Tokenizer  # noqa: E402
from engine.tokenizer.spec import GPT2_PATTERN, SPLIT_PATTERNS, Spec, Split  # noqa: E402

MEGABYTE = 1_000_000
WORDY = {"distinct words", "white space of all kinds", "CJK without a space"}  # many different words


def corpus() -> dict[str, str]:
    """Text that every machine with Python has: its license and documentation strings, its source, and other scripts."""
    root = Path(os.__file__).parent
    code = "".join(p.read_text(errors="ignore") for p in sorted(root.glob("*.py"))[:110])
    topics = root / "pydoc_data" / "topics.py"
    namespace: dict[str, Any] = {}
    exec(compile(topics.read_text(), str(topics), "exec"), namespace)
    english = "\n".join(namespace["topics"].values())
    other = "机器学习是人工智能的一个分支。Машинное обучение — класс методов. 機械学習とは、データから学ぶ。" * 4000
    return {"English": english, "Python source": code, "Chinese, Russian, Japanese": other}


SHORT_SECONDS = 0.02


def best(run: Callable[[], object], times: int, before: Callable[[], object] | None = None) -> float:
    """Least CPU seconds of `times` runs; of five times as many where a run is so short that chance decides."""
    seconds: list[float] = []
    while len(seconds) < times or (len(seconds) < 5 * times and min(seconds) < SHORT_SECONDS):
        if before:
            before()
        start = time.thread_time()
        run()
        seconds.append(time.thread_time() - start)
    return min(seconds)


def tiktoken_peer(spec: Spec) -> tiktoken.Encoding | None:
    """tiktoken merges by token id, so it stands in only for byte-level files whose ids follow the merges."""
    if not spec.byte_level:
        return None
    pattern = (
        GPT2_PATTERN
        if spec.split is Split.GPT2
        else next(p for p, n in SPLIT_PATTERNS.items() if n == spec.max_numbers)
    )
    keys = [key for key in spec.keys if key is not None]
    ranks = {key: rank for rank, key in enumerate(dict.fromkeys(keys))}
    missing = [bytes([b]) for b in range(256) if bytes([b]) not in ranks]
    ranks.update({key: len(ranks) + at for at, key in enumerate(missing)})
    return tiktoken.Encoding("peer", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


def speed(name: str, times: int) -> Iterator[dict[str, Any]]:
    ours = Tokenizer.from_dir(real_dir(name))
    theirs = tokenizers.Tokenizer.from_file(str(real_dir(name) / "tokenizer.json"))
    peer = tiktoken_peer(ours.spec)
    for kind, text in corpus().items():
        yield {"tokenizer": name, "text": kind, **compare(ours, theirs, peer, text, times)}


def compare(
    ours: Tokenizer, theirs: tokenizers.Tokenizer, peer: tiktoken.Encoding | None, text: str, times: int
) -> dict[str, float | None]:
    size = len(text.encode())
    part = text[: len(text) // 8]  # the slow peer gets less text; it is linear here
    assert ours.encode(part, add_special_tokens=False) == theirs.encode(part, add_special_tokens=False).ids
    fast = size / best(lambda: ours.encode(text), times) / MEGABYTE
    slow = len(part.encode()) / best(lambda: theirs.encode(part, add_special_tokens=False), 2) / MEGABYTE
    tik = size / best(lambda: peer.encode_ordinary(text), times) / MEGABYTE if peer else None
    return {"ours": round(fast, 1), "tiktoken": tik and round(tik, 1), "tokenizers": round(slow, 2)}


def scaling(name: str, largest: int) -> dict[str, Any]:
    """The worst time(2n)/time(n) over the hostile inputs, for n from 50 000 characters up to `largest` / 2.

    Only texts that take a millisecond count: below that the ratio is noise. A tokenizer remembers words, so that the
    same text again is cheaper the more of it is still remembered; other words are encoded in between.
    """
    ours = Tokenizer.from_dir(real_dir(name))
    rng = random.Random(1)
    forget = " ".join("".join(rng.choices("bcdfghjklm", k=9)) for _ in range(100_000))
    sizes = [50_000 * 2**k for k in range(16) if 50_000 * 2**k <= largest]
    texts = [hostile_texts(size) for size in sizes]
    rows, slowest = [], (float("inf"), "")
    for kind in texts[0]:
        seconds = []
        for text in (each[kind] for each in texts):
            seconds.append(
                best(partial(ours.encode, text), 5, before=partial(ours.encode, forget) if kind in WORDY else None)
            )
            slowest = min(slowest, (len(text.encode()) / seconds[-1] / MEGABYTE, kind))
        for size, (one, two) in zip(sizes, itertools.pairwise(seconds), strict=False):
            if one > 1e-3:
                rows.append((two / one, f"{kind}, {size} characters"))
    worst, at = max(rows)
    return {
        "tokenizer": name,
        **{"worst time(2n)/time(n)": round(worst, 2), "of": at},
        **{"slowest MB/s": round(slowest[0], 1), "at": slowest[1]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=REAL, metavar="TOKENIZER", help=", ".join(REAL))
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--hostile-chars", type=int, default=1_600_000, help="of the largest hostile text")
    parser.add_argument("--json", action="store_true", help="one JSON line at the end instead of a table")
    options = parser.parse_args()
    result: dict[str, Any] = {"rows": [], "hostile": [], "unavailable": {}}
    for name in options.names:
        try:
            real_dir(name)
        except (pytest.skip.Exception, pytest.fail.Exception) as reason:
            result["unavailable"][name] = str(reason)
            continue
        result["rows"] += speed(name, options.times)
        result["hostile"].append(scaling(name, options.hostile_chars))
    if options.json:
        print(json.dumps(result))
        return
    for row in [*result["rows"], *result["hostile"]]:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    for name, reason in result["unavailable"].items():
        print(f"{name}: not measured: {reason}")


if __name__ == "__main__":
    main()
