"""Golden answers: the prompts, the file, and when a comparison is allowed to say "different"."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from fake_launcher import FakeFleet
from release_helpers import LIGHT, add, paths_fixture, release_command, store_fixture  # noqa: F401  # fixtures

from appliance.engine_calls import EngineCalls, EngineUnavailable
from appliance.golden import (
    Golden,
    GoldenAnswer,
    Verdict,
    compare,
    device_slug,
    golden_path,
    golden_prompts,
    manifest_digest,
    prompts_of,
    read_golden,
    write_golden,
)
from appliance.golden_record import TOLERANCE, compare_forced
from appliance.models import ModelStore
from appliance.paths import Paths
from appliance.releases import ReleaseError, ReleaseRefused, ReleaseStore
from engine.core_config import CoreConfig
from engine.engine import Engine
from engine.tokenizer import Tokenizer
from engine.types import StepBatch
from tests.tiny import SPECIAL, make_tiny_model

PAGE = 128


def a_golden(paths: Paths, **changes: object) -> Golden:
    fields = {
        "release": "v1", "manifest_sha256": manifest_digest(paths, "v1"), "device": "NVIDIA H200",
        "engine_version": "1", "recorded": "now", "recorded_from": ["GPU-1", "GPU-2"], "agreed": "two-gpus",
        "weights_checksum": "w", "prompts": [GoldenAnswer(name="short", prompt_ids=[1, 2], sha256="0" * 64)],
    }  # fmt: skip
    return Golden(**(fields | changes))  # type: ignore[arg-type]


# -- the prompts -------------------------------------------------------------------------------------------------------


def test_prompts_cover_what_they_should(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "m")
    prompts = dict(golden_prompts(Tokenizer.from_dir(model), 2048))
    assert len(prompts["short"]) < PAGE
    assert len(prompts["pages"]) > 2 * PAGE, "two page boundaries are crossed"
    special = {256 + SPECIAL.index(name) for name in ("<|im_start|>", "<|im_end|>")}
    assert special <= set(prompts["special"])
    assert max(prompts["bytes"]) >= 128 - 33, "bytes beyond ASCII"


@pytest.mark.parametrize("name", ["short", "pages", "bytes"])
def test_ids_are_those_of_the_peer_library(tmp_path: Path, name: str) -> None:
    """The texts, found again by decoding, give the same ids with Hugging Face's tokenizers."""
    model = make_tiny_model(tmp_path / "m")
    peer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = dict(golden_prompts(Tokenizer.from_dir(model), 2048))[name]
    assert peer.encode(peer.decode(ids, skip_special_tokens=False)).ids == ids


def test_a_short_context_and_a_missing_template(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "m", max_position=64)
    (model / "tokenizer_config.json").write_text("{}")
    prompts = dict(golden_prompts(Tokenizer.from_dir(model), 64))
    assert {len(ids) <= 63 for ids in prompts.values()} == {True} and len(prompts["pages"]) == 63
    assert set(range(256, 260)) <= set(prompts["special"])


def test_the_releases_own_context_counts(store: ReleaseStore, paths: Paths) -> None:
    from appliance.releases import ReleaseOptions

    release = add(store, options=ReleaseOptions(max_model_len=100))
    assert {len(ids) <= 99 for _, ids in prompts_of(paths, release)} == {True}
    assert {len(ids) <= 49 for _, ids in prompts_of(paths, release, context=50)} == {True}


# -- the file ----------------------------------------------------------------------------------------------------------


def test_written_once_and_read_back(store: ReleaseStore, paths: Paths) -> None:
    add(store)
    assert read_golden(paths, "v1", "NVIDIA H200") is None
    golden = a_golden(paths)
    path = write_golden(paths, golden)
    assert path == paths.release("v1") / "golden" / "NVIDIA-H200.json" and path.stat().st_mode & 0o777 == 0o444
    assert read_golden(paths, "v1", "NVIDIA H200") == golden
    assert store.golden_devices("v1") == ("NVIDIA-H200",) and store.verify("v1").ok
    with pytest.raises(ReleaseRefused, match="there already"):
        write_golden(paths, golden)


@pytest.mark.parametrize(
    "old, new",
    [('"w"', '"x"'), ("0" * 64, "1" + "0" * 63), ('"two-gpus"', '"two-starts"'), ('"NVIDIA H200"', '"NVIDIA H100"')],
)
def test_an_edited_file_is_found(store: ReleaseStore, paths: Paths, old: str, new: str) -> None:
    add(store)
    path = write_golden(paths, a_golden(paths))
    path.chmod(0o644)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ReleaseError, match="digest"):
        read_golden(paths, "v1", "NVIDIA H200")
    assert list(store.verify("v1").problems) == ["golden/NVIDIA-H200.json"]


def test_a_file_of_another_release_or_device_is_found(store: ReleaseStore, paths: Paths) -> None:
    add(store)
    add(store, "v2", model_name="other")
    path = write_golden(paths, a_golden(paths))
    for target, device in (("v2", "NVIDIA H200"), ("v1", "NVIDIA A100")):
        golden_path(paths, target, device).write_bytes(path.read_bytes())
        with pytest.raises(ReleaseError, match="belongs to v1 on NVIDIA H200"):
            read_golden(paths, target, device)
    path.unlink()
    write_golden(paths, a_golden(paths, manifest_sha256="f" * 64))
    with pytest.raises(ReleaseError, match="other files"):
        read_golden(paths, "v1", "NVIDIA H200")


@pytest.mark.parametrize("device", ["", "...", "/", "\n"])
def test_a_device_without_a_name(device: str) -> None:
    with pytest.raises(ReleaseError, match="cannot name a file"):
        device_slug(device)


# -- comparing ---------------------------------------------------------------------------------------------------------


def running(paths: Paths) -> Path:
    return paths.engine_socket(0, "v1")


def test_verdicts(store: ReleaseStore, paths: Paths, capsys: pytest.CaptureFixture[str]) -> None:
    """DIFFERENT only on evidence; everything that hides the arithmetic is INCONCLUSIVE."""
    with FakeFleet(paths) as fleet:
        assert release_command(capsys, "add", "v1", "--model", "tiny")[0] == 0
        assert release_command(capsys, "use", "v1")[0] == 0
        same = compare(paths, "v1", running(paths))
        assert (same.verdict, same.device, same.prompts, same.differences) == (Verdict.SAME, "cpu", 4, ())

        def verdict(**script: object) -> Verdict:
            fleet.script(0, **script)
            return compare(paths, "v1", running(paths)).verdict

        assert verdict(salt={"v1": "!"}) is Verdict.DIFFERENT
        assert len(compare(paths, "v1", running(paths)).differences) == 4
        assert verdict(salt={}, nan=["v1"]) is Verdict.DIFFERENT
        assert verdict(nan=[], weights={"v1": "!"}) is Verdict.DIFFERENT
        assert verdict(weights={}, flipped=["v1"]) is Verdict.DIFFERENT
        assert verdict(flipped=[]) is Verdict.SAME
        assert verdict(device="NVIDIA H200") is Verdict.INCONCLUSIVE  # nothing was recorded there
        assert not compare(paths, "v1", running(paths)).recorded
        assert verdict(device=None, garbled=["v1"]) is Verdict.INCONCLUSIVE
        assert verdict(garbled=[]) is Verdict.SAME
    found = compare(paths, "v1", running(paths))
    assert found.verdict is Verdict.INCONCLUSIVE and found.recorded and "no answer" in str(found.reason)
    assert [verdict.exit_code for verdict in Verdict] == [0, 1, 3]


def test_a_damaged_file_is_an_error_not_a_verdict(
    store: ReleaseStore, paths: Paths, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeFleet(paths):
        release_command(capsys, "add", "v1", "--model", "tiny")
        release_command(capsys, "use", "v1")
        path = golden_path(paths, "v1", "cpu")
        path.chmod(0o644)
        path.write_text(path.read_text().replace("two-starts", "two-gpus"))
        with pytest.raises(ReleaseError, match="digest"):
            compare(paths, "v1", running(paths))
        code, answer = release_command(capsys, "use", "v1")
        assert code == 0 and answer["changed"] is False  # it serves; nothing is judged anew


@pytest.mark.slow
def test_recorded_hashes_are_those_of_the_logits(
    store: ReleaseStore, paths: Paths, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real engine over its socket, against the model run here, whole prompt by whole prompt; then the same release
    name with other weights in memory is told apart."""
    with FakeFleet(paths, kind="real") as fleet:
        code, answer = release_command(capsys, "add", "v1", "--model", "tiny", *LIGHT)
        assert (code, answer["golden"]) == (0, ["cpu"])
        golden = read_golden(paths, "v1", "cpu")
        assert golden is not None and golden.agreed == "two-starts" and golden.recorded_from == ["CPU-0"]
        assert fleet.log(0) == ["run v1", "stop v1"] * 2 and fleet.running(0) == {}
        engine = Engine.load(
            CoreConfig(model_dir=str(paths.release("v1") / "model"), kv_tokens=1024, max_batch_tokens=512)
        )
        for item in golden.prompts:
            ids = np.array(item.prompt_ids, np.int32)
            rows = np.arange(len(ids), dtype=np.int32)
            table = np.arange(-(-len(ids) // PAGE), dtype=np.int32)[None]
            logits = engine.backend.forward(StepBatch(ids, rows, np.zeros_like(rows), table, rows))
            assert hashlib.sha256(np.ascontiguousarray(logits, np.float32).tobytes()).hexdigest() == item.sha256
        engine.close()

        other = make_tiny_model(paths.etc.parents[1] / "other", seed=9)
        ModelStore(paths.models).add(other, "other")
        assert release_command(capsys, "add", "v2", "--model", "other", "--golden", "skip", *LIGHT)[0] == 0
        assert fleet.ask(0, "run", release="v2")["ok"]
        wait_until_ready(fleet, "v2")
        found = compare(paths, "v1", paths.engine_socket(0, "v2"))
        assert found.verdict is Verdict.DIFFERENT and len(found.differences) == 1 + len(golden.prompts)


def wait_until_ready(fleet: FakeFleet, release: str) -> None:
    for _ in range(600):
        if fleet.running(0).get(release) == "ready":
            return
        time.sleep(0.05)
    raise AssertionError(f"{release} is {fleet.running(0)}")


# -- asking an engine --------------------------------------------------------------------------------------------------


def test_an_engine_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.sock", tmp_path):
        with pytest.raises(EngineUnavailable, match="no answer") as error:
            EngineCalls(path).state()
        assert error.value.exit_code == 3


def test_tolerance_of_the_oracle() -> None:
    """The largest difference counts, NaN is no agreement, and no position is no agreement either."""
    a, b = [[(-1.0, -0.5), (-2.0, -0.25)]], [[(-1.1, -0.5), (-2.0, -0.5)]]
    found = compare_forced(a, b)
    assert found.positions == 2 and found.largest_difference == pytest.approx(0.25) and 0.25 <= TOLERANCE < 0.3
    assert compare_forced([[(float("nan"), 0.0)]], [[(0.0, 0.0)]]).largest_difference == float("inf")
    assert compare_forced([], []).largest_difference == float("inf")


def test_tolerance_is_what_was_measured() -> None:
    """bf16_gap_change of tests/golden: the most that bfloat16 moved a lead in transformers itself."""
    with np.load(Path(__file__).parents[1] / "golden" / "smollm2_forced.npz") as file:
        measured = json.loads(str(file["meta"]))["bf16_gap_change"]
    assert measured <= TOLERANCE <= measured * 1.02
