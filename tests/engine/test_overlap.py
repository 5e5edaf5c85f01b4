"""Step n+1 is launched while step n runs: what a client sees must be what one step at a time gives, to the bit,
whatever ends in between. The backend here computes a step when it is collected: a launch never knows the step before.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backend import StepWork
from engine.core import CoreProcess
from engine.engine import Engine
from engine.errors import DeviceLost, EngineError
from engine.messages import CoreMessage, Fatal, Generate, Tokens
from engine.ring import Ring
from tests.engine.overlap_world import Answers, SpyBackend, drive, make_engine, request
from tests.tiny import make_tiny_model

FULL = os.environ.get("APPLIANCE_FULL") == "1"
POISON = 7  # a token whose embedding is NaN
NO_POISON = {POISON: -100.0}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", poison_token=POISON)


def spy(engine: Engine) -> SpyBackend:
    assert isinstance(engine.backend, SpyBackend)
    return engine.backend


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(i * 37 + seed * 11 + 20) % 200 + 10 for i in range(length)]


def mixed_requests() -> list[Generate]:
    """Everything that makes a step depend on the one before it."""
    ban = {"logit_bias": NO_POISON}
    return [
        request("greedy", prompt(5), max_tokens=40, logprobs=3, **ban),
        request("seeded", prompt(300, 1), max_tokens=30, temperature=1.0, seed=5, top_p=0.9, **ban),
        request("three", prompt(130, 2), n=3, max_tokens=25, temperature=1.2, seed=9, logprobs=0, **ban),
        request("penalties", prompt(20, 3), max_tokens=60, temperature=0.7, repetition_penalty=1.3,
                frequency_penalty=0.5, presence_penalty=0.4, seed=4, **ban),
        request("echo", prompt(400, 4), echo=True, max_tokens=3, logprobs=2, **ban),
        request("echo only", prompt(150, 5), echo=True, max_tokens=0, logprobs=1, **ban),
        request("one token prompt", prompt(1, 6), echo=True, max_tokens=5, logprobs=1, **ban),
        request("one", prompt(3, 7), max_tokens=1, **ban),
        request("minimum", prompt(9, 8), min_tokens=6, max_tokens=30, stop_token_ids=tuple(range(10, 250)), **ban),
    ]  # fmt: skip


def same(one: Answers, other: Answers) -> None:
    assert one.by_choice.keys() == other.by_choice.keys()
    for key, answer in one.by_choice.items():
        assert answer == other.by_choice[key], key


def test_launch_comes_before_the_collect_of_the_step_before(model_dir: Path) -> None:
    engine = make_engine(model_dir, depth=2)
    drive(engine, [request("a", prompt(3), max_tokens=6, logit_bias=NO_POISON)])
    events = spy(engine).events
    for n in range(1, 6):
        assert events.index(("launch", n + 1)) < events.index(("collect", n))
    assert [number for kind, number in events if kind == "collect"] == [1, 2, 3, 4, 5, 6]  # six tokens, no step more


@pytest.mark.parametrize("options", [{}, {"prefix_cache": False}, {"max_batch_seqs": 3}], ids=str)
def test_two_plans_in_flight_answer_as_one(model_dir: Path, options: dict[str, Any]) -> None:
    """Token ids, logprobs, prompt logprobs, reasons: all equal."""
    alone = {}
    for message in mixed_requests():
        alone |= drive(make_engine(model_dir, depth=1), [message]).by_choice
    reference = Answers()
    reference.by_choice = alone
    for depth in (1, 2):
        same(drive(make_engine(model_dir, depth=depth, **options), mixed_requests()), reference)


def test_preemption_in_flight(model_dir: Path) -> None:
    """Four sequences grow over a page border in a pool that cannot hold them: those thrown out have a row in flight."""
    traffic = [
        request(str(i), prompt(110 + i, i), max_tokens=150, temperature=1.0, seed=i, repetition_penalty=1.2, logprobs=1,
                logit_bias=NO_POISON, echo=i == 0)
        for i in range(4)
    ]  # fmt: skip
    expected = Answers()
    for message in traffic:
        expected.by_choice |= drive(make_engine(model_dir, depth=1), [message]).by_choice
    for depth in (1, 2):
        engine = make_engine(model_dir, depth=depth, pages=6)
        same(drive(engine, traffic), expected)
        assert engine.scheduler.stats.preemptions > 0


def test_stop_token_in_flight_leaves_no_token_behind(model_dir: Path) -> None:
    """The stop is seen when the next step is already launched: its row is dropped, its token never sent."""
    free = drive(make_engine(model_dir, depth=1), [request("a", prompt(5), max_tokens=30, logit_bias=NO_POISON)])["a"]
    k = next(i for i in range(4, 30) if free.token_ids[i] not in free.token_ids[:i])
    stop = free.token_ids[k]
    engine = make_engine(model_dir, depth=2)
    answer = drive(engine, [request("a", prompt(5), max_tokens=30, stop_token_ids=(stop,), logit_bias=NO_POISON)])["a"]
    assert answer.token_ids == free.token_ids[:k]
    assert (answer.finish, answer.stop_token_id) == ("stop", stop)
    launched = [n for kind, n in spy(engine).events if kind == "launch"]
    assert len(launched) == k + 2  # k tokens, the stop, and the row computed for nothing


def test_abort_in_flight_frees_pages_within_two_steps_and_disturbs_nobody(model_dir: Path) -> None:
    neighbour = request("b", prompt(150, 1), max_tokens=40, temperature=1.0, seed=3, logit_bias=NO_POISON)
    expected = drive(make_engine(model_dir, depth=1), [neighbour])["b"]
    engine = make_engine(model_dir, depth=2)
    held: list[int] = []
    victim = request("a", prompt(500, 2), max_tokens=200, logit_bias=NO_POISON)

    def abort() -> None:
        held.append(engine.kv_cache.free_pages)
        engine.abort("a")

    def look() -> None:
        held.append(engine.kv_cache.free_pages)

    answers = drive(engine, [victim, neighbour], {12: abort, 14: look})
    assert held[1] - held[0] >= 4  # the 500 tokens' pages
    assert answers["a"].finish is None  # whoever aborts has left: nothing is sent any more
    assert answers["b"] == expected


def test_deadline_in_flight(model_dir: Path) -> None:
    neighbour = request("b", prompt(40, 1), max_tokens=60, logit_bias=NO_POISON)
    expected = drive(make_engine(model_dir, depth=1), [neighbour])["b"]
    engine = make_engine(model_dir, depth=2)
    late = request("a", prompt(20), max_tokens=1500, logit_bias=NO_POISON, deadline=time.monotonic() + 0.05)
    answers = drive(engine, [late, neighbour])
    assert answers["a"].finish == "deadline"
    assert 0 < len(answers["a"].token_ids) < 1500
    assert answers["b"] == expected


def test_nan_in_flight_fails_its_request_alone(model_dir: Path) -> None:
    """Token 7 poisons the row; when that is seen, another step of the same sequence is in flight."""
    neighbour = request("b", prompt(40, 1), max_tokens=30, temperature=1.0, seed=2, logit_bias=NO_POISON)
    expected = drive(make_engine(model_dir, depth=1), [neighbour])["b"]
    engine = make_engine(model_dir, depth=2)
    answers = drive(engine, [request("a", [20, 21, POISON, 22], max_tokens=30), neighbour])
    assert answers["a"].finish == "error"
    assert answers["a"].where is not None
    assert (answers["a"].where["op"], answers["a"].where["position"]) == ("embed", 2)
    assert answers["b"] == expected


@pytest.mark.parametrize("call", ["on_launch", "on_collect"])
def test_a_refused_step_fails_its_requests_and_the_next_goes_on(model_dir: Path, call: str) -> None:
    engine = make_engine(model_dir, depth=2)

    def refuse(work: StepWork) -> None:
        if work.plan.step == 4:
            raise ValueError("a bug of ours")

    setattr(spy(engine), call, refuse)
    late = request("late", prompt(30, 1), max_tokens=20, logit_bias=NO_POISON)
    expected = drive(make_engine(model_dir, depth=1), [late])["late"]
    added: list[Any] = []
    answers = drive(
        engine,
        [request("a", prompt(5), max_tokens=30, logit_bias=NO_POISON)],
        {4: lambda: added.extend(engine.add(late))},
    )
    assert answers["a"].finish == "error" and answers["a"].error == "a bug of ours"
    assert len(answers["a"].token_ids) == 3  # of the three steps before it
    assert answers["late"] == expected


def test_three_failed_steps_in_a_row_end_the_engine(model_dir: Path) -> None:
    engine = make_engine(model_dir, depth=2)

    def refuse(_work: StepWork) -> None:
        raise ValueError("always")

    spy(engine).on_launch = refuse
    with pytest.raises(EngineError, match="3 steps in a row failed"):
        for i in range(20):
            engine.add(request(str(i), prompt(5)))
            engine.step()


@pytest.mark.parametrize("call", ["on_launch", "on_collect"])
def test_a_lost_device_gives_every_request_an_error_that_says_where(model_dir: Path, call: str) -> None:
    engine = make_engine(model_dir, depth=2, max_batch_seqs=2)

    def lose(work: StepWork) -> None:
        if work.plan.step == 5:
            raise DeviceLost("CUDA_ERROR_ILLEGAL_ADDRESS", where={"op": "attention", "layer": 3})

    setattr(spy(engine), call, lose)
    answers = Answers()
    for i in range(3):  # the third waits
        engine.add(request(str(i), prompt(5, i), max_tokens=30, n=1, logit_bias=NO_POISON))
    with pytest.raises(DeviceLost) as caught:
        for _ in range(20):
            answers.take(engine.step())
    answers.take(engine.abandon(caught.value))
    for i in range(3):
        answer = answers[str(i)]
        assert answer.finish == "error" and answer.error == "CUDA_ERROR_ILLEGAL_ADDRESS"
        assert answer.where is not None
        assert (answer.where["op"], answer.where["layer"]) == ("attention", 3)
        assert answer.after_end == 0
    assert engine.abandon(caught.value) == []


def test_engine_core_tells_everybody_before_it_dies(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the process: each request's error with its place, then Fatal, then a status that is not 0."""
    to_core, to_api = Ring.create("to-core", 1 << 20), Ring.create("to-api", 1 << 20)
    alive_here, alive_there = os.pipe()
    engine = make_engine(model_dir, depth=2)

    def lose(work: StepWork) -> None:
        if work.plan.step == 5:
            raise DeviceLost("CUDA_ERROR_ILLEGAL_ADDRESS", where={"op": "attention"}, hint="start it again")

    spy(engine).on_collect = lose
    monkeypatch.setattr(Engine, "load", lambda _config, progress=None: engine)
    for name in ("a", "b"):
        to_core.push(msgspec.msgpack.encode(request(name, prompt(5), max_tokens=30, logit_bias=NO_POISON)))
    core = CoreProcess(engine.config, Ring.attach(to_core.fds()), Ring.attach(to_api.fds()), alive_here)
    assert core.run() == 1
    messages: list[Any] = []
    while (frame := to_api.pop()) is not None:
        messages += msgspec.msgpack.decode(frame, type=list[CoreMessage])
    assert isinstance(messages[-1], Fatal) and messages[-1].hint == "start it again"
    last = {m.request_id: m for m in messages if isinstance(m, Tokens)}
    assert {name: (str(m.finish_reason), m.error_where["op"]) for name, m in last.items() if m.error_where} == {
        "a": ("error", "attention"), "b": ("error", "attention"),
    }  # fmt: skip
    os.close(alive_here)
    os.close(alive_there)


def test_a_lost_device_in_a_probe_is_not_the_probes_error(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(model_dir, depth=2)

    def lose(_batch: object) -> Any:
        raise DeviceLost("CUDA_ERROR_ECC_UNCORRECTABLE")

    monkeypatch.setattr(spy(engine), "forward", lose)
    assert engine.control(1, "golden", {"prompt_ids": [1, 2, 3]}) == []
    with pytest.raises(DeviceLost):
        engine.step()


def test_golden_between_two_plans_in_flight(model_dir: Path) -> None:
    """The hash is that of an idle engine, and the traffic does not notice."""
    traffic = [request(str(i), prompt(60 * i + 5, i), max_tokens=30, logit_bias=NO_POISON) for i in range(4)]
    idle = make_engine(model_dir, depth=1)
    idle.control(1, "golden", {"prompt_ids": prompt(200)})
    replies = [message for _ in range(6) for message in idle.step() if hasattr(message, "control_id")]
    expected = drive(make_engine(model_dir, depth=1), traffic)
    engine = make_engine(model_dir, depth=2)
    busy: list[Any] = []
    take = engine.step

    def step() -> Any:
        out = take()
        busy.extend(message for message in out if hasattr(message, "control_id"))
        return out

    engine.step = step  # type: ignore[method-assign]
    same(drive(engine, traffic, {5: lambda: engine.control(1, "golden", {"prompt_ids": prompt(200)})}), expected)
    assert [reply.result for reply in busy] == [reply.result for reply in replies]
    assert busy[0].ok and busy[0].result["finite"]


ACTIONS = st.lists(
    st.tuples(
        st.integers(1, 400),  # prompt tokens
        st.integers(1, 40),  # max_tokens
        st.sampled_from([0.0, 1.0]),
        st.integers(0, 25),  # step at which it arrives
        st.one_of(st.none(), st.integers(1, 30)),  # step at which it is aborted
        st.booleans(),  # stops at many tokens
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=150 if FULL else 12, deadline=None)
@given(actions=ACTIONS, pages=st.integers(5, 14))
def test_random_traffic_answers_as_alone(model_dir: Path, actions: list[Any], pages: int) -> None:
    """Arrivals, aborts, stops and preemptions in any order: whoever is not aborted gets what it gets alone."""
    messages: dict[str, Generate] = {}
    at_step: dict[int, list[Any]] = {}
    for i, (length, max_tokens, temperature, arrives, aborted, stops) in enumerate(actions):
        stop_ids = tuple(range(60, 130)) if stops else ()
        message = request(str(i), prompt(length, i), max_tokens=max_tokens, temperature=temperature, seed=i,
                          stop_token_ids=stop_ids, logprobs=1, logit_bias=NO_POISON)  # fmt: skip
        messages[message.request_id] = message
        at_step.setdefault(arrives, []).append(("add", message))
        if aborted is not None:
            at_step.setdefault(arrives + aborted, []).append(("abort", message))
    engine = make_engine(model_dir, depth=2, pages=pages, max_batch_seqs=4)
    answers = Answers()
    for step in itertools.count():
        for kind, message in at_step.pop(step, ()):
            if kind == "add":
                answers.take(engine.add(message))
            else:
                engine.abort(message.request_id)
        if not at_step and not engine.has_work:
            break
        answers.take(engine.step())
        assert step < 2000
    assert engine.kv_cache.free_pages == pages
    solo = make_engine(model_dir, depth=1, pages=pages)
    for name, message in messages.items():
        answer = answers.by_choice.get((name, 0))
        expected = drive(solo, [message])[name]
        if answer is None or answer.finish is None:
            assert actions[int(name)][4] is not None
            if answer is not None:
                assert answer.token_ids == expected.token_ids[: len(answer.token_ids)]
        else:
            assert answer == expected
