"""A bit of the weights that turns over: the checksum finds each, the golden answer those that its prompt meets.

In one process on the CPU backend; over HTTP through /admin/flip; on the CUDA runner over the emulated device.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from engine.config import ModelConfig
from engine.core_config import CoreConfig
from engine.engine import Engine
from engine.loader import load_weights
from engine.messages import ControlReply, FlipArgs
from tests.engine.streams import session
from tests.engine.test_uds import command, engine, wait_ready
from tests.kernels.emulated_step_device import EmulatedStepDevice, emulated_runner
from tests.serving import MODEL
from tests.tiny import VOCAB_SIZE, make_tiny_model

FLIPS = 200 if os.environ.get("APPLIANCE_FULL") else 40
PROMPT = [int(token) for token in np.random.default_rng(1).integers(0, VOCAB_SIZE, 64)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / MODEL)


def cpu_engine(model_dir: Path, *, allowed: bool = True) -> Engine:
    return Engine.load(
        CoreConfig(
            model_dir=str(model_dir), dtype="bfloat16", kv_tokens=1024, num_threads=1, allow_fault_injection=allowed
        )
    )


def control(engine: Engine, op: str, **args: Any) -> ControlReply:
    replies = engine.control(1, op, args)
    while not replies:
        replies = [message for message in engine.step() if isinstance(message, ControlReply)]
    (reply,) = replies
    assert isinstance(reply, ControlReply)
    return reply


def ask(engine: Engine, op: str, **args: Any) -> dict[str, Any]:
    reply = control(engine, op, **args)
    assert reply.ok, reply.error
    return reply.result


def test_each_flip_is_found_and_undone(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Random (weight, bit): the place by our own count of the tensors' elements, not by the arena's layout."""
    rng = np.random.default_rng(2)
    engine = cpu_engine(model_dir)
    try:
        healthy, sizes = ask(engine, "golden", prompt_ids=PROMPT)["sha256"], weight_bytes(model_dir)
        names, found = list(sizes), 0
        odds = np.array([sizes[name] for name in names]) / sum(sizes.values())
        for _ in range(FLIPS):
            name = names[rng.choice(len(names), p=odds)]
            place = {"tensor": name, "offset": int(rng.integers(sizes[name])), "bit": int(rng.integers(8))}
            done = ask(engine, "flip", **place)
            assert done["before"] ^ done["after"] == 1 << place["bit"]
            assert done["tensor"] == name
            assert not ask(engine, "checksum")["ok"], place
            found += ask(engine, "golden", prompt_ids=PROMPT)["sha256"] != healthy
            undone = ask(engine, "flip", **place)
            assert (undone["before"], undone["after"]) == (done["after"], done["before"])
        assert ask(engine, "checksum")["ok"]
        assert ask(engine, "golden", prompt_ids=PROMPT)["sha256"] == healthy
    finally:
        engine.close()
    with capsys.disabled():
        print(f"\n{FLIPS} flips: the checksum found {FLIPS}, a golden prompt of {len(PROMPT)} tokens {found}")
    assert found > FLIPS / 2, "most weights meet most prompts; only the embedding's other rows do not"


def weight_bytes(model_dir: Path) -> dict[str, int]:
    weights = load_weights(model_dir, ModelConfig.from_dir(model_dir), dtype="bfloat16")
    return {name: tensor.nbytes for name, tensor in weights.tensors.items()}


def test_what_golden_meets_and_what_it_does_not(model_dir: Path) -> None:
    """The top exponent bit of the row of a token of the prompt changes the answer; of another token it cannot."""
    unused = next(token for token in range(VOCAB_SIZE) if token not in PROMPT)
    row_bytes = 64 * 2  # hidden size x bfloat16
    engine = cpu_engine(model_dir)
    try:
        healthy = ask(engine, "golden", prompt_ids=PROMPT)["sha256"]
        for token, differs in ((PROMPT[0], True), (unused, False)):
            place = {"tensor": "embed", "offset": token * row_bytes + 1, "bit": 6}
            ask(engine, "flip", **place)
            assert (ask(engine, "golden", prompt_ids=PROMPT)["sha256"] != healthy) is differs
            assert not ask(engine, "checksum")["ok"]
            ask(engine, "flip", **place)
    finally:
        engine.close()


def test_flip_is_refused(model_dir: Path) -> None:
    engine = cpu_engine(model_dir)
    try:
        sizes = weight_bytes(model_dir)
        for args, text in (
            ({"bit": 8}, "<= 7"),
            ({"offset": 3}, "bit"),
            ({"bit": 0, "offset": -1}, ">= 0"),
            ({"bit": 0, "tensor": "layers.9.qkv"}, "no tensor 'layers.9.qkv'"),
            ({"bit": 0, "tensor": "embed", "offset": sizes["embed"] + 64}, "beyond embed"),
            ({"bit": 0, "offset": engine.backend.weights_bytes}, "beyond the weights"),
        ):
            reply = control(engine, "flip", **args)
            assert reply.refused and text in (reply.error or ""), reply.error
        assert ask(engine, "checksum")["ok"]
    finally:
        engine.close()


def test_flip_needs_the_option(model_dir: Path) -> None:
    engine = cpu_engine(model_dir, allowed=False)
    try:
        reply = control(engine, "flip", bit=0, offset=0)
        assert reply.refused and "--allow-fault-injection" in (reply.error or "")
        assert ask(engine, "checksum")["ok"]
    finally:
        engine.close()


def test_a_release_cannot_turn_it_on() -> None:
    """Only the admin of the host can, in engine.arguments of appliance.toml."""
    from appliance.engine_arguments import bad_engine_arguments
    from appliance.release_build import _HOST_OPTIONS

    assert "allow_fault_injection" in _HOST_OPTIONS
    assert bad_engine_arguments(["--allow-fault-injection"]) is None


def test_device_memory(model_dir: Path) -> None:
    """The CUDA runner, device emulated: one byte is read and written at the tensor's address, nothing beside it."""
    model = ModelConfig.from_dir(model_dir)
    runner = emulated_runner(model, load_weights(model_dir, model), num_pages=24, max_model_len=1024)
    assert isinstance(runner.device, EmulatedStepDevice)
    memory = runner.device.buffers["weights"]
    before = memory.copy()
    start = runner.tensor_offsets()["layers.1.down"]
    from engine.faults import flip

    done = flip(runner, FlipArgs(bit=5, offset=7, tensor="layers.1.down"))
    assert done["offset"] == start + 7
    assert list(np.nonzero(memory != before)[0]) == [start + 7]
    assert memory[start + 7] == before[start + 7] ^ 32
    flip(runner, FlipArgs(bit=5, offset=start + 7))
    assert (memory == before).all()
    for outside in (-1, runner.weights_bytes):
        with pytest.raises(ValueError, match="outside"):
            runner.flip_bit(outside, 0)


async def test_over_http(model_dir: Path, tmp_path: Path) -> None:
    """As the watchdog will see it: golden and checksum answer otherwise afterwards, streams of clients go on."""
    path, log = tmp_path / "s", tmp_path / "log"
    async with asyncio.timeout(100):
        with engine(command(model_dir, path, "--allow-fault-injection"), log) as process:
            async with session(path) as http:
                await wait_ready(http, process, log)
                question = {"args": {"prompt_ids": PROMPT}}
                before = (await post(http, "golden", question))[1]["result"]
                assert (await post(http, "checksum", {}))[1]["result"]["ok"]
                place = {"args": {"tensor": "final_norm", "offset": 3, "bit": 6}}
                status, answer = await post(http, "flip", place)
                assert status == 200 and answer["result"]["tensor"] == "final_norm"
                assert not (await post(http, "checksum", {}))[1]["result"]["ok"]
                assert (await post(http, "golden", question))[1]["result"] != before
                status, answer = await post(http, "flip", {"args": {"bit": 9}})
                assert status == 400
        assert "fault_injected" in log.read_text()
        with engine(command(model_dir, path), log) as process:
            async with session(path) as http:
                await wait_ready(http, process, log)
                status, answer = await post(http, "flip", place)
                assert status == 400 and "--allow-fault-injection" in answer["error"]["message"]
                assert (await post(http, "checksum", {}))[1]["result"]["ok"]


async def post(http: aiohttp.ClientSession, op: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with http.post(f"http://engine/admin/{op}", json=body) as response:
        answer: dict[str, Any] = await response.json()
        return response.status, answer
