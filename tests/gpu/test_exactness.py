"""The same request gives the same token ids and the same logprob bits on a GPU, whatever else is there and however it
is computed. Reference: the request alone, one plan at a time, kernel by kernel, no prefix cache."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.engine import Engine
from engine.messages import Generate
from tests.engine.overlap_world import Answer, Answers, drive, request
from tests.gpu.device import Gpu
from tests.gpu.engines import NO_POISON, POISON, gpu_engine, make_small_model, text

FULL = os.environ.get("APPLIANCE_FULL") == "1"
RUNS = 1000 if FULL else 64


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_model(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(scope="module")
def engine(gpu: Gpu, model_dir: Path) -> Iterator[Engine]:
    with gpu_engine(gpu, model_dir, kv_tokens=1 << 17, prefix_cache=False) as engine:
        yield engine


def probe(name: str = "probe", **changes: Any) -> Generate:
    """Over a page border, drawn, with penalties and five logprobs a token."""
    params = {"max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "seed": 77, "repetition_penalty": 1.1, "logprobs": 5,
              "logit_bias": NO_POISON}  # fmt: skip
    return request(name, text(245, 1), **{**params, **changes})


def neighbour(name: str, seed: int, **changes: Any) -> Generate:
    rng = np.random.default_rng(seed)
    params = {"max_tokens": int(rng.integers(30, 120)), "temperature": float(rng.choice([0.0, 0.7, 1.3])), "seed": seed,
              "logit_bias": NO_POISON}  # fmt: skip
    return request(name, text(int(rng.integers(1, 700)), seed), **{**params, **changes})


@pytest.fixture(scope="module")
def alone(gpu: Gpu, model_dir: Path) -> Answer:
    options: dict[str, Any] = {"kv_tokens": 4096, "prefix_cache": False, "plans_in_flight": 1, "cuda_graphs": False}
    with gpu_engine(gpu, model_dir, **options) as engine:
        return drive(engine, [probe()])["probe"]


def run_beside(engine: Engine, others: list[Generate], message: Generate) -> Answer:
    """The answer to `message`, whose neighbours are decoding when it arrives and are aborted when it is done."""
    answers = Answers()
    for other in others:
        answers.take(engine.add(other))
    while engine.scheduler.num_waiting:
        answers.take(engine.step())
    answers.take(engine.add(message))
    while (message.request_id, 0) not in answers.by_choice or answers[message.request_id].finish is None:
        answers.take(engine.step())
    for other in others:
        engine.abort(other.request_id)
    while engine.has_work:
        engine.step()
    return answers[message.request_id]


def test_one_answer_at_every_batch_size(engine: Engine, alone: Answer) -> None:
    """Batch sizes 1..64 with random neighbours; one unique output and one unique set of logprob bits."""
    rng = np.random.default_rng(5)
    for run in range(RUNS):
        size = run % 64 + 1
        others = [neighbour(f"n{i}", int(rng.integers(1 << 30)), max_tokens=200) for i in range(size - 1)]
        answer = run_beside(engine, others, probe())
        assert answer == alone, f"run {run}, batch {size}"


@pytest.mark.parametrize("chunk", [128, 256, 512, 8192])
def test_chunk_sizes(engine: Engine, chunk: int) -> None:
    """A prompt of 1,500 tokens in chunks beside a decoding neighbour, and whole."""
    limits = dataclasses.replace(engine.scheduler.config, prefill_chunk=chunk)
    before, engine.scheduler.config = engine.scheduler.config, limits
    try:
        message = probe()
        message = Generate(request_id="probe", prompt_ids=text(1500, 3), params=message.params)
        whole = drive(engine, [message])["probe"]
        cut = run_beside(engine, [neighbour("n", 4, max_tokens=300)], message)
    finally:
        engine.scheduler.config = before
    assert cut == whole


def test_forty_eight_of_the_same_among_others(engine: Engine, alone: Answer) -> None:
    """Co-resident and identical: no two rows of a step differ by where they stand in it."""
    probes = [probe(f"p{i}") for i in range(48)]
    answers = drive(engine, [m for i, p in enumerate(probes) for m in ([p, neighbour(f"n{i}", i)] if i < 16 else [p])])
    for message in probes:
        assert answers[message.request_id] == alone, message.request_id


def test_seeded_beside_unseeded_and_greedy_beside_drawn(engine: Engine) -> None:
    """What the neighbours draw does not move a seeded row."""
    messages = [probe(f"seed{i}", seed=i, temperature=1.0, repetition_penalty=1.0) for i in range(6)]
    messages.append(probe("greedy", temperature=0.0))
    solo = {m.request_id: drive(engine, [m])[m.request_id] for m in messages}
    rng = np.random.default_rng(8)
    others = [neighbour(f"n{i}", int(rng.integers(1 << 30))) for i in range(20)]
    answers = drive(engine, [*others, *messages])
    for name, answer in solo.items():
        assert answers[name] == answer
    assert len({tuple(solo[f"seed{i}"].token_ids) for i in range(6)}) == 6  # the seeds do matter


@pytest.mark.parametrize(
    "options",
    [
        {"cuda_graphs": False},
        {"plans_in_flight": 1},
        {"max_batch_seqs": 1},
        {"max_batch_seqs": 200, "max_batch_tokens": 1024},
    ],
    ids=str,
)
def test_graph_or_eager_and_one_plan_or_two(gpu: Gpu, model_dir: Path, alone: Answer, options: dict[str, Any]) -> None:
    with gpu_engine(gpu, model_dir, kv_tokens=1 << 16, prefix_cache=False, **options) as engine:
        others = [neighbour(f"n{i}", 50 + i) for i in range(min(7, engine.config.max_batch_seqs - 1))]
        assert drive(engine, [probe(), *others])["probe"] == alone


def test_every_bucket_gives_the_bits_of_eager(gpu: Gpu, model_dir: Path, alone: Answer) -> None:
    """As many of the same request as each bucket holds, and one fewer: all equal, graph by graph."""
    with gpu_engine(gpu, model_dir, kv_tokens=1 << 17, prefix_cache=False, max_batch_seqs=96) as engine:
        for bucket in engine.backend.sizes.buckets:  # type: ignore[attr-defined]
            for count in sorted({bucket, max(1, bucket - 1)}):
                answers = drive(engine, [probe(f"p{i}") for i in range(count)])
                assert all(answers[f"p{i}"] == alone for i in range(count)), f"{count} rows in bucket {bucket}"


def test_prefix_hit_and_miss(gpu: Gpu, model_dir: Path) -> None:
    message = Generate(request_id="probe", prompt_ids=text(700, 9), params=probe().params)
    with gpu_engine(gpu, model_dir, kv_tokens=1 << 15) as engine:
        miss = drive(engine, [message])["probe"]
        assert engine.scheduler.stats.prefix_hit_tokens == 0
        hit = drive(engine, [message, *(neighbour(f"n{i}", i) for i in range(5))])["probe"]
        assert engine.scheduler.stats.prefix_hit_tokens == 640
    assert hit == miss


def test_after_preemption(gpu: Gpu, model_dir: Path, alone: Answer) -> None:
    """A pool of 12 pages for ten sequences that cross a page border: the youngest are thrown out and come back."""
    with gpu_engine(gpu, model_dir, kv_tokens=12 * 128, prefix_cache=False) as engine:
        answers = drive(engine, [probe(f"p{i}") for i in range(10)])
        assert engine.scheduler.stats.preemptions > 0
    assert all(answers[f"p{i}"] == alone for i in range(10))


def test_prompt_logprobs_have_the_bits_of_a_decode(engine: Engine, alone: Answer) -> None:
    """Echo scores a token that decode would have drawn: logprob by logprob the same bits, though one comes out of
    prefill rows and the other out of decode rows."""
    ids = [*text(245, 1), *alone.token_ids]
    echo = request("echo", ids, echo=True, max_tokens=0, logprobs=5, logit_bias=NO_POISON)
    scores = drive(engine, [echo])["echo"].prompt_logprobs
    assert len(scores) == len(ids) and scores[0] is None
    assert scores[245:] == alone.logprobs


def test_golden_hash_does_not_depend_on_the_traffic(engine: Engine) -> None:
    ids = text(900, 11)

    def golden(traffic: list[Generate]) -> dict[str, Any]:
        for message in traffic:
            engine.add(message)
        engine.control(1, "golden", {"prompt_ids": ids})
        replies: list[Any] = []
        while engine.has_work:
            replies += [message for message in engine.step() if hasattr(message, "control_id")]
        result: dict[str, Any] = replies[0].result
        return result

    idle = golden([])
    assert idle["finite"] and idle["positions"] == 900
    assert golden([neighbour(f"n{i}", 90 + i) for i in range(12)]) == idle


def test_nan_fails_its_request_alone_and_says_where(engine: Engine, alone: Answer) -> None:
    poisoned = request("poisoned", [20, 21, POISON, 22], max_tokens=5)
    answers = drive(engine, [poisoned, probe(), neighbour("n", 3)])
    failed = answers["poisoned"]
    assert failed.finish == "error" and failed.where is not None
    assert (failed.where["op"], failed.where["layer"], failed.where["position"]) == ("rope", 0, 2)
    assert answers["probe"] == alone


def test_weights_checksum_is_that_of_the_load(engine: Engine) -> None:
    engine.control(5, "checksum", {})
    replies: list[Any] = []
    while engine.has_work:
        replies += [message for message in engine.step() if hasattr(message, "control_id")]
    assert replies[0].result["ok"]
