"""Recording golden answers through the launchers: two independent computations must agree before they are kept.

| device | computed by | agreement |
|---|---|---|
| a GPU model of which two are there | two GPUs | every bit |
| a GPU model of which one is there | the GPU; the CPU oracle | teacher-forced log probabilities within TOLERANCE |
| cpu | two starts of the engine | every bit |

A host with several models of GPU gets one file for each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from appliance.engine_calls import EngineCalls
from appliance.events import append_event
from appliance.fleet import Fleet, engine_of, releases_of
from appliance.golden import (
    Agreement,
    Golden,
    GoldenAnswer,
    Oracle,
    golden_path,
    manifest_digest,
    prompts_of,
    write_golden,
)
from appliance.gpus import visible_gpus
from appliance.hostconfig import gpu_memory_fraction
from appliance.leases import Leases
from appliance.manifest import utc_now
from appliance.oracle import cpu_oracle
from appliance.releases import Release, ReleaseError, ReleaseRefused
from appliance.slots import slots_of

TOLERANCE = 0.27
"""Nats. The most that bfloat16 operands moved the lead of a best token in transformers itself, over 10,240 positions of
SmolLM2 (tests/golden/make_smollm2_forced.py: bf16_gap_change 0.269)."""
FORCED_POSITIONS = 32  # at the end of each golden prompt


class GoldenMismatch(ReleaseRefused):
    """Two computations that must agree do not: the release or a device cannot be trusted."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Of one engine: what a golden file keeps of it."""

    device: str
    weights_checksum: str
    prompts: tuple[GoldenAnswer, ...]


@dataclass(slots=True)
class Recorder:
    """Used by the holder of the lock of the releases. `record` is done when every device of the host has its file."""

    fleet: Fleet
    leases: Leases
    release: Release
    displace: bool = False  # take serving GPUs out of service for it, one at a time

    def record(self) -> list[Golden]:
        """Records what is missing; the new files. GoldenMismatch (exit 4) if the computations differ; ReleaseRefused
        if no GPU can take the engine now; errors of the launchers pass through. No engine is left running."""
        states, away = self.fleet.survey()
        if not states:
            why = "; ".join(f"GPU {gpu}: {reason}" for gpu, reason in away.items()) or "no GPU is bound"
            raise ReleaseError(
                f"golden answers need a launcher, and none takes engines now ({why})",
                hint="start them: systemctl start appliance.target; or add with --golden skip",
            )
        recorded = []
        for device, gpus in self._by_model(sorted(states)).items():
            if device is not None and golden_path(self.fleet.paths, self.release.name, device).exists():
                continue
            usable = [gpu for gpu in gpus if self.displace or self._room(states[gpu]) is None]
            if not usable:
                raise ReleaseRefused(
                    f"no GPU has room for {self.release.name} beside what it runs: {self._room(states[gpus[0]])}",
                    hint="--golden displace takes GPUs out of service one at a time; --golden skip records none",
                )
            recorded.append(self._record(usable, states))
        return recorded

    def _by_model(self, gpus: list[int]) -> dict[str | None, list[int]]:
        if self.fleet.config.gpus.backend == "cpu":
            return {"cpu": gpus}
        models = {gpu.uuid: gpu.model for gpu in visible_gpus()}
        uuids = self.fleet.gpus()
        found: dict[str | None, list[int]] = {}
        for gpu in gpus:
            found.setdefault(models.get(uuids[gpu]), []).append(gpu)
        return found

    def _room(self, state: dict[str, object]) -> str | None:
        """Why the GPU cannot take one more engine; None if it can."""
        return room_for(self.fleet, state, self.release.name)

    def _record(self, gpus: list[int], states: dict[int, dict[str, object]]) -> Golden:
        if self.fleet.config.gpus.backend == "cpu":
            return self._two_starts(gpus, states)
        return self._two_gpus(gpus[:2]) if len(gpus) > 1 else self._with_oracle(gpus[0])

    def _two_gpus(self, gpus: list[int]) -> Golden:
        for gpu in () if self.displace else gpus:
            self._take(gpu)  # both load at once
        found = []
        for gpu in gpus:
            with self._engine(gpu) as engine:
                found.append(self._answers(engine, f"GPU {gpu}"))
        self._same(found, [f"GPU {gpu}" for gpu in gpus])
        return self._keep(found[0], gpus, "two-gpus")

    def _two_starts(self, gpus: list[int], states: dict[int, dict[str, object]]) -> Golden:
        running = [gpu for gpu in gpus if self.release.name in releases_of(states[gpu])]
        if len(running) == 1:
            raise ReleaseRefused(
                f"{self.release.name} runs on slot {running[0]} already, and golden answers of the CPU backend "
                "need two starts",
                hint="put another release into use first, then add this one again to record them",
            )
        chosen = running[:2] or [gpus[0], gpus[0]]
        found = []
        for gpu in chosen:
            with self._engine(gpu) as engine:
                found.append(self._answers(engine, f"slot {gpu}"))
        self._same(found, ["the first start", "the second start"])
        return self._keep(found[0], sorted(set(chosen)), "two-starts")

    def _with_oracle(self, gpu: int) -> Golden:
        paths, seconds = self.fleet.paths, self.fleet.config.engine.start_timeout
        with self._engine(gpu) as engine:
            found = self._answers(engine, f"GPU {gpu}")
            ids = [answer.prompt_ids for answer in found.prompts]
            on_gpu = [self._forced(engine, prompt) for prompt in ids]
        with cpu_oracle(paths, self.release, seconds, self.fleet.progress) as cpu:
            self.fleet.stage("comparing with the oracle")
            on_cpu = [self._forced(cpu, prompt) for prompt in ids]
        oracle = compare_forced(on_gpu, on_cpu)
        if not oracle.largest_difference <= oracle.tolerance:  # also when it is NaN
            raise GoldenMismatch(
                f"GPU {gpu} and the CPU oracle differ by {oracle.largest_difference:.3f} in a log probability; at most "
                f"{oracle.tolerance} can be the GPU's arithmetic",
                hint="check the GPU (`appliance doctor`) and the model (`appliance model verify`)",
            )
        return self._keep(found, [gpu], "cpu-oracle", oracle)

    def _forced(self, engine: EngineCalls, ids: list[int]) -> list[tuple[float, float]]:
        return engine.forced_logprobs(self.release.model_name, ids, min(FORCED_POSITIONS, len(ids) - 1))

    def _take(self, gpu: int) -> bool:
        """Asks for the engine unless it is there; whether it was asked for."""
        if engine_of(self.fleet.state(gpu), self.release.name):
            return (gpu, self.release.name) in self.leases.all()
        self.leases.take(gpu, self.release.name, "replace" if self.displace else "run")
        return True

    @contextlib.contextmanager
    def _engine(self, gpu: int) -> Iterator[EngineCalls]:
        """The release on that GPU, ready; stopped at the end if it was started for this."""
        name = self.release.name
        displaced = [other for other in releases_of(self.fleet.state(gpu)) if other != name] if self.displace else []
        ours = self._take(gpu)
        try:
            self.fleet.stage(f"starting {name} on GPU {gpu} for its golden answers", self.release.model_bytes)
            self.fleet.wait_ready([gpu], name)
            yield EngineCalls(self.fleet.paths.engine_socket(gpu, name))
        finally:
            if ours:
                self.leases.drop(gpu, name)
            for other in displaced:
                if slots_of(self.fleet.paths, other):  # it comes back by itself
                    self.fleet.stage(f"waiting until {other} serves on GPU {gpu} again")
                    self.fleet.wait_ready([gpu], other)

    def _answers(self, engine: EngineCalls, where: str) -> Answers:
        self.fleet.stage(f"golden answers of {self.release.name} on {where}")
        context = engine.context()
        weights = engine.checksum()
        if not weights["ok"]:
            raise GoldenMismatch(
                f"the weights in the memory of {where} are not what was loaded (checksum {weights['actual']}, at load "
                f"{weights['expected']})",
                hint="the GPU's memory cannot be trusted: see `appliance doctor` and dmesg",
            )
        prompts = []
        for name, ids in prompts_of(self.fleet.paths, self.release, context):
            result = engine.golden(ids)
            if not result["finite"] or result["positions"] != len(ids):
                raise GoldenMismatch(
                    f"prompt {name} has NaN or infinity in its logits on {where}",
                    hint="the model's weights or its dtype are unfit: see `appliance model verify`",
                )
            prompts.append(GoldenAnswer(name=name, prompt_ids=ids, sha256=result["sha256"]))
        return Answers(engine.device(), weights["expected"], tuple(prompts))

    def _same(self, found: list[Answers], where: list[str]) -> None:
        first, second = found
        differ = [a.name for a, b in zip(first.prompts, second.prompts) if a != b]
        if first.device != second.device:
            raise GoldenMismatch(f"{where[0]} is a {first.device}, {where[1]} a {second.device}")
        if first.weights_checksum != second.weights_checksum:
            differ.append("the weights' checksum")
        if differ or len(first.prompts) != len(second.prompts):
            raise GoldenMismatch(
                f"{where[0]} and {where[1]} do not compute the same bits: {', '.join(differ)}",
                hint="a device or the release is at fault; compare a third time on another GPU",
            )

    def _keep(self, found: Answers, gpus: list[int], agreed: Agreement, oracle: Oracle | None = None) -> Golden:
        paths, uuids = self.fleet.paths, self.fleet.gpus()
        golden = Golden(
            release=self.release.name,
            manifest_sha256=manifest_digest(paths, self.release.name),
            device=found.device,
            engine_version=self.release.engine_version,
            recorded=utc_now(),
            recorded_from=[uuids[gpu] for gpu in gpus],
            agreed=agreed,
            weights_checksum=found.weights_checksum,
            prompts=list(found.prompts),
            oracle=oracle,
        )
        write_golden(paths, golden)
        append_event(
            paths.events, "release_golden_recorded", release=self.release.name, device=golden.device, agreed=agreed
        )
        return golden


def room_for(fleet: Fleet, state: dict[str, object], release: str) -> str | None:
    """Why a GPU with this STATE cannot take an engine of `release` beside those it has; None if it can."""
    engine = fleet.config.engine
    others = [name for name in releases_of(state) if name != release]
    if not others:
        return None
    if engine.placement == "exclusive":
        return f"GPU {state['gpu']} runs {', '.join(others)}, and engine.placement is exclusive"
    if fleet.config.gpus.backend == "cpu":
        return None  # the launcher divides the host's memory
    fraction = gpu_memory_fraction(engine)
    total = fraction * (len(others) + 1)
    if total <= 1:
        return None
    return (
        f"GPU {state['gpu']} runs {', '.join(others)}; with {release} that is {len(others) + 1} engines of "
        f"gpu_memory_fraction {fraction:g}, together {total:.2f} of its memory"
    )


def compare_forced(first: list[list[tuple[float, float]]], second: list[list[tuple[float, float]]]) -> Oracle:
    """The largest difference of a log probability, own token's or best one's, over all positions of all prompts."""
    pairs = [
        (a, b)
        for prompt_a, prompt_b in zip(first, second, strict=True)
        for position_a, position_b in zip(prompt_a, prompt_b, strict=True)
        for a, b in zip(position_a, position_b)
    ]
    largest = max((abs(a - b) if a == a and b == b else float("inf") for a, b in pairs), default=float("inf"))
    return Oracle(positions=len(pairs) // 2, largest_difference=largest, tolerance=TOLERANCE)
