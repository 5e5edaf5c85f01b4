"""Tokenizer speed, beside the peers, in one run: python tests/bench/bench_tokenizer.py [TOKENIZER ...]

MB/s (10**6 bytes of UTF-8) on one thread of `tokenizers`, `tiktoken` (an Encoding made from the mergeable ranks of the
same file; its ids are compared too where its split rule is known) and ours; then time(2n)/time(n) of the hostile
inputs. Best of several runs, in thread CPU time, so that a busy machine hurts all of them alike.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path[:0] = [str(Path(__file__).parents[1] / "engine"), str(Path(__file__).parents[2])]

import tiktoken
import tokenizers
from tokenizer_files import REAL, hostile_texts, real_dir

from engine.tokenizer import Tokenizer
from engine.tokenizer.spec import GPT2_PATTERN, SPLIT_PATTERNS, Spec, Split

MEGABYTE = 1_000_000


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


def best(run: Callable[[], object], times: int) -> float:
    seconds = []
    for _ in range(times):
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


def speed(name: str, times: int) -> None:
    ours = Tokenizer.from_dir(real_dir(name))
    theirs = tokenizers.Tokenizer.from_file(str(real_dir(name) / "tokenizer.json"))
    peer = tiktoken_peer(ours.spec)
    for kind, text in corpus().items():
        size = len(text.encode())
        part = text[: len(text) // 8]  # the slow peer gets less text; it is linear here
        ours_speed = size / best(lambda: ours.encode(text), times) / MEGABYTE
        hf = len(part.encode()) / best(lambda: theirs.encode(part, add_special_tokens=False), 2) / MEGABYTE
        assert ours.encode(part, add_special_tokens=False) == theirs.encode(part, add_special_tokens=False).ids
        tik = f"{size / best(lambda: peer.encode_ordinary(text), times) / MEGABYTE:7.1f}" if peer else "      -"
        print(f"{name:9} {kind:28} ours {ours_speed:7.1f}  tiktoken {tik}  tokenizers {hf:6.2f} MB/s", flush=True)


def scaling(name: str, size: int) -> None:
    ours = Tokenizer.from_dir(real_dir(name))
    small, large = hostile_texts(size), hostile_texts(2 * size)
    worst, slowest = ("", 0.0), ("", float("inf"))
    for kind, text in small.items():
        one, two = (best(lambda t=t: ours.encode(t), 5) for t in (text, large[kind]))  # type: ignore[misc]
        worst = max(worst, (kind, two / one), key=lambda item: item[1])
        slowest = min(slowest, (kind, len(text.encode()) / one / MEGABYTE), key=lambda item: item[1])
    print(f"{name:9} worst time(2n)/time(n) {worst[1]:.2f} ({worst[0]}); slowest {slowest[1]:.1f} MB/s ({slowest[0]})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=REAL, metavar="TOKENIZER", help=", ".join(REAL))
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--hostile-chars", type=int, default=300_000)
    options = parser.parse_args()
    for name in options.names:
        speed(name, options.times)
    for name in options.names:
        scaling(name, options.hostile_chars)


if __name__ == "__main__":
    main()
