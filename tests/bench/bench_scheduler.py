"""Cost of the scheduler alone, in microseconds of Python per step. Run: python -m tests.bench.bench_scheduler

A CUDA decode step of an 8B model takes about 4 ms, so schedule() + commit() of 256 decodes must stay well under 1 ms.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from typing import TYPE_CHECKING

from engine.scheduler import KVCache, Scheduler, SchedulerConfig, Sequence
from engine.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable


def _config(max_batch_seqs: int = 256) -> SchedulerConfig:
    return SchedulerConfig(max_model_len=8192, max_batch_tokens=8192, max_batch_seqs=max_batch_seqs, prefill_chunk=8192)


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def decode_steps(num_seqs: int, depth: int, steps: int = 600) -> dict[str, float]:
    """Steady decode of `num_seqs` sequences whose page borders are spread out; `depth` plans in flight."""
    scheduler = Scheduler(_config(num_seqs), KVCache(num_seqs * 16))
    for seq_id in range(num_seqs):
        scheduler.add(Sequence(seq_id, [seq_id] * (1 + seq_id * 7 % 400), max_tokens=1500))
    in_flight = []
    schedule_us, commit_us = [], []
    for _ in range(100 + steps):
        start = time.perf_counter()
        plan = scheduler.schedule()
        middle = time.perf_counter()
        assert plan is not None
        in_flight.append(plan)
        if len(in_flight) < depth:
            continue
        plan = in_flight.pop(0)
        tokens = {item.seq.seq_id: 1 for item in plan.items if item.samples}
        before = time.perf_counter()
        scheduler.commit(plan, tokens)
        if plan.num_decodes == num_seqs:
            schedule_us.append((middle - start) * 1e6)
            commit_us.append((time.perf_counter() - before) * 1e6)
    total = [a + b for a, b in zip(schedule_us, commit_us)]
    return {
        "schedule_us_p50": statistics.median(schedule_us),
        "commit_us_p50": statistics.median(commit_us),
        "step_us_p50": statistics.median(total),
        "step_us_p99": statistics.quantiles(total, n=100)[98],
    }


def long_queue(num_waiting: int) -> dict[str, float]:
    """The same step with a full batch and a long queue behind it: must not cost more."""
    scheduler = Scheduler(_config(), KVCache(4096))
    for seq_id in range(256 + num_waiting):
        scheduler.add(Sequence(seq_id, [seq_id] * (1 + seq_id % 600), max_tokens=900))
    samples = []
    for _ in range(400):
        start = time.perf_counter()
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, {item.seq.seq_id: 1 for item in plan.items if item.samples})
        if plan.num_decodes == 256:
            samples.append((time.perf_counter() - start) * 1e6)
    return {"step_us_p50": statistics.median(samples)}


def admission(prompt_tokens: int, hit: bool) -> float:
    """Microseconds to hash, match and allocate one prompt (once in the life of a request)."""
    results = []
    for _ in range(20):
        scheduler = Scheduler(_config(), KVCache(256))
        prompt = list(range(prompt_tokens))
        for seq_id in range(2 if hit else 1):
            scheduler.add(Sequence(seq_id, prompt, max_tokens=1))
            start = time.perf_counter()
            plan = scheduler.schedule()
            elapsed = (time.perf_counter() - start) * 1e6
            assert plan is not None
            scheduler.commit(plan, {seq_id: 1})
        results.append(elapsed)
    return statistics.median(results)


def page_ops(num_pages: int = 65536) -> dict[str, float]:
    """Nanoseconds of allocate + release of one page, in a small and in a large pool (O(1): the same)."""
    result = {}
    for size in (64, num_pages):
        pool = KVCache(size)

        def churn(pool: KVCache = pool) -> None:
            for _ in range(20_000):
                pool.release(pool.allocate(1))

        result[f"allocate_release_ns_pool_{size}"] = min(_timed(churn) for _ in range(3)) / 20
    return result


def abort_from_queue(num_waiting: int = 20_000) -> float:
    """Microseconds to abort one of many waiting sequences."""
    scheduler = Scheduler(_config(), KVCache(64))
    for seq_id in range(num_waiting):
        scheduler.add(Sequence(seq_id, [1], max_tokens=1))
    middle = num_waiting // 2
    return _timed(lambda: [scheduler.finish(i, FinishReason.ABORT) for i in range(middle, middle + 1000)]) / 1000


def main() -> None:
    report = {
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "decode_1": decode_steps(1, 1),
        "decode_32": decode_steps(32, 1),
        "decode_256": decode_steps(256, 1),
        "decode_256_two_plans_in_flight": decode_steps(256, 2),
        "decode_256_queue_0": long_queue(0),
        "decode_256_queue_20000": long_queue(20_000),
        "admit_us_prompt_8000_miss": admission(8000, hit=False),
        "admit_us_prompt_8000_hit": admission(8000, hit=True),
        **page_ops(),
        "abort_waiting_us": abort_from_queue(),
    }
    json.dump(report, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
