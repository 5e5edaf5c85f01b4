"""What the watchdog does to one GPU or a few, in the order in which an operator would see it."""

from __future__ import annotations

from typing import TypeVar

import pytest

from healthcheck.machine import resume, start, step
from healthcheck.machine_types import (
    Alert,
    Command,
    Drained,
    EngineFailed,
    EngineReady,
    Event,
    GpuState,
    Hold,
    HostState,
    MaintenanceOff,
    MaintenanceOn,
    Needs,
    Rebooted,
    Rechecked,
    Record,
    Reread,
    ResetDone,
    ResetGpu,
    RestartEngine,
    SetHealthy,
    SetShare,
    SignalSeen,
    State,
    Stopped,
    Tick,
    Unhold,
    Verified,
    Verify,
    WarmedUp,
    Warmup,
)
from healthcheck.policy import Policy, load_policy, parse_policy
from healthcheck.types import Signal

POLICY = load_policy()
T0 = 1_790_000_000.0
C = TypeVar("C")


def uuid(gpu: int) -> str:
    return f"GPU-{gpu:08x}-0000-4000-8000-000000000000"


class Host:
    """The machine with a clock that the test moves."""

    def __init__(self, gpus: int = 2, policy: Policy = POLICY) -> None:
        self.state = HostState({n: GpuState(n, uuid(n), since=T0) for n in range(gpus)}, boot_id="b1")
        self.policy, self.now = policy, T0
        self.log: list[Command] = []
        self.last: list[Command] = []
        self.busy = dict.fromkeys(range(gpus), 3)
        self.tick(1)

    def do(self, *events: Event, after: float = 0.0) -> list[Command]:
        self.now += after
        self.last = []
        for event in events:
            self.state, commands = step(self.state, event, self.now, self.policy)
            self.last += commands
        self.log += self.last
        return self.last

    def see(self, key: str, gpu: int = 0, after: float = 1.0) -> list[Command]:
        self.now += after
        return self.do(SignalSeen(Signal(key, uuid(gpu), f"detail of {key}", self.now, "test")))

    def tick(self, after: float) -> list[Command]:
        admitted = frozenset(
            n for n, gpu in self.state.gpus.items() if gpu.state in ("HEALTHY", "SUSPECT", "PROBATION") and not gpu.held
        )
        return self.do(Tick(admitted, self.busy), after=after)

    def repair(self, gpu: int = 0, *, key: str = "xid:95", ok: bool = True) -> None:
        """From HEALTHY through a whole reset; `ok`: as far as the verification goes."""
        self.see(key, gpu)
        if self.gpu(gpu).state == State.SUSPECT:
            self.tick(31)  # for what it waits for
        self.do(Stopped(gpu), after=2)
        self.do(ResetDone(gpu, True), after=8)
        self.do(EngineReady(gpu), after=10)
        self.do(WarmedUp(gpu), after=1)
        self.do(Verified(gpu, ok, "golden answer 3 differs", None if ok else "golden:mismatch"), after=1)

    def gpu(self, gpu: int = 0) -> GpuState:
        return self.state.gpus[gpu]

    def of(self, kind: type[C], commands: list[Command] | None = None) -> list[C]:
        return [command for command in (self.log if commands is None else commands) if isinstance(command, kind)]


def path(host: Host, gpu: int = 0) -> list[str]:
    return [record.after.value for record in host.of(Record) if record.gpu == gpu]


# -------------------------------------------------------------------------------------------------- the life of a fault
def test_uncontained_error_from_signal_to_healthy() -> None:
    host = Host()
    commands = host.see("xid:95")
    assert host.of(Hold, commands) == [Hold(0, "stop", "abort", "xid:95: detail of xid:95")]
    assert Reread(uuid(0)) in commands  # the level may be stronger
    commands = host.do(Stopped(0), after=2)
    assert host.of(ResetGpu, commands) == [ResetGpu(0, uuid(0), 1, host.now)]
    commands = host.do(ResetDone(0, True), after=8)
    assert [hold.level for hold in host.of(Hold, commands)] == ["drain"]  # the engine starts, unadmitted
    assert Warmup(0) in host.do(EngineReady(0), after=10)
    assert Verify(0) in host.do(WarmedUp(0), after=1)
    commands = host.do(Verified(0, True), after=1)
    assert commands.index(SetShare(0, 0.25)) < commands.index(Unhold(0))  # never a moment at the full share
    assert SetShare(0, 1.0) not in host.tick(299)
    assert SetShare(0, 1.0) in host.tick(2)
    assert path(host) == ["STOPPING", "RESETTING", "WARMUP", "VERIFY", "PROBATION", "HEALTHY"]
    phases = dict(host.of(Record)[-1].phases)
    assert phases == {"STOPPING": 2, "RESETTING": 8, "WARMUP": 11, "VERIFY": 1, "PROBATION": 301}


def test_a_contained_drain_and_reset_lets_requests_end() -> None:
    host = Host()
    assert host.of(Hold, host.see("recovery_action:4")) == [
        Hold(0, "drain", "graceful", "recovery_action:4: detail of recovery_action:4")
    ]
    assert host.gpu().state == State.DRAINING
    assert [(h.level, h.mode) for h in host.of(Hold, host.do(Drained(0), after=20))] == [("stop", "abort")]


def test_a_drain_that_takes_too_long_becomes_an_abort() -> None:
    host = Host()
    host.see("recovery_action:4")
    host.tick(59)
    assert host.gpu().state == State.DRAINING
    assert any(h.level == "stop" and h.mode == "abort" for h in host.of(Hold, host.tick(2)))


def test_48_waits_for_its_partner() -> None:
    host = Host()
    host.see("xid:48")
    assert host.gpu().state == State.SUSPECT and not host.of(Hold)
    host.see("xid:63", after=0.5)
    assert host.gpu().state == State.DRAINING
    assert host.gpu().incident is not None and host.gpu().incident.cause == "xid:48+xid:63"  # type: ignore[union-attr]


def test_48_alone_is_reset_after_the_wait() -> None:
    host = Host()
    host.see("xid:48")
    host.tick(1)
    assert host.gpu().state == State.SUSPECT
    host.tick(3)
    assert host.gpu().state == State.STOPPING


def test_uncorrected_errors_are_looked_up_first() -> None:
    host = Host()
    assert Reread(uuid(0)) in host.see("ecc:uncorrected")
    assert host.gpu().state == State.SUSPECT
    host.do(Rechecked(uuid(0), 0), after=1)  # the driver recovered
    assert host.gpu().state == State.HEALTHY
    assert not host.of(Hold) and host.of(Alert)


@pytest.mark.parametrize("answer", [True, False])
def test_uncorrected_errors_where_the_driver_cannot_be_asked(answer: bool) -> None:
    host = Host()
    host.see("ecc:uncorrected")
    if answer:
        host.do(Rechecked(uuid(0), None), after=1)  # NOT_SUPPORTED is unknown, not 0
    else:
        host.tick(11)
    assert host.gpu().state == State.DRAINING


def test_unknown_xid_follows_the_recovery_action() -> None:
    host = Host()
    host.see("xid:175")
    host.do(Rechecked(uuid(0), None), after=1)
    assert host.gpu().state == State.HEALTHY and not host.of(Hold)
    host.see("xid:176", after=300)
    host.do(Rechecked(uuid(0), 1), after=1)
    assert host.gpu().state == State.STOPPING


def test_an_application_fault_restarts_the_engine_only() -> None:
    host = Host()
    host.see("xid:13")
    assert [c.gpu for c in host.of(RestartEngine)] == [0]
    host.do(EngineReady(0), after=9)
    host.do(WarmedUp(0), after=1)
    host.do(Verified(0, True), after=1)
    host.tick(301)
    assert host.gpu().state == State.HEALTHY and not host.of(ResetGpu)


def test_repeated_restarts_lead_to_a_reset() -> None:
    host = Host()
    for _ in range(3):
        host.see("xid:31", after=600)
        host.do(EngineReady(0), after=9)
        host.do(WarmedUp(0), after=1)
        host.do(Verified(0, True), after=1)
        host.tick(301)
    host.see("xid:31", after=600)
    assert host.gpu().state == State.STOPPING and len(host.of(RestartEngine)) == 3


def test_off_the_bus_is_quarantined_and_a_reboot_verifies_it() -> None:
    host = Host()
    host.see("xid:79")
    host.do(Stopped(0), after=1)
    assert (host.gpu().state, host.gpu().needs) == (State.QUARANTINED, Needs.REBOOT)
    assert any(alert.gpu == 0 and "reboot" in alert.text for alert in host.of(Alert)) and not host.of(ResetGpu)
    host.do(Rebooted("b2"), after=120)
    assert host.gpu().state == State.WARMUP
    host.do(EngineReady(0), after=30)
    host.do(WarmedUp(0), after=1)
    assert host.gpu().state == State.VERIFY
    host.do(Verified(0, True), after=1)
    assert host.gpu().state == State.PROBATION


def test_a_reboot_does_not_cure_what_needs_a_human() -> None:
    host = Host()
    host.see("xid:54")
    host.do(Stopped(0), after=1)
    commands = host.do(Rebooted("b2"), after=120)
    assert (host.gpu().state, host.gpu().needs) == (State.QUARANTINED, Needs.HUMAN)
    assert [h.level for h in host.of(Hold, commands) if h.gpu == 0] == ["stop"]


def test_corrected_errors_change_nothing() -> None:
    host = Host()
    for _ in range(1000):
        host.see("ecc:corrected_rate", after=0.5)
        host.see("xid:92", after=0.5)
    assert {type(command) for command in host.log} == {Alert}
    assert len(host.log) == 2  # one each, not a thousand
    assert host.gpu() == Host().gpu()


def test_signals_of_our_own_stop_and_reset_are_muted() -> None:
    host = Host()
    host.see("xid:95")
    for key in ("xid:45", "engine:unreachable", "engine:error"):
        host.see(key)
    host.do(Stopped(0), after=1)
    for key in ("xid:45", "gpu:missing", "nvml:gpu_is_lost", "nvml:reset_required", "recovery_action:1", "xid:143"):
        host.see(key)
    host.do(ResetDone(0, True), after=5)
    host.see("gpu:missing")
    host.see("engine:unreachable")
    assert host.gpu().state == State.WARMUP and host.gpu(1).state == State.HEALTHY
    host.see("gpu:missing", after=40)  # not ours any more
    assert host.gpu().state == State.QUARANTINED


def test_what_was_seen_before_the_reset_is_history() -> None:
    host = Host()
    host.see("xid:95")
    old = Signal("xid:95", uuid(0), "the same, from the other source", host.now, "kmsg")
    host.do(Stopped(0), after=1)
    host.do(ResetDone(0, True), after=5)
    host.do(EngineReady(0), after=5)
    host.do(SignalSeen(old), after=1)
    assert host.gpu().state == State.WARMUP
    host.see("xid:95")
    assert host.gpu().state == State.STOPPING  # a new one: the reset did not cure it


def test_a_stronger_signal_while_draining_aborts() -> None:
    host = Host()
    host.see("recovery_action:4")
    host.see("xid:95")
    assert host.gpu().state == State.STOPPING
    host.see("xid:79")
    host.do(Stopped(0), after=1)
    assert host.gpu().state == State.QUARANTINED and not host.of(ResetGpu)


# ------------------------------------------------------------------------------------------------------ caps and limits
def test_a_fault_that_comes_back_at_each_start_ends_in_quarantine() -> None:
    host = Host()
    host.repair(key="checksum:mismatch", ok=False)  # GPU 1 is asked, and gives no answer in time
    while host.gpu().state != State.QUARANTINED:
        assert len(host.of(ResetGpu)) <= 2
        host.tick(31)
        host.do(Stopped(0), after=1)
        if host.gpu().state == State.RESETTING:
            host.do(ResetDone(0, True), after=8)
            host.do(EngineReady(0), after=9)
            host.do(WarmedUp(0), after=1)
            host.do(Verified(0, False, "the checksum differs", "checksum:mismatch"), after=1)
    assert len(host.of(ResetGpu)) == 2
    assert host.gpu().needs == Needs.RMA and host.gpu(1).state == State.HEALTHY
    assert any("2 resets in 24 h" in alert.text for alert in host.of(Alert))


def test_attempts_count_over_a_day_although_each_reset_helped() -> None:
    host = Host()
    for _ in range(2):
        host.repair()
        host.tick(301)
        assert host.gpu().state == State.HEALTHY
    host.see("xid:95", after=3600)
    host.do(Stopped(0), after=1)
    assert host.gpu().state == State.QUARANTINED


def test_attempts_are_forgotten_after_a_day_but_not_in_a_week() -> None:
    host = Host()
    for day in range(3):
        for _ in range(2):
            if day == 2 and len(host.of(ResetGpu)) == 5:
                break
            host.repair()
            host.tick(301)
        host.now += 86400
    assert len(host.of(ResetGpu)) == 5
    host.see("xid:95")
    host.do(Stopped(0), after=1)
    assert host.gpu().state == State.QUARANTINED and "5 resets in 7 days" in host.gpu().reason


def test_64_is_reset_once_then_rma() -> None:
    host = Host()
    host.repair(key="xid:64")
    host.tick(301)
    host.see("xid:64", after=3600)
    host.tick(4)
    host.do(Stopped(0), after=1)
    assert (host.gpu().state, host.gpu().needs) == (State.QUARANTINED, Needs.RMA)


def test_a_reset_that_fails_is_tried_again_then_needs_a_reboot() -> None:
    host = Host()
    host.see("xid:119")
    for number in (1, 2):
        host.do(Stopped(0), after=1)
        host.tick(31)
        assert len(host.of(ResetGpu)) == number
        host.do(ResetDone(0, False, "in use by another client"), after=60)
    assert (host.gpu().state, host.gpu().needs) == (State.QUARANTINED, Needs.REBOOT)


def test_no_result_of_a_reset_blocks_further_resets_until_it_comes() -> None:
    host = Host(3)
    host.see("xid:62")
    host.do(Stopped(0), after=1)
    host.tick(POLICY.timeouts.reset + 1)
    assert (host.gpu().state, host.gpu().needs) == (State.QUARANTINED, Needs.REBOOT)
    host.policy = parse_policy(b"schema = 1\n[breaker]\nmax_out = 3", where="test", base=POLICY)
    host.see("xid:62", gpu=1)
    host.do(Stopped(1), after=1)
    assert len(host.of(ResetGpu)) == 1  # GPU 0's may still run
    host.do(ResetDone(0, True), after=10)
    assert [reset.gpu for reset in host.of(ResetGpu)] == [0, 1]


def test_one_reset_at_a_time() -> None:
    host = Host(8)
    host.see("xid:95", 0)
    host.see("xid:95", 1)
    host.do(Stopped(0), Stopped(1), after=1)
    assert [reset.gpu for reset in host.of(ResetGpu)] == [0]
    host.do(ResetDone(0, True), after=8)
    assert [reset.gpu for reset in host.of(ResetGpu)] == [0, 1]


def test_an_engine_that_cannot_be_stopped_needs_a_reboot() -> None:
    host = Host()
    host.see("xid:119")
    host.tick(91)
    assert (host.gpu().state, host.gpu().needs) == (State.QUARANTINED, Needs.REBOOT)
    assert not host.of(ResetGpu)


def test_the_breaker_keeps_the_other_half_in_service() -> None:
    host = Host(4)
    for gpu in range(3):
        host.see("xid:95", gpu)
    assert [host.gpu(n).state for n in range(3)] == [State.STOPPING, State.STOPPING, State.SUSPECT]
    assert any(alert.gpu == 2 and "breaker" in alert.text for alert in host.of(Alert))
    host.do(Stopped(0), after=1)
    host.do(ResetDone(0, True), EngineReady(0), WarmedUp(0), Verified(0, True), after=1)
    host.tick(1)
    assert host.gpu(2).state == State.STOPPING  # there is room now


def test_a_gpu_that_serves_nobody_is_repaired_although_the_breaker_is_open() -> None:
    host = Host(2)
    host.see("xid:54", 1)
    host.do(Stopped(1), after=1)
    host.do(Tick(frozenset(), None), after=5)  # GPU 0's engine died
    host.see("xid:95", 0)
    assert host.gpu(0).state == State.STOPPING


@pytest.mark.parametrize("key", ["remap:pending", "xid:63", "recovery_action:4", "remap:failure", "sram:threshold"])
def test_the_last_serving_gpu_stays_for_what_can_wait(key: str) -> None:
    host = Host(1)
    host.busy = {0: 0}
    host.see(key)
    for _ in range(100):
        host.tick(1200)
        host.see(key)
    host.tick(4)
    assert host.gpu().state == State.HEALTHY and not host.of(Hold)
    assert host.gpu().owed is not None and host.of(Alert)


def test_a_deferred_reset_comes_at_a_quiet_time() -> None:
    host = Host(2)
    host.see("remap:pending")
    host.tick(600)
    assert host.gpu().state == State.HEALTHY  # three requests are in flight
    host.busy[0] = 0
    host.tick(1)
    host.tick(30)
    assert host.gpu().state == State.HEALTHY
    host.tick(31)
    assert host.gpu().state == State.DRAINING


def test_a_deferred_reset_waits_a_day_at_most_where_others_serve() -> None:
    host = Host(2)
    host.see("remap:pending")
    host.tick(86400 - 10)
    assert host.gpu().state == State.HEALTHY
    host.tick(20)
    assert host.gpu().state == State.DRAINING


def test_nothing_deferrable_is_done_while_it_is_not_known_who_serves() -> None:
    host = Host(2)
    host.see("remap:pending")
    host.do(Tick(None, None), after=90000)
    assert host.gpu().state == State.HEALTHY


def test_a_gpu_that_an_operator_holds_is_left_alone() -> None:
    host = Host(2)
    host.see("remap:pending")
    host.busy[0] = 0
    for _ in range(4):
        host.do(Tick(frozenset({1}), {0: 0, 1: 0}), after=100)
    assert host.gpu().state == State.HEALTHY


def test_contained_error_owes_a_reset_after_the_restart() -> None:
    host = Host(2)
    host.see("xid:94")
    assert host.of(RestartEngine)
    host.do(EngineReady(0), WarmedUp(0), Verified(0, True), after=9)
    assert host.gpu().owed is not None
    host.tick(301)
    host.busy[0] = 0
    host.tick(1)
    host.tick(61)
    assert host.gpu().state == State.DRAINING


# -------------------------------------------------------------------------------------------------------- shared causes
def test_two_gpus_with_a_driver_like_cause_stop_automation() -> None:
    host = Host(4)
    host.see("xid:119", 0)
    host.see("xid:119", 1, after=0.2)
    assert host.state.halt is not None
    host.do(Stopped(0), Stopped(1), after=1)
    host.tick(3600)
    assert not host.of(ResetGpu)
    assert all(host.gpu(n).state == State.SUSPECT and host.gpu(n).needs == Needs.HUMAN for n in (0, 1))
    assert Unhold(0) in host.log  # called back
    assert any(alert.key == "halted" for alert in host.of(Alert))


def test_memory_errors_on_two_gpus_are_two_faults() -> None:
    host = Host(8)
    host.see("xid:95", 0)
    host.see("xid:95", 1)
    assert host.state.halt is None and {host.gpu(0).state, host.gpu(1).state} == {State.STOPPING}


def test_a_driver_like_cause_minutes_apart_is_two_faults() -> None:
    host = Host(8)
    host.see("xid:119", 0)
    host.see("xid:119", 1, after=61)
    assert host.state.halt is None and host.gpu(1).state == State.STOPPING


@pytest.mark.parametrize("key", ["golden:mismatch", "checksum:mismatch"])
@pytest.mark.parametrize("how", ["asked", "signal"])
def test_the_same_mismatch_on_two_gpus_resets_nothing(key: str, how: str) -> None:
    host = Host(2)
    commands = host.see(key, 0)
    assert host.of(Hold, commands)[0].level == "drain" and Verify(1) in commands  # no wrong answer meanwhile
    if how == "asked":
        host.do(Verified(1, False, "the same hash", key), after=0.5)
    else:
        host.see(key, 1, after=0.5)
    assert all(host.gpu(n).state == State.HEALTHY and not host.gpu(n).held for n in (0, 1))
    for _ in range(50):  # and it stays like that
        host.see(key, 0, after=15)
        host.see(key, 1, after=15)
        host.tick(1)
    assert not host.of(ResetGpu) and not host.of(RestartEngine)
    assert any(alert.gpu is None and "release or the driver" in alert.text for alert in host.of(Alert))


def test_one_wrong_gpu_is_reset_when_the_others_are_right() -> None:
    host = Host(2)
    host.see("golden:mismatch", 0)
    assert host.gpu().state == State.SUSPECT and host.gpu().held
    host.do(Verified(1, True), after=0.5)
    assert host.gpu().state == State.STOPPING


def test_a_peer_that_cannot_answer_delays_but_does_not_save_it() -> None:
    host = Host(2)
    host.see("golden:mismatch", 0)
    host.do(Verified(1, None, "busy"), after=0.5)
    assert host.gpu().state == State.STOPPING


def test_engines_that_fail_together_are_not_the_gpus() -> None:
    host = Host(4)
    host.see("engine:error", 0)
    host.see("engine:error", 1)
    assert host.state.halt is None and host.gpu(1).state == State.HEALTHY
    assert any("a request or the release" in alert.text for alert in host.of(Alert))


# ------------------------------------------------------------------------------------------------------ unknown, people
def test_a_hung_probe_touches_nothing() -> None:
    host = Host()
    for _ in range(20):
        host.see("probe:hung", after=30)
    assert {type(command) for command in host.log} == {Alert}


def test_inconclusive_verification_passes_nothing_and_resets_nothing() -> None:
    host = Host()
    host.see("xid:95")
    host.do(Stopped(0), ResetDone(0, True), EngineReady(0), WarmedUp(0), after=1)
    host.do(Verified(0, None, "NVML does not answer"), after=1)
    assert host.gpu().state == State.VERIFY
    assert Verify(0) in host.tick(16)
    host.tick(60)
    assert (host.gpu().state, host.gpu().needs) == (State.QUARANTINED, Needs.HUMAN)
    assert len(host.of(ResetGpu)) == 1


def test_maintenance_keeps_its_hands_off_and_looks_again_afterwards() -> None:
    host = Host()
    host.do(MaintenanceOn("driver upgrade"))
    for key in ("gpu:missing", "xid:79", "xid:119", "nvml:driver_mismatch", "golden:mismatch"):
        host.see(key, 0)
        host.see(key, 1)
    assert not host.of(Hold) and not host.of(Alert)
    commands = host.do(MaintenanceOff("done"), after=3600)
    assert Reread(uuid(0)) in commands and Reread(uuid(1)) in commands
    host.see("gpu:missing")
    assert host.gpu().state == State.STOPPING


def test_no_gpu_is_left_at_a_reduced_share() -> None:
    """Probation, then a doubt, then a maintenance, then nothing."""
    host = Host()
    host.repair()
    host.see("xid:175", after=60)
    assert host.gpu().state == State.SUSPECT and host.gpu().paused == State.PROBATION
    host.do(MaintenanceOn("rack"), after=1)
    host.do(MaintenanceOff("done"), after=1)
    host.tick(15)
    host.tick(15)
    assert host.gpu().state == State.HEALTHY and host.of(SetShare)[-1] == SetShare(0, 1.0)


def test_maintenance_in_the_middle_of_a_reset_ends_it_and_goes_on_afterwards() -> None:
    host = Host()
    host.see("xid:95")
    host.do(Stopped(0), after=1)
    host.do(MaintenanceOn("somebody is at the rack"))
    assert host.gpu().state == State.RESETTING
    host.do(ResetDone(0, True), after=5)
    assert host.gpu().state == State.MAINTENANCE
    host.do(MaintenanceOff("done"), after=600)
    assert host.gpu().state == State.WARMUP


def test_set_healthy_verifies_before_it_believes() -> None:
    host = Host()
    host.see("xid:54")
    host.do(Stopped(0), after=1)
    host.do(SetHealthy(0, "cable replaced"), after=3600)
    assert host.gpu().state == State.WARMUP and host.gpu().attempts == ()
    host.do(EngineFailed(0, "CUDA error 46"), after=9)
    assert host.gpu().state == State.QUARANTINED  # told, not taken on trust


def test_set_healthy_does_not_take_wrong_answers_on_trust() -> None:
    host = Host(2)
    host.see("golden:mismatch", 0)
    host.do(SetHealthy(0, "looks fine"), after=1)
    assert host.gpu().state == State.WARMUP and Unhold(0) not in host.log


def test_set_healthy_lets_automation_go_on() -> None:
    host = Host(4)
    host.see("xid:119", 0)
    host.see("xid:119", 1)
    host.do(SetHealthy(0, "driver replaced"), SetHealthy(1, "driver replaced"), after=600)
    assert host.state.halt is None and {host.gpu(n).state for n in range(4)} == {State.HEALTHY}


def test_a_gpu_without_a_slot_is_an_error_not_a_guess() -> None:
    with pytest.raises(ValueError, match="no slot 7"):
        Host().do(Drained(7))


def test_a_signal_of_an_unknown_gpu_only_alerts() -> None:
    host = Host()
    host.do(SignalSeen(Signal("xid:79", "GPU-nobody", "", T0, "kmsg")))
    assert {type(command) for command in host.log} == {Alert}


# ------------------------------------------------------------------------------------------------------ crash and clock
def test_a_clock_set_back_delays_no_deadline() -> None:
    host = Host()
    host.see("xid:95")
    host.now -= 7200
    host.tick(1)
    host.tick(91)
    assert host.gpu().state == State.QUARANTINED  # the engine was not stopped within 90 s


def test_after_a_reboot_in_the_middle_of_a_reset_the_next_one_may_run() -> None:
    host = Host()
    host.see("xid:95")
    host.do(Stopped(0), after=1)
    host.state, commands = start(host.state, host.now + 100, "b2", POLICY)
    assert host.state.resetting is None and host.gpu().state == State.WARMUP
    assert Hold(0, "drain", "graceful", host.gpu().reason) in commands


EVENTS: list[Event] = [
    SignalSeen(Signal("xid:95", uuid(0), "", T0 + 2, "kmsg")),
    Stopped(0),
    ResetDone(0, True),
    EngineReady(0),
    WarmedUp(0),
    Verified(0, True),
]
ANSWERED_BY = [Hold, ResetGpu, Hold, Warmup, Verify, Unhold]


@pytest.mark.parametrize("crash_after", range(len(EVENTS)))
def test_resume_gives_the_commands_whose_answer_is_awaited(crash_after: int) -> None:
    host = Host()
    first: list[Command] = []
    for event in EVENTS[: crash_after + 1]:
        first = host.do(event, after=2)
    again = resume(host.state, host.now + 30, POLICY)
    wanted = [c for c in first if isinstance(c, ANSWERED_BY[crash_after]) and getattr(c, "gpu", None) == 0]
    assert wanted and all(command in again for command in wanted)  # the same reset, not another one
    assert Unhold(1) in again and SetShare(1, 1.0) in again  # nothing is left held by a crash
