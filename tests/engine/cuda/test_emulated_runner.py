"""The whole CUDA path on the CPU: Engine, CudaRunner and every kernel of a step on the emulator, over a tiny model.

Oracles: ModelRunner's logits (float32; bf16 tolerance), engine/sampler.py on the very logits of the device, and the
rule that nothing but the sequence itself decides a bit.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.config import ModelConfig
from engine.core_config import CoreConfig
from engine.cuda.arena import WeightArena
from engine.cuda.runner import CudaRunner
from engine.cuda.step_ring import Kind, StepRingReader, StepRingWriter
from engine.engine import Engine
from engine.loader import load_weights
from engine.runner import ModelRunner
from engine.sampler import SampleState, sample, token_logprobs
from engine.types import SamplingParams, StepBatch
from tests.engine.overlap_world import Answers, drive, request
from tests.engine.runner_models import VARIANTS, Feeder, make_config, make_weights, prompt
from tests.kernels.emulated_step_device import EmulatedStepDevice, device_weights, emulated_runner
from tests.kernels.emulator import guarded_array
from tests.tiny import make_tiny_model

POISON = 7
NO_POISON = {POISON: -100.0}
BF16_LOGITS = 0.06
"""max|difference| / max|logit| of a row: three layers of bf16 operands (8 bits) against float32; 0.03 seen."""

PATHS = ["portable", "hopper"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", poison_token=POISON)


def tiny_runner(model_dir: Path, **options: Any) -> CudaRunner:
    model = ModelConfig.from_dir(model_dir)
    return emulated_runner(model, load_weights(model_dir, model), **{"num_pages": 24, "max_model_len": 1024, **options})


def emulated_engine(model_dir: Path, *, depth: int = 2, prefill_chunk: int = 128, **options: Any) -> Engine:
    runner = tiny_runner(model_dir, plans_in_flight=depth, **options)
    config = CoreConfig(
        model_dir=str(model_dir), backend="cuda", plans_in_flight=depth, prefill_chunk=prefill_chunk,
        max_batch_seqs=runner.sizes.max_batch_seqs, max_batch_tokens=runner.max_batch_tokens, max_model_len=1024,
    )  # type: ignore[arg-type]  # fmt: skip
    engine = Engine(config, ModelConfig.from_dir(model_dir), runner)
    runner.warm_up()
    return engine


def device_of(engine: Engine) -> EmulatedStepDevice:
    assert isinstance(engine.backend, CudaRunner) and isinstance(engine.backend.device, EmulatedStepDevice)
    return engine.backend.device


# ---- logits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_logits_of_every_family(variant: str) -> None:
    """Whole prompt over two pages against ModelRunner with the same bf16 weights; chunks and decode rows bit for bit
    as the whole; both kernel paths bit for bit as each other."""
    # Heads of 12 become 16: the kernels take multiples of 4 up to 64; the other odd sizes stay.
    model = make_config(variant)
    if model.head_dim % 4:
        model = dataclasses.replace(model, head_dim=28)
    weights = make_weights(model, bf16=True)
    feeder = Feeder([prompt(141, model.vocab_size)], 6)
    cpu = ModelRunner(model, weights, num_pages=6, num_threads=1, max_batch_tokens=256, max_model_len=256)
    expected = cpu.forward(feeder.batch([(0, 0, 141)]))
    whole = {}
    for path in PATHS:
        runner = emulated_runner(model, weights, num_pages=6, max_model_len=256, path=path)
        whole[path] = runner.forward(feeder.batch([(0, 0, 141)]))
        pieces = [(0, 0, 37), (0, 37, 38), (0, 38, 101), (0, 101, 140), (0, 140, 141)]
        cut = np.concatenate([runner.forward(feeder.batch([part])) for part in pieces])
        assert np.array_equal(whole[path], cut), f"{path}: chunks change bits"
    assert np.array_equal(whole["portable"], whole["hopper"])
    error = np.abs(whole["portable"] - expected).max(axis=1) / np.abs(expected).max(axis=1)
    assert error.max() < BF16_LOGITS


def test_a_batch_of_decodes_and_prefills_has_the_bits_of_each_alone(model_dir: Path) -> None:
    """Rows of five sequences in one pass, three of them decoding, against each alone."""
    model = ModelConfig.from_dir(model_dir)
    feeder = Feeder([prompt(length, 200, seed) + 10 for seed, length in enumerate((30, 131, 5, 64, 17))], 16)
    alone = {}
    for s, text in enumerate(feeder.prompts):
        runner = tiny_runner(model_dir, probe_slots=5)
        alone[s] = runner.forward(feeder.batch([(s, 0, len(text))]))
    runner = tiny_runner(model_dir, probe_slots=5)
    for s in (0, 1, 2):
        runner.forward(feeder.batch([(s, 0, len(feeder.prompts[s]) - 1)]))
    parts = [(0, 29, 30), (3, 0, 64), (1, 130, 131), (4, 0, 17), (2, 4, 5)]
    logits = runner.forward(feeder.batch(parts))
    assert logits.shape[1] == model.vocab_size
    row = 0
    for s, start, stop in parts:
        assert np.array_equal(logits[row : row + stop - start], alone[s][start:stop]), s
        row += stop - start


def test_more_logits_than_are_kept_at_once(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of rows give what one group gives."""
    from engine.cuda import probe_pass

    feeder = Feeder([prompt(90, 200) + 10], 8)
    expected = tiny_runner(model_dir).forward(feeder.batch([(0, 0, 90)]))
    monkeypatch.setattr(probe_pass, "LOGITS_ROWS", 32)
    assert np.array_equal(tiny_runner(model_dir).forward(feeder.batch([(0, 0, 90)])), expected)


@pytest.mark.parametrize(
    "change, error",
    [
        ({"token_ids": np.array([1, 260], np.int32)}, "token id"),
        ({"positions": np.array([1023, 1024], np.int32)}, "position"),
        ({"block_tables": np.array([[24]], np.int32)}, "page"),
        ({"logits_rows": np.array([2], np.int32)}, "logits_rows"),
        ({"block_tables": np.array([[0], [1]], np.int32)}, "2 sequences"),
    ],
)
def test_a_bad_batch_is_refused_before_anything_runs(model_dir: Path, change: dict[str, Any], error: str) -> None:
    runner = tiny_runner(model_dir)
    rows = np.arange(2, dtype=np.int32)
    batch = StepBatch(rows, rows, np.zeros(2, np.int32), np.array([[0]], np.int32), rows)
    with pytest.raises((ValueError, IndexError), match=error):
        runner.forward(dataclasses.replace(batch, **change))
    assert isinstance(runner.device, EmulatedStepDevice) and not runner.device.launched


# ---- the step loop ---------------------------------------------------------------------------------------------------


def traffic() -> list[Any]:
    """Drawn and greedy rows, penalties, several choices, echo, stops: everything that makes a step depend on others."""
    ban = {"logit_bias": NO_POISON}
    return [
        request("greedy", (prompt(5, 200) + 10).tolist(), max_tokens=10, logprobs=3, **ban),
        request("seeded", (prompt(150, 200, 1) + 10).tolist(), max_tokens=9, temperature=1.0, seed=5, top_p=0.9, **ban),
        request("two", (prompt(130, 200, 2) + 10).tolist(), n=2, max_tokens=8, temperature=1.2, seed=9, top_k=40,
                logprobs=0, **ban),
        request("penalties", (prompt(20, 200, 3) + 10).tolist(), max_tokens=14, temperature=0.7, seed=4, min_p=0.02,
                repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.4, **ban),
        request("echo", (prompt(140, 200, 4) + 10).tolist(), echo=True, max_tokens=3, logprobs=2, **ban),
        request("minimum", (prompt(9, 200, 8) + 10).tolist(), min_tokens=4, max_tokens=10,
                stop_token_ids=tuple(range(10, 250)), **ban),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def alone(model_dir: Path) -> Answers:
    """Each request by itself, one plan at a time, eager, no prefix cache."""
    answers = Answers()
    for message in traffic():
        engine = emulated_engine(model_dir, depth=1, cuda_graphs=False)
        answers.by_choice |= drive(engine, [message]).by_choice
    return answers


def same(one: Answers, other: Answers) -> None:
    assert one.by_choice.keys() == other.by_choice.keys()
    for key, answer in one.by_choice.items():
        assert answer == other.by_choice[key], key


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cuda_graphs": False},
        {"depth": 1},
        {"max_batch_seqs": 2},
        {"path": "hopper", "seed": 1},
        {"max_batch_seqs": 9, "max_batch_tokens": 700, "prefill_chunk": 256, "seed": 3},
    ],
    ids=str,
)
def test_the_engine_answers_the_same_in_any_company(model_dir: Path, alone: Answers, options: dict[str, Any]) -> None:
    """Tokens, logprob bits, prompt logprobs, reasons: graph or eager, one plan or two, any bucket and chunk, preempted
    or not, on both kernel paths, with threads in another order."""
    engine = emulated_engine(model_dir, **options)
    same(drive(engine, traffic()), alone)
    graphs = [key for key in device_of(engine).replayed if not key.startswith("decode 1 ")]
    assert bool(graphs) == options.get("cuda_graphs", True)


def test_the_start_tells_the_device_and_how_far_it_has_come(model_dir: Path) -> None:
    """The UUID is the GPU's, for a launcher that compares; warm-up reports every bucket, the last one included."""
    engine = emulated_engine(model_dir)
    assert engine.ready.device.backend == "cuda" and engine.ready.device.uuid.startswith("GPU-")
    calls: list[tuple[int, int]] = []
    engine.backend.warm_up(lambda done, total: calls.append((done, total)))
    assert isinstance(engine.backend, CudaRunner)
    count = len(engine.backend.sizes.buckets)
    assert calls == [(i, count) for i in range(1, count + 1)]


def test_preempted_sequences_answer_the_same(model_dir: Path) -> None:
    """Four sequences cross a page border in a pool that cannot hold them: their slots, counts and pages are rebuilt."""
    work = [
        request(str(i), (prompt(120 + i, 200, i) + 10).tolist(), max_tokens=12, temperature=1.0, seed=i, logprobs=1,
                repetition_penalty=1.4, frequency_penalty=0.3, min_tokens=10, echo=i == 0, logit_bias=NO_POISON)
        for i in range(4)
    ]  # fmt: skip
    expected = drive(emulated_engine(model_dir, depth=1, prefill_chunk=256, max_batch_tokens=300), work)
    engine = emulated_engine(model_dir, num_pages=5)
    same(drive(engine, work), expected)
    assert engine.scheduler.stats.preemptions > 0


def test_every_token_is_what_the_host_sampler_takes_from_the_devices_logits(model_dir: Path, alone: Answers) -> None:
    """The chosen token and its logprobs, from logits that forward() gives for the same positions."""
    for message in traffic():
        runner = tiny_runner(model_dir)
        for index in range(message.n):
            answer = alone[message.request_id, index]
            stop = [] if answer.stop_token_id is None else [answer.stop_token_id]
            output = [*answer.token_ids, *stop]
            ids = np.array([*message.prompt_ids, *output], np.int32)
            feeder = Feeder([ids], 8)
            logits = runner.forward(feeder.batch([(0, 0, len(ids))]))
            state = SampleState(message.params, message.prompt_ids, runner.model.vocab_size, index)
            start = len(message.prompt_ids) - 1
            for step, token in enumerate(output):
                (result,) = sample(logits[start + step : start + step + 1], [state])
                assert result.token_id == token, (message.request_id, step)
                if step < len(answer.logprobs):
                    assert result.logprob == answer.logprobs[step]
                state.append(token)
            if message.echo_logprobs:
                expected = [
                    token_logprobs(logits[p], int(ids[p + 1]), message.params.logprobs or 0) for p in range(start)
                ]
                assert answer.prompt_logprobs == [None, *expected]


def test_prefix_hit_and_miss(model_dir: Path) -> None:
    shared = (prompt(300, 200, 5) + 10).tolist()
    engine = emulated_engine(model_dir, max_batch_tokens=600)
    options = {"max_tokens": 6, "temperature": 1.0, "seed": 3, "logprobs": 2, "logit_bias": NO_POISON}
    first = drive(engine, [request("a", shared, **options)])["a"]
    assert engine.scheduler.stats.prefix_hit_tokens == 0
    second = drive(engine, [request("b", shared, **options)])["b"]
    assert engine.scheduler.stats.prefix_hit_tokens == 256
    assert first == second


def test_nan_fails_its_request_alone_and_says_where(model_dir: Path, alone: Answers) -> None:
    """Token 7's embedding is NaN: the device reports it, the neighbours do not notice, nobody finds its pages."""
    engine = emulated_engine(model_dir)
    answers = drive(engine, [request("poisoned", [20, 21, POISON, 22], max_tokens=5), *traffic()[:2]])
    failed = answers.by_choice.pop(("poisoned", 0))
    assert failed.finish == "error" and failed.where is not None
    assert (failed.where["op"], failed.where["layer"], failed.where["position"]) == ("rope", 0, 2)
    assert "nan" in str(failed.error).lower()
    (fault,) = answers.faults
    assert (fault.number, fault.kind) == (1, "nonfinite")
    assert {name: fault.where[name] for name in ("op", "layer", "head", "position")} == {
        "op": "rope", "layer": 0, "head": failed.where["head"], "position": 2,
    }  # fmt: skip
    for key, answer in answers.by_choice.items():
        assert answer == alone.by_choice[key]


def test_find_nonfinite_names_the_op(model_dir: Path) -> None:
    runner = tiny_runner(model_dir)
    clean, bad = Feeder([np.array([10, 11, 12], np.int32)], 4), Feeder([np.array([10, POISON, 12], np.int32)], 4)
    assert runner.find_nonfinite(clean.batch([(0, 0, 3)])) is None
    assert runner.find_nonfinite(bad.batch([(0, 0, 3)])) == (None, "embed", 1)
    assert runner.find_nonfinite(clean.batch([(0, 0, 3)])) is None  # what the bad one left in the pages does no harm


def test_golden_while_two_plans_are_in_flight(model_dir: Path, alone: Answers) -> None:
    text = (prompt(200, 200, 6) + 10).tolist()
    results = []
    for busy in (False, True):
        engine = emulated_engine(model_dir)
        replies: list[Any] = []
        take = engine.step

        def step(take: Any = take, replies: list[Any] = replies) -> Any:
            out = take()
            replies.extend(message for message in out if hasattr(message, "control_id"))
            return out

        engine.step = step  # type: ignore[method-assign]
        work = traffic() if busy else []
        if not busy:
            engine.control(1, "golden", {"prompt_ids": text})
        answers = drive(engine, work, {3: lambda engine=engine: engine.control(1, "golden", {"prompt_ids": text})})
        if busy:
            same(answers, alone)
        results.append(replies[0].result)
    assert results[0] == results[1] and results[0]["finite"] and results[0]["positions"] == 200


def test_checksum_of_the_arena(model_dir: Path) -> None:
    """A single bit that flips in the weights is found; kernels/checksum.py is the oracle."""
    from kernels.checksum import checksum

    model = ModelConfig.from_dir(model_dir)
    arena, _ = device_weights(model, load_weights(model_dir, model))
    runner = tiny_runner(model_dir)
    runner._arena.checksum = checksum(arena.data)

    def run() -> dict[str, Any]:
        job = runner.checksum()
        while True:
            try:
                next(job)
            except StopIteration as end:
                result: dict[str, Any] = end.value
                return result

    assert run()["ok"]
    assert isinstance(runner.device, EmulatedStepDevice)
    runner.device.buffers["weights"][12345] ^= 16
    assert not run()["ok"]


def test_checksum_of_many_pieces(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An arena that takes several launches: each leaves its sums where the others' are not."""
    from kernels.checksum import BLOCK_BYTES, PARTS, checksum, num_blocks

    monkeypatch.setattr("engine.cuda.arena.CHECKSUM_BLOCKS", 1)
    memory = guarded_array((2 * BLOCK_BYTES + 4096,), np.uint8)
    memory[...] = np.random.default_rng(3).integers(0, 256, memory.shape, np.uint8)
    sums = guarded_array((num_blocks(memory.nbytes) * PARTS,), np.uint64)
    runner = tiny_runner(model_dir)
    assert isinstance(runner.device, EmulatedStepDevice)
    runner._arena = WeightArena(
        runner.device, runner.prepared, start=memory.ctypes.data, nbytes=memory.nbytes, scratch=sums.ctypes.data,
        weights={}, checksum=checksum(memory.data),
    )  # fmt: skip
    runner.device.buffers["sums"] = sums.view(np.uint8)
    job, pieces = runner.checksum(), 0
    with pytest.raises(StopIteration) as end:
        while True:
            next(job)
            pieces += 1
    assert pieces == 3 and end.value.value["ok"]


def test_what_the_sampler_was_not_made_for_is_refused_at_once(model_dir: Path) -> None:
    engine = emulated_engine(model_dir)
    (message,) = engine.add(request("a", [10, 11], logprobs=21))
    assert message.refused and "logprobs" in str(message.error)  # type: ignore[union-attr]
    engine.backend.check(SampleState(SamplingParams(seed=1, max_tokens=1, logprobs=20), [10], 260, 0))


def test_step_times_and_kernels_reach_the_ring(model_dir: Path, tmp_path: Path) -> None:
    ring = StepRingWriter(str(tmp_path / "ring"), num_entries=4096)
    engine = emulated_engine(model_dir, ring=ring, profile=True)
    drive(engine, [request("a", (prompt(150, 200) + 10).tolist(), max_tokens=6, logit_bias=NO_POISON)])
    entries = StepRingReader(tmp_path / "ring").read()
    steps = entries[entries["kind"] != Kind.KERNEL]
    assert steps["kind"].tolist() == [Kind.EAGER] + [Kind.DECODE_GRAPH] * 5
    assert steps["tokens"].tolist() == [150, 1, 1, 1, 1, 1]
    assert np.all(steps["end_ns"] >= steps["begin_ns"])
    assert np.all(steps["begin_ns"][1:] >= steps["end_ns"][:-1])
    last = entries[(entries["kind"] == Kind.KERNEL) & (entries["step"] == steps["step"][-1])]
    ops = [(int(entry["tokens"]), int(entry["rows"])) for entry in last]
    layer = [(2, 0), (3, 0), (4, 0), (5, 0), (6, 0), (2, 0), (7, 0), (8, 0)]  # kernels/launch.py:Op
    assert ops == [(0, -1), (1, -1), *layer, *((op, 1) for op, _ in layer), (2, -1), (9, -1), (10, -1)]
