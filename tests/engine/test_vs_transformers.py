"""The engine against Hugging Face transformers (float32, CPU): tests/golden/make_tiny.py and make_smollm2.py made the
values. Every way of computing a sequence must agree with them within TOLERANCE, and with our others bit for bit."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from engine.config import ModelConfig
from engine.rope import attention_scaling, inverse_frequencies
from tests.golden.engine_replay import Engine, Replay
from tests.golden.golden_file import Golden, GoldenPrompt
from tests.golden.tiny_models import LONG, TINY_MODELS, make_tiny

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.types import Float32Array

GOLDEN = Path(__file__).parents[1] / "golden"
TOLERANCE = 1e-4  # max|a-b| / max|b| of the logits of one position
FULL = os.environ.get("APPLIANCE_FULL") == "1"
CHUNKS = (1, 7, 64, 128, 200)
SMOLLM2_PROMPTS = range(6) if FULL else (0, 3)  # by index: all, or the chat one and the two-language one
GREEDY_PROMPTS = range(20) if FULL else (0, 2, 11, 17)


def assert_close(prompt: GoldenPrompt, columns: np.ndarray, logits: Float32Array) -> None:
    errors = prompt.errors(logits, columns)
    worst = int(np.argmax(errors))
    assert errors[worst] <= TOLERANCE, f"max|a-b|/max|b| is {errors[worst]:.2e} at position {worst} of {len(errors)}"


def assert_same_bits(rows: dict[int, Float32Array], reference: Float32Array, *, start: int = 0) -> None:
    """`rows` has every position from `start` on, with the bits of `reference` (n, vocab)."""
    assert sorted(rows) == list(range(start, len(reference)))
    different = [position for position, row in rows.items() if not np.array_equal(row, reference[position])]
    assert not different, f"bits differ at positions {different[:5]} ({len(different)} of {len(rows)})"


# ---- every family, tiny random weights -----------------------------------------------------------------------------


class Tiny:
    """A tiny model in the engine, its golden values, and its logits of each prompt in one forward pass."""

    def __init__(self, name: str, directory: Path) -> None:
        self.golden = Golden.load(GOLDEN / f"tiny_{name}.npz")
        self.golden.check_weights(make_tiny(name, directory))
        # Longer than max_position_embeddings on purpose for dynamic scaling, which says what happens there.
        self.engine = Engine.load(directory, num_pages=12, max_model_len=512)
        config = TINY_MODELS[name].config
        limit = config["max_position_embeddings"] if name == "rope_dynamic" else None
        self.prompts = [
            prompt
            for prompt in self.golden.prompts
            if limit is None or len(prompt.token_ids) <= limit or prompt.mode == "stepwise"
        ]
        self.ids = [prompt.token_ids.tolist() for prompt in self.prompts]
        self.whole = [self.engine.in_chunks(ids, len(ids)) for ids in self.ids]


@pytest.fixture(scope="module", params=[name for name in TINY_MODELS if name != LONG])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(request.param, tmp_path_factory.mktemp("tiny") / request.param)


def test_prefill_of_every_family(tiny: Tiny) -> None:
    assert len(tiny.prompts) >= 3
    for prompt, logits in zip(tiny.prompts, tiny.whole):
        assert_close(prompt, tiny.golden.columns, logits)


def test_chunks_and_decode_have_the_bits_of_prefill(tiny: Tiny) -> None:
    for ids, whole in zip(tiny.ids, tiny.whole):
        for size in CHUNKS:
            if size < len(ids):
                assert_same_bits(dict(enumerate(tiny.engine.in_chunks(ids, size))), whole)


def test_batched_prefill_and_decode_without_prefix_cache(tiny: Tiny) -> None:
    replay = Replay(tiny.engine, prefix_cache=False)
    prompts = [max(1, len(ids) - 20) for ids in tiny.ids]  # the last 20 tokens are decoded
    for rows, whole in zip(replay.run(list(zip(tiny.ids, prompts))), tiny.whole):
        assert_same_bits(rows, whole)


def test_prefix_cache_gives_the_bits_of_a_cold_run(tiny: Tiny) -> None:
    """Cached pages are written by chunks and decode steps of another request, and read by a prefill in mid-sequence."""
    ids, whole = tiny.ids[-1], tiny.whole[-1]
    replay = Replay(tiny.engine, prefix_cache=True, prefill_chunk=256)
    (cold,) = replay.run([(ids, 100)])  # positions 100 on are decoded
    assert replay.cached_tokens == [0]
    assert_same_bits(cold, whole)
    for prompt in (len(ids), 257):
        (warm,) = replay.run([(ids, prompt)])
        assert replay.cached_tokens == [256]
        assert_same_bits(warm, whole, start=256)


def test_preemption_gives_the_same_bits(tiny: Tiny) -> None:
    """Four sequences in a pool that holds two of them: some are thrown out while decoding and computed again."""
    ids, whole = tiny.ids[-1], tiny.whole[-1]
    replay = Replay(tiny.engine, prefix_cache=False, num_pages=6)
    for rows in replay.run([(ids, prompt) for prompt in (120, 110, 100, 90)]):
        assert_same_bits(rows, whole)
    assert replay.scheduler.stats.preemptions > 0


def test_positions_in_the_thousands(tmp_path: Path) -> None:
    golden = Golden.load(GOLDEN / f"tiny_{LONG}.npz")
    golden.check_weights(make_tiny(LONG, tmp_path / "model"))
    (prompt,) = golden.prompts
    ids = prompt.token_ids.tolist()
    engine = Engine.load(tmp_path / "model", num_pages=40, max_model_len=len(ids) + 1)
    logits = engine.in_chunks(ids, 1000)
    assert_close(prompt, golden.columns, logits)
    assert_same_bits(dict(enumerate(engine.in_chunks(ids, 384))), logits)


def test_dynamic_rope_past_its_limit_depends_on_the_position_alone(tmp_path: Path) -> None:
    """transformers' whole-prompt logits differ there from its own token-by-token ones; we compute the latter."""
    tiny = Tiny("rope_dynamic", tmp_path / "model")
    limit = tiny.engine.config.rope.original_max_position
    assert limit is not None
    past = [prompt for prompt in tiny.golden.prompts if len(prompt.token_ids) > limit]
    assert {prompt.mode for prompt in past} == {"whole", "stepwise"}
    for prompt in past:
        ids = prompt.token_ids.tolist()
        errors = prompt.errors(tiny.engine.in_chunks(ids, len(ids)), tiny.golden.columns)
        if prompt.mode == "stepwise":
            assert errors.max() <= TOLERANCE
        else:
            assert errors.max() > 10 * TOLERANCE  # else "stepwise" would prove nothing


@pytest.mark.parametrize(
    "case", json.loads((GOLDEN / "rope_frequencies.json").read_text())["cases"], ids=lambda case: case["name"]
)
def test_rope_frequencies_round_as_in_transformers(case: dict[str, Any]) -> None:
    """An angle is position * frequency: a bit of the frequency is worth a thousand times more at position 1,000.
    A few float32 powers may be off by one unit in the last place (torch's own are). Computed in float64 throughout and
    rounded at the end, 40 % of the entries differ: that fails here, and at 1,000 positions in the logits."""
    config = ModelConfig.from_json(case["config"])
    expected = np.array([float.fromhex(value) for value in case["inv_freq"]], np.float32)
    found = inverse_frequencies(config.rope, config.head_dim, seq_len=case["seq_len"])
    assert found.dtype == np.float32
    units = np.abs(found.view(np.int32).astype(np.int64) - expected.view(np.int32))
    assert units.max() <= 1 and np.count_nonzero(units) <= 0.1 * len(units), units.tolist()
    assert attention_scaling(config.rope) == pytest.approx(case["attention_scaling"], rel=1e-7)


# ---- the real model ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2_directory() -> Path:
    from appliance.log import ApplianceError
    from appliance.models import ModelStore

    store = ModelStore()
    try:
        return store.path("smollm2")
    except ApplianceError:
        pass  # not pulled yet
    try:
        store.pull("smollm2")
    except ApplianceError as error:
        pytest.skip(f"SmolLM2 cannot be pulled here: {error}")
    return store.path("smollm2")


@pytest.fixture(scope="module")
def smollm2(smollm2_directory: Path) -> Iterator[Engine]:
    engine = Engine.load(smollm2_directory, num_pages=64, max_model_len=1024)
    yield engine
    engine.runner.close()


def golden_json(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((GOLDEN / name).read_text(encoding="utf-8"))
    return value


def test_smollm2_weights_are_what_transformers_dequantises(smollm2_directory: Path) -> None:
    from safetensors import safe_open

    expected = golden_json("smollm2_weights.json")["tensors"]
    found: dict[str, str] = {}
    for path in smollm2_directory.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                data = file.get_tensor(key).astype("<f4")
                found[key] = hashlib.sha256(data.tobytes()).hexdigest()
    assert found == expected


def test_smollm2_logits(smollm2: Engine) -> None:
    """Whole, chunked, and through the scheduler with a decoded tail; then again from the prefix cache."""
    golden = Golden.load(GOLDEN / "smollm2_logits.npz")
    replay = Replay(smollm2, prefix_cache=True)
    for index in SMOLLM2_PROMPTS:
        prompt, length = golden.prompts[index], golden.meta["prompt_lengths"][index]
        ids = prompt.token_ids.tolist()
        whole = smollm2.in_chunks(ids, len(ids))
        assert_close(prompt, golden.columns, whole)
        assert_same_bits(dict(enumerate(smollm2.in_chunks(ids, 50))), whole)
        (rows,) = replay.run([(ids, length)])
        assert_same_bits(rows, whole)
        if len(ids) > 128:
            (rows,) = replay.run([(ids, len(ids))])
            assert replay.cached_tokens[0] >= 128
            assert_same_bits(rows, whole, start=replay.cached_tokens[0])


def test_smollm2_greedy_text(smollm2: Engine) -> None:
    """Token for token; all prompts decode in one running batch."""
    golden = golden_json("smollm2_greedy.json")
    records = [golden["prompts"][index] for index in GREEDY_PROMPTS]
    count = len(records[0]["token_ids"])
    answers = Replay(smollm2, prefix_cache=False).greedy([record["prompt_ids"] for record in records], count)
    for record, answer in zip(records, answers):
        assert answer == record["token_ids"], f"{record['name']}: expected {record['text']!r}"


# ---- the comparison itself -----------------------------------------------------------------------------------------


WITH_LOGITS = sorted(path for path in GOLDEN.glob("*.npz") if path.stem != "smollm2_forced")  # that is tests/gpu's


@pytest.mark.parametrize("path", WITH_LOGITS, ids=lambda path: path.stem)
def test_golden_values_are_worth_the_tolerance(path: Path) -> None:
    """transformers agrees with itself (attention kernels, whole and stepwise) ten times better than we must, and
    every way of misreading the config moves the logits a hundred times more than we may."""
    golden = Golden.load(path)
    assert max(golden.meta["eager_vs_sdpa"], golden.meta["whole_vs_stepwise"]) < TOLERANCE / 10
    assert all(moved > 100 * TOLERANCE for moved in golden.meta.get("moved_by", {}).values())
    prompt = golden.prompts[-1]
    row = prompt.full_logits[-1:] if len(prompt.full_positions) else None
    if row is not None:
        position = prompt.full_positions[-1:]
        assert prompt.errors(row, golden.columns, position)[0] == 0
        for wrong in (row + 2 * TOLERANCE * np.abs(row).max(), row * np.nan, row[:, ::-1]):
            assert prompt.errors(wrong, golden.columns, position)[0] > TOLERANCE


def test_every_tiny_model_has_golden_values() -> None:
    assert {path.stem for path in GOLDEN.glob("tiny_*.npz")} == {f"tiny_{name}" for name in TINY_MODELS}
