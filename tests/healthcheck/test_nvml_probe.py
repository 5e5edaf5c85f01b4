"""The client of NVML with a real child process and the real protocol; the child follows a script."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from appliance.launcher.loop import Loop, Timer
from healthcheck import child, nvml, nvml_reader
from healthcheck.nvml import Hang, NvmlProbe, Round, child_command
from healthcheck.nvml_protocol import Event
from healthcheck.script_edit import add_event, healthy_script, reset_gpu, set_fields, set_gpu, write_script
from healthcheck.types import GpuReading

A, B, C = (f"GPU-{n * 8}-0000-0000-0000-000000000000" for n in "abc")
WAIT = 20.0  # seconds that nothing here takes unless it is broken


class World:
    def __init__(self, path: Path) -> None:
        self.script = path / "nvml.json"
        self.loop = Loop()
        self.seen: list[GpuReading] = []
        self.events: list[Event] = []
        self.hangs: list[Hang] = []
        self.rounds: list[Round] = []
        write_script(self.script, healthy_script([A, B]))
        self.probe = self.make(child_command(str(self.script)))

    def make(self, command: list[str], deadline: float = WAIT, known: dict[str, str] | None = None) -> NvmlProbe:
        self.probe = NvmlProbe(
            self.loop, command, deadline, self.seen.append, self.events.append, self.hangs.append,
            on_round=self.rounds.append, known=known,
        )  # fmt: skip
        return self.probe

    def until(self, reached: Callable[[], bool]) -> None:
        """Looked at now and then, whatever the loop does."""

        def tick() -> None:
            timers[:] = [self.loop.later(0.02, tick)]

        timers: list[Timer] = []
        tick()
        assert self.loop.run(reached, WAIT), "it did not come to that"
        timers[0].cancel()

    def round(self) -> Round:
        count = len(self.rounds)
        assert self.probe.read()
        self.until(lambda: len(self.rounds) > count)
        return self.rounds[-1]

    def closed(self) -> bool:
        done: list[bool] = []
        self.probe.close(lambda: done.append(True))
        self.until(lambda: bool(done))
        return done == [True]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.closed()
    world.loop.close()


def ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_every_gpu_is_read_and_what_is_not_supported_is_none(world: World) -> None:
    assert world.round().read == (A, B)
    first = world.probe.readings[A]
    assert first.fields["recovery_action"] == 0 and first.fields["minor"] == 0 and first.error is None
    assert first.fields["retired_pages_pending"] is None and first.unknown["retired_pages_pending"] == "not supported"
    assert world.probe.readings[B].fields["minor"] == 1
    age = world.probe.age(A)
    assert age is not None and 0 <= age < WAIT and world.probe.age(C) is None
    assert world.probe.known == {"0000:1b:00.0": A, "0000:1c:00.0": B}


def test_the_script_is_followed_counters_go_up_and_down(world: World) -> None:
    world.round()
    set_fields(world.script, A, uncorrected_volatile=7, recovery_action=4)
    set_gpu(world.script, B, unsupported=["recovery_action"])
    world.round()
    assert world.probe.readings[A].fields["uncorrected_volatile"] == 7
    assert world.probe.readings[B].fields["recovery_action"] is None
    reset_gpu(world.script, A)
    world.round()
    assert world.probe.readings[A].fields["uncorrected_volatile"] == 0
    assert world.probe.readings[A].fields["recovery_action"] == 0


def test_a_reset_does_not_cure_what_it_does_not_cure(world: World) -> None:
    set_fields(world.script, A, remap_failure=True, uncorrected_aggregate=3, remap_pending=True)
    set_gpu(world.script, A, error="reset_required", again={"fields": {"recovery_action": 1}})
    set_gpu(world.script, B, error="gpu_is_lost")
    reset_gpu(world.script, A)
    reset_gpu(world.script, B)
    world.round()
    a = world.probe.readings[A]
    assert (a.fields["remap_failure"], a.fields["uncorrected_aggregate"], a.fields["remap_pending"]) == (True, 3, False)
    assert a.error is None and a.fields["recovery_action"] == 1
    b = world.probe.readings[B]
    assert b.error == "gpu_is_lost" and b.fields["uncorrected_volatile"] is None


def test_a_lost_gpu_hides_no_other_one_and_one_that_is_not_listed_is_not_found(world: World) -> None:
    world.make(child_command(str(world.script)), known={"0000:99:00.0": C})
    set_gpu(world.script, A, error="gpu_is_lost")
    done = world.round()
    assert done.ok and set(done.read) == {A, B, C}
    assert world.probe.readings[A].error == "gpu_is_lost" and world.probe.readings[B].error is None
    assert world.probe.readings[C].error == "not_found"


def test_a_library_that_does_not_work_is_said_and_asked_again(world: World) -> None:
    write_script(world.script, healthy_script([A]) | {"error": "driver_mismatch"})
    done = world.round()
    assert (done.ok, done.error, done.read) == (False, "driver_mismatch", ())
    write_script(world.script, healthy_script([A]))
    assert world.round().ok and world.probe.crashes == 0


def test_an_event_arrives_and_brings_a_reading_of_its_own(world: World) -> None:
    world.round()
    set_fields(world.script, B, recovery_action=1)
    add_event(world.script, B, "xid", xid=95)
    world.until(lambda: len(world.events) == 1 and len(world.rounds) >= 2)
    assert (world.events[0].uuid, world.events[0].kind, world.events[0].xid) == (B, "xid", 95)
    assert world.probe.readings[B].fields["recovery_action"] == 1


def test_many_events_bring_few_readings(world: World) -> None:
    world.round()
    for _ in range(30):
        add_event(world.script, A, "xid", xid=13)
    world.until(lambda: len(world.events) == 30)
    assert len(world.rounds) <= 4  # one at once, one a second later


def test_events_from_before_it_was_opened_are_not_sent(world: World) -> None:
    add_event(world.script, A, "xid", xid=79)
    world.round()
    add_event(world.script, A, "xid", xid=13)
    world.until(lambda: bool(world.events))
    assert [event.xid for event in world.events] == [13]


def test_a_hung_gpu_is_named_killed_left_out_and_the_others_are_read(world: World) -> None:
    world.make(child_command(str(world.script)), deadline=2.0)
    set_gpu(world.script, A, hang=True)
    assert world.probe.read()
    world.until(lambda: bool(world.hangs))
    first = world.hangs[0]
    assert (first.uuid, first.stage, first.in_row) == (A, A, 1) and world.probe.hangs == 1
    world.until(lambda: bool(world.rounds))  # it goes on by itself
    assert world.rounds[-1].ok and world.rounds[-1].read == (B,) and world.rounds[-1].skipped == (A,)
    assert A not in world.probe.readings
    assert world.round().read == (B,) and world.probe.hangs == 1


def test_a_gpu_that_hung_is_tried_at_the_next_probe_and_counted_until_it_answers(world: World) -> None:
    world.make(child_command(str(world.script)), deadline=2.0)
    set_gpu(world.script, A, hang=True)
    world.probe.read()
    world.until(lambda: len(world.hangs) == 1)
    world.probe.read(patient=True)
    world.until(lambda: len(world.hangs) == 2)
    assert [hang.in_row for hang in world.hangs] == [1, 2]
    set_gpu(world.script, A, hang=None)
    set_fields(world.script, A, recovery_action=1)
    world.probe.read(patient=True)
    world.until(lambda: A in world.probe.readings)
    assert world.probe.readings[A].fields["recovery_action"] == 1
    for _ in range(nvml.GOOD_READINGS):  # then it is one of the others again
        world.seen.clear()
        world.probe.read(patient=True)
        world.until(lambda: {reading.uuid for reading in world.seen} == {A, B})
    world.until(lambda: not world.probe.suspects)
    assert world.round().read == (A, B)
    set_gpu(world.script, A, hang=True)
    world.probe.read()
    world.until(lambda: len(world.hangs) == 3)
    assert world.hangs[2].in_row == 1


def test_a_gpu_that_hangs_delays_nobody_while_it_is_tried(world: World) -> None:
    world.make(child_command(str(world.script)), deadline=3.0)
    set_gpu(world.script, A, hang=True)
    world.probe.read()
    world.until(lambda: bool(world.rounds))
    assert len(world.hangs) == 1
    suspect = world.probe.suspects[A]
    for _ in range(3):
        assert world.round().read == (B,) and suspect.state == "reading"
    assert len(world.hangs) == 1, "three rounds of the others within one try"


def test_only_hangs_in_a_row_make_the_tries_rarer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """README: at the next probe, from the third hang in a row on after 1, 2 and 3 probes left out; asked: at once."""
    suspect = nvml.Suspect(world.probe, A)
    tries: list[int] = []
    monkeypatch.setattr(suspect, "ask", lambda: tries.append(probe))
    for probe in range(1, 20):
        suspect.turn(patient=True)
        if tries[-1:] == [probe]:
            suspect.count(A)
    assert tries == [1, 2, 3, 5, 8, 12, 16]
    suspect.turn(patient=False)
    suspect.turn(patient=False)
    assert tries[-2:] == [19, 19], "where something asks for it: at once"
    assert [hang.in_row for hang in world.hangs] == [1, 2, 3, 4, 5, 6, 7]


def test_a_gpu_whose_child_cannot_be_killed_gets_no_second_one_and_blinds_nobody(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "KILL_SECONDS", 0.1)
    world.make(child_command(str(world.script)), deadline=2.0)
    set_gpu(world.script, A, hang=True)
    pids: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(child.os, "kill", lambda pid, number: pids.append(pid))
        world.probe.read()
        world.until(lambda: world.probe.unkillable == 1)
        for count in (2, 3):
            world.probe.read(patient=True)
            assert world.hangs[-1].in_row == count and world.probe.suspects[A].pid is None
        assert world.round().read == (B,) and world.probe.state == "idle"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    set_gpu(world.script, A, hang=None)
    world.until(lambda: world.probe.unkillable == 0)
    world.probe.read()
    world.until(lambda: A in world.probe.readings)


def test_a_reset_finds_nvml_closed_by_a_suspects_child_too(world: World) -> None:
    world.make(child_command(str(world.script)), deadline=2.0)
    set_gpu(world.script, A, hang=True)
    world.probe.read()
    world.until(lambda: bool(world.hangs))
    set_gpu(world.script, A, hang=None)
    world.probe.read()
    world.until(lambda: A in world.probe.readings and world.probe.pid is not None)
    pids = [world.probe.pid, world.probe.suspects[A].pid]
    assert None not in pids and len(set(pids)) == 2
    gone: list[bool] = []
    world.probe.close(lambda: gone.append(all(ended(pid) for pid in pids if pid is not None)))
    world.until(lambda: bool(gone))
    assert gone == [True]
    world.probe.open()
    world.until(lambda: bool(world.rounds) and world.rounds[-1].read == (A, B))


def test_a_hang_of_no_gpu_in_particular(world: World) -> None:
    write_script(world.script, healthy_script([A]) | {"hang": "nvml"})
    world.make(child_command(str(world.script)), deadline=2.0)
    world.probe.read()
    world.until(lambda: bool(world.hangs))
    assert (world.hangs[0].uuid, world.hangs[0].stage) == (None, "nvml")
    assert world.probe.state == "waiting" and world.probe.read()  # later, not now: no storm of processes


def test_a_slow_gpu_is_not_a_hung_one(world: World) -> None:
    """NVIDIA/DCGM #313: calls that take long on a GPU full of corrected errors. The deadline is for each GPU."""
    world.make(child_command(str(world.script)), deadline=2.5)
    set_gpu(world.script, A, delay=1.5)
    set_gpu(world.script, B, delay=1.5)
    assert world.round().read == (A, B) and not world.hangs


def test_a_child_that_dies_is_started_again_and_later_each_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    write_script(world.script, healthy_script([A]) | {"exit": 3})
    monkeypatch.setattr(nvml_reader, "_RESTART_SECONDS", (0.05, 0.2))
    waits: list[float] = []
    monkeypatch.setattr(nvml.NvmlProbe, "_wait_for_restart", _recorded(waits))
    world.make(child_command(str(world.script))).read()
    world.until(lambda: len(waits) == 4)
    assert waits == [0.05, 0.1, 0.2, 0.2]
    assert world.rounds[0].error == "ended" and "ended with 3" in world.rounds[0].detail
    write_script(world.script, healthy_script([A]))
    world.until(lambda: world.rounds[-1].ok)
    assert world.probe.crashes == len(waits)


def _recorded(waits: list[float]) -> Callable[[NvmlProbe, float], None]:
    original = NvmlProbe._wait_for_restart

    def wait(probe: NvmlProbe, seconds: float) -> None:
        waits.append(seconds)
        original(probe, seconds)

    return wait


def test_what_makes_no_sense_kills_the_child(world: World) -> None:
    for said in ('print("Traceback")', 'print("{}")', 'print("x" * 3000000)', 'print(\'{"id":1,"gpu":{"uuid":7}}\')'):
        probe = world.make([sys.executable, "-c", f"{said}; import sys; sys.stdout.flush(); sys.stdin.read()"])
        assert world.round().error == "bad_answer"
        assert probe.crashes == 1 and probe.pid is None
        assert world.closed()


def test_a_program_that_is_not_there_is_said(world: World) -> None:
    world.make(["/nonexistent/nvml"])
    assert world.round().error == "no_process"


def test_closing_ends_the_child_before_it_calls_back_and_opening_reads(world: World) -> None:
    world.round()
    pid = world.probe.pid
    assert pid is not None
    gone: list[bool] = []
    world.probe.close(lambda: gone.append(ended(pid)))
    assert world.probe.state == "closed" and not world.probe.read()
    world.until(lambda: bool(gone))
    assert gone == [True]
    count = len(world.rounds)
    world.probe.open()
    world.until(lambda: len(world.rounds) > count)
    assert world.rounds[-1].ok and world.probe.pid != pid


def test_closing_while_a_reading_hangs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml_reader, "CLOSE_SECONDS", 0.2)
    set_gpu(world.script, A, hang=True)
    world.probe.read()
    world.until(lambda: world.probe._begun.uuid == A)
    pid = world.probe.pid
    assert pid is not None and world.closed() and ended(pid) and not world.hangs


@pytest.mark.parametrize("where", ["close", "events"])
def test_a_child_that_hangs_where_no_gpu_is_read(world: World, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """In nvmlShutdown, or in the wait for events: a reset still finds NVML closed, the next reading a hang."""
    monkeypatch.setattr(nvml_reader, "CLOSE_SECONDS", 0.5)
    world.round()
    pid = world.probe.pid
    write_script(world.script, healthy_script([A, B]) | {"hang": where})
    if where == "events":
        world.probe._deadline = 2.0
        world.until(lambda: world.probe.read() and bool(world.hangs))  # answered until it sees the script and hangs
        assert (world.hangs[0].uuid, world.hangs[0].stage) == (None, "request")
    assert pid is not None and world.closed() and ended(pid)


def test_a_child_that_cannot_be_killed_delays_but_does_not_stop_a_close(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process in state D: SIGKILL is pending for ever. Here the signal does not arrive."""
    monkeypatch.setattr(nvml_reader, "CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(child, "KILL_SECONDS", 0.1)
    set_gpu(world.script, A, hang=True)
    world.probe.read()
    world.until(lambda: world.probe._begun.uuid == A)
    pid = world.probe.pid
    assert pid is not None
    with monkeypatch.context() as patch:
        patch.setattr(child.os, "kill", lambda pid, number: None)
        assert world.closed()
    assert not ended(pid) and world.probe.unkillable == 1
    os.kill(pid, signal.SIGKILL)
    world.until(lambda: world.probe.unkillable == 0)


def test_children_that_cannot_be_killed_do_not_pile_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "KILL_SECONDS", 0.1)
    monkeypatch.setattr(nvml_reader, "_RESTART_SECONDS", (0.2, 0.2))
    write_script(world.script, healthy_script([A]) | {"hang": "nvml"})
    probe = world.make(child_command(str(world.script)), deadline=2.0)
    pids: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(child.os, "kill", lambda pid, number: pids.append(pid))
        probe.read()
        world.until(lambda: probe.state == "stuck")
        assert len(pids) == nvml.MAX_UNKILLABLE and not probe.read()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    write_script(world.script, healthy_script([A]))
    world.until(lambda: probe.unkillable == 0)
    assert world.round().ok


def test_the_child_dies_with_its_parent(world: World, tmp_path: Path) -> None:
    """Also in the middle of a call that never returns."""
    set_gpu(world.script, A, hang=True)
    program = (
        "import os, signal, sys\n"
        "from appliance.launcher.loop import Loop\n"
        "from healthcheck.nvml import NvmlProbe, child_command\n"
        "loop = Loop()\n"
        "no = lambda *_: None\n"
        "probe = NvmlProbe(loop, child_command(sys.argv[1]), 60.0, no, no, no)\n"
        "probe.read()\n"
        "loop.run(lambda: probe._begun.uuid is not None, 20.0)\n"
        "print(probe.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    outputs = tmp_path / "pid"
    with outputs.open("w") as out:
        pid = os.posix_spawn(
            sys.executable, [sys.executable, "-c", program, str(world.script)], dict(os.environ),
            file_actions=[(os.POSIX_SPAWN_DUP2, out.fileno(), 1)],
        )  # fmt: skip
    os.waitpid(pid, 0)
    grandchild = int(outputs.read_text())
    world.until(lambda: ended(grandchild) or "\nState:\tZ" in Path(f"/proc/{grandchild}/status").read_text())


def test_nothing_is_left_open_after_many_rounds_of_opening_and_closing(world: World) -> None:
    world.round()
    world.closed()
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        world.probe.open()
        world.round()
        world.closed()
    assert set(os.listdir("/proc/self/fd")) == before
