"""A sick GPU's way out of service and back, with all parts as they are shipped: systemd, launchers, engines, gateway,
watchdog, reset unit. Only NVML (a script), nvidia-smi (a stand-in) and the hardware are not real.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from appliance.control import ControlClient
from appliance.engine_calls import EngineUnavailable
from appliance.golden import compare
from healthcheck.script_edit import add_event, change_script, set_fields, set_gpu
from healthcheck.scripted_faults import inject
from tests.healthcheck import fault_box
from tests.healthcheck.box_world import PCI, REPAIR, SCRIPT, UUIDS, WATCHDOG, World, world
from tests.host.appliance_box import PYTHON
from tests.host.plugin import HOST_SECONDS

pytestmark = [pytest.mark.box, pytest.mark.timeout(HOST_SECONDS)]
FULL = bool(os.environ.get("APPLIANCE_FULL"))
CLIENTS = 32
FLIPS = 200 if FULL else 12
KILL_ROUNDS = 6 if FULL else 1
MANY = "[attempts]\nresets = 20\nresets_per_week = 20\nrestarts = 20\n"


@pytest.fixture(scope="module")
def host(box_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(box_root, tmp_path_factory.mktemp("box")) as one:
        yield one


@pytest.fixture
def one(host: World) -> World:
    host.fresh()
    return host


def seed() -> int:
    return int(os.environ.get("APPLIANCE_SEED", random.randrange(1 << 30)))


def tell(one: World, what: str, gpu: int = 0) -> None:
    """The phases of the last repair, as they were recorded."""
    phases = one.gpu(gpu)["phases"]
    spent = ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items())
    inside = [event["detail"] for event in one.events("watchdog_reset", gpu=gpu)]
    print(f"\n{what}: {sum(phases.values()):.2f} s ({spent}); reset: {'; '.join(inside)}")


# ---------------------------------------------------------------------------------------------- nobody loses an answer
def uncorrectable(one: World) -> None:
    """What a GPU shows then: counters, NVML's events, the Xid and the recovery action that the driver asks for."""
    set_fields(
        one.nvml, UUIDS[0], uncorrected_volatile=1, uncorrected_volatile_dram=1, uncorrected_aggregate=1,
        recovery_action=1,
    )  # fmt: skip
    add_event(one.nvml, UUIDS[0], "double_bit")
    add_event(one.nvml, UUIDS[0], "xid", xid=48)


def kernel_line(
    one: World, xid: int = 95, text: str = "Uncontained: LTC TAG error", gpus: tuple[int, ...] = (0,)
) -> None:
    """A line a GPU, as NVIDIA's driver prints it, through the kernel, which gives user space facility 1. Of several at
    once: with a command each they would be a second apart on a busy machine."""
    lines = [f"NVRM: Xid (PCI:{PCI.format(gpu)[:-2]}): {xid}, pid=4711, name=python3, {text}" for gpu in gpus]
    one.box.run(["sh", "-c", 'for line; do printf "<3>%s\\n" "$line" > /dev/kmsg; done', "write", *lines])


@pytest.fixture
def kernel_log(host: World) -> Iterator[None]:
    """A box has no /dev/kmsg of its own: the machine's."""
    if not os.access("/dev/kmsg", os.R_OK | os.W_OK):
        pytest.skip("/dev/kmsg is not ours to write and read here")
    host.box.run(["mknod", "/dev/kmsg", "c", "1", "11"])
    yield
    host.box.run(["rm", "/dev/kmsg"])


def no_client_loses_an_answer(one: World, fault: Callable[[World], None], what: str) -> None:
    fault_box.change(one.box, seconds=0.5)
    before, replayed = (one.engine_pid(0), one.engine_pid(1)), one.replays()
    shares: set[float] = set()
    with one.load(CLIENTS) as load:
        time.sleep(1.0)  # every client has a stream
        fault(one)
        one.until(lambda: one.ledger()["state"] == "RESETTING")
        assert [scope for scope in one.scopes() if "gpu0" in scope] == [], "no engine while the GPU is reset"
        assert one.ledger()["state"] == "RESETTING" and one.resets() == [0, 0]

        def healthy() -> bool:
            if one.ledger()["state"] == "PROBATION" and one.serves(0):
                shares.add(one.launcher(0)["share"])
            return one.way()[-1:] == ["HEALTHY"]

        one.until(healthy, 120)
        one.healthy()
        time.sleep(1.0)
    seen = load.nothing_lost()
    assert seen["answers"] > CLIENTS and one.replays() > replayed, "streams were cut, and went on elsewhere"
    assert [state for state in one.way() if state != "SUSPECT"] == REPAIR[1:] and one.way(1) == []
    assert one.resets() == [1, 0] and fault_box.all_is_back(one.box)
    assert shares == {0.25}, "on probation it has the policy's share"
    assert one.engine_pid(0) != before[0] and one.engine_pid(1) == before[1]
    assert "golden answers and weights as recorded" in one.events("watchdog_verified", gpu=0)[-1]["detail"]
    tell(one, what)
    print(f"{seen['answers']} answers of {CLIENTS} clients, {one.replays() - replayed:.0f} replays, the longest pause "
          f"{seen['longest_pause']:.1f} s")  # fmt: skip


def test_an_uncorrectable_error(one: World) -> None:
    no_client_loses_an_answer(one, uncorrectable, "uncorrectable error")


def test_a_line_of_the_kernel(kernel_log: None, one: World) -> None:
    no_client_loses_an_answer(one, kernel_line, "Xid 95 in the kernel's log")
    assert one.events("watchdog_signal", key="xid:95", gpu=0)[0]["source"] == "kmsg"


@pytest.mark.skipif(not FULL, reason="APPLIANCE_FULL=1")
def test_these_clients_notice_a_wrong_answer(one: World) -> None:
    """Else the tests here would prove nothing. Some weights of one engine get another sign."""
    one.box.run(["systemctl", "stop", WATCHDOG])
    size = int(one.engine(1).state()["engine"]["weights_bytes"])
    places = [(offset // 4 * 4 + 3, 7) for offset in range(0, size, size // 150)]
    with one.load(8) as load:
        for offset, bit in places:
            one.flip(1, offset, bit)
        time.sleep(1.0)
        for offset, bit in places:
            one.flip(1, offset, bit)
    assert load.result["wrong"], load.result
    assert one.engine(1).checksum()["ok"]


# -------------------------------------------------------------------------------------------------- what must not harm
def test_a_storm_of_corrected_errors_changes_nothing_but_metrics(one: World) -> None:
    """17,700 a second: what NVSentinel #1748 saw on one GPU."""
    name = 'appliance_gpu_nvml{gpu="0",field="corrected_volatile"}'
    before = one.engine_pid(0), one.engine_pid(1)
    with one.load(2 if not FULL else CLIENTS) as load:
        set_gpu(one.nvml, UUIDS[0], per_second={"corrected_volatile": 17_700, "corrected_aggregate": 17_700})
        add_event(one.nvml, UUIDS[0], "sbe_storm")
        one.until(lambda: one.metrics().get(name, 0.0) > (500_000 if FULL else 50_000), 120)
        assert one.launcher(0)["share"] == 1.0 and one.serves(0)
    load.nothing_lost()
    assert one.way() == [] and one.way(1) == [] and one.resets() == [0, 0]
    assert (one.engine_pid(0), one.engine_pid(1)) == before
    assert one.gpu()["owed"] is None and one.gpu()["incident"] is None
    (check,) = [check for check in one.gpu()["checks"] if check["name"] == "corrected errors"]
    assert check["status"] == "degraded", check


def pinged(one: World) -> int:
    """When the watchdog last said WATCHDOG=1 (systemd's clock, microseconds)."""
    return int(one.box.show(WATCHDOG, "WatchdogTimestampMonotonic")["WatchdogTimestampMonotonic"])


def compared(one: World) -> float:
    return one.metrics().get('appliance_gpu_golden_total{gpu="0",verdict="same"}', 0.0)


def nvml_check(one: World) -> str:
    return str(next(check["status"] for check in one.gpu()["checks"] if check["name"] == "NVML"))


def no_hang(script: dict[str, Any]) -> None:
    script.pop("hang")


@pytest.mark.parametrize("where", ["nvml", "events"] if FULL else ["nvml"])
def test_a_hung_nvml_never_stops_the_loop(one: World, where: str) -> None:
    """WatchdogSec is 3 s here: without a ping from the loop systemd would end it."""
    pid = one.pid()
    change_script(one.nvml, lambda script: script.update(hang=where))
    one.until(lambda: one.document()["counters"]["nvml_hangs"] >= 2)
    first, golden = pinged(one), compared(one)
    for _ in range(2):
        last = pinged(one)
        one.until(lambda last=last: pinged(one) > last)
    one.until(lambda: compared(one) > golden, 30)
    assert one.pid() == pid and one.box.show(WATCHDOG, "NRestarts")["NRestarts"] == "0"
    assert one.way() == [] and one.serves(0) and one.resets() == [0, 0]
    assert one.metrics()["appliance_watchdog_nvml_hangs_total"] >= 2
    one.until(lambda: nvml_check(one) == "unknown")
    change_script(one.nvml, no_hang)
    since = time.time()
    one.until(lambda: (one.gpu()["probed_at"] or 0) > since, 90)
    assert nvml_check(one) == "ok" and pinged(one) > first
    inject(one.nvml, UUIDS[0], "xid:95")  # and it acts again
    one.healthy()
    assert one.resets() == [1, 0]


@pytest.mark.skipif(not FULL, reason="APPLIANCE_FULL=1")
def test_an_nvml_that_hangs_when_it_is_closed_does_not_keep_a_gpu_from_its_reset(one: World) -> None:
    change_script(one.nvml, lambda script: script.update(hang="close"))
    add_event(one.nvml, UUIDS[0], "xid", xid=95)
    one.until(lambda: one.resets() == [1, 0])
    change_script(one.nvml, no_hang)
    one.healthy()


def test_a_gpu_whose_firmware_hangs_is_reset_though_nvml_does_not_answer(kernel_log: None, one: World) -> None:
    """open-gpu-kernel-modules #446: Xid 119 in the kernel's log, and every call of NVML waits. The reset ends that."""
    cure = {"hang": None}
    fault_box.change(one.box, on_reset=[{"file": SCRIPT, "merge": cure}])
    with one.load(8) as load:
        change_script(one.nvml, lambda script: script.update(hang="nvml"))
        one.until(lambda: nvml_check(one) == "unknown")
        kernel_line(one, 119, "Timeout waiting for RPC from GSP0! Expected function 76")
        one.until(lambda: one.way()[-1:] == ["HEALTHY"], 90)
        one.healthy()
    load.nothing_lost()
    assert one.resets() == [1, 0] and one.way(1) == [] and nvml_check(one) == "ok"
    tell(one, "Xid 119 while NVML hangs")


def test_two_gpus_at_once_are_one_cause_and_nothing_is_reset(kernel_log: None, one: World) -> None:
    before = one.engine_pid(0), one.engine_pid(1)
    with one.load(8) as load:
        kernel_line(one, 109, "Ctxsw timeout", (0, 1))
        one.until(lambda: one.document()["breaker"])
        time.sleep(1.0)
    load.nothing_lost()
    one.until(lambda: one.serves(0) and one.serves(1))
    assert one.resets() == [0, 0] and "GPUs 0, 1" in one.events("watchdog_alert", key="halted")[0]["text"]
    assert one.engine_pid(1) == before[1], "the second one was not even stopped"
    for gpu in (0, 1):
        one.cli("healthcheck.cli", "set-healthy", str(gpu), "--reason", "driver is fine again")
        one.until(lambda gpu=gpu: one.ledger(gpu)["state"] == "HEALTHY")


# ------------------------------------------------------------------------------------------------- weights that changed
def test_the_checksum_finds_every_flipped_bit(one: World) -> None:
    """Through /admin/flip and /admin/checksum of an engine that serves; and how many of them golden answers find."""
    one.box.run(["systemctl", "stop", WATCHDOG])
    engine, dice = one.engine(0), random.Random(number := seed())
    size = int(engine.state()["engine"]["weights_bytes"])
    found = golden = 0
    socket = str(engine.socket)
    for _ in range(FLIPS):
        offset, bit = dice.randrange(size), dice.randrange(8)
        one.flip(0, offset, bit)
        verdict = compare(one.paths, "v1", socket)
        assert verdict.weights_differ, f"seed {number}: offset {offset} bit {bit}: {verdict}"
        found, golden = found + 1, golden + verdict.logits_differ
        one.flip(0, offset, bit)
        assert engine.checksum()["ok"], f"seed {number}: offset {offset} bit {bit} was put back"
    print(f"\n{FLIPS} flips (seed {number}): the checksum found {found}, golden answers {golden}")


@contextmanager
def flipped_at_each_start(one: World, gpu: int) -> Iterator[list[int]]:
    """A memory that damages the weights again and again: every engine of this GPU has a bit turned over as soon as it
    answers. The pids of those engines."""
    done, over = list[int](), threading.Event()

    def flip() -> None:
        while not over.wait(0.02):
            pid = one.engine_pid(gpu)
            if pid is not None and pid not in done:
                with suppress(EngineUnavailable):
                    one.flip(gpu, 4096, 3)
                    done.append(pid)

    thread = threading.Thread(target=flip)
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join()


def test_a_fault_that_comes_back_at_each_start_ends_in_quarantine(one: World) -> None:
    with flipped_at_each_start(one, 0) as engines:
        one.until(lambda: one.ledger()["state"] == "QUARANTINED", 120)
    assert one.resets() == [2, 0], "the attempts that the policy allows"
    assert len(engines) == 3 and one.events("watchdog_signal", gpu=0, key="checksum:mismatch")
    ledger = one.ledger()
    assert ledger["needs"] == "rma" and "2 resets in 24 h" in ledger["reason"]
    (alert,) = one.events("watchdog_alert", gpu=0, key="quarantined")
    assert "needs rma" in alert["text"]
    one.until(lambda: one.engine_pid(0) is None)
    assert one.way(1) == [] and one.serves(1) and fault_box.all_is_back(one.box)
    with one.load(4) as load:
        time.sleep(1.0)
    load.nothing_lost()
    one.cli("healthcheck.cli", "set-healthy", "0", "--reason", "board swapped")
    one.healthy()
    assert one.resets() == [2, 0]


def test_the_last_gpu_that_serves_is_not_drained_for_what_can_wait(one: World) -> None:
    other = ControlClient(one.paths, 1)
    other.call("hold", owner="operator", reason="works at it", level="drain", wait=True, timeout=60)
    try:
        set_fields(one.nvml, UUIDS[0], remap_pending=True)
        one.until(lambda: one.events("watchdog_alert", gpu=0, key="owed"))
        set_fields(one.nvml, UUIDS[0], recovery_action=4)  # nvidia-smi(1): drain and reset
        one.until(lambda: one.events("watchdog_signal", gpu=0, key="recovery_action:4"))
        with one.load(2) as load:
            time.sleep(2.0 if not FULL else 30.0)  # [deferred] quiet is 0.5 s
            assert one.serves(0) and one.launcher(0)["holds"] == {}
        load.nothing_lost()
        assert one.resets() == [0, 0] and not {"DRAINING", "STOPPING"} & set(one.way())
        assert one.gpu()["owed"] is not None
    finally:
        other.call("unhold", owner="operator", wait=True, timeout=60)
    one.until(lambda: one.resets() == [1, 0])  # now that another one serves
    one.healthy()
    assert "DRAINING" in one.way() and one.gpu()["owed"] is None


# ------------------------------------------------------------------------------------------- a watchdog that is killed
PHASES = {
    "xid:48": ["SUSPECT", "STOPPING", "RESETTING", "WARMUP", "VERIFY", "PROBATION"],
    "recovery_action:4": ["DRAINING", "STOPPING", "RESETTING", "WARMUP", "VERIFY", "PROBATION"],
}


@pytest.mark.parametrize("cause", PHASES)
def test_killed_in_each_phase_it_goes_on_where_it_was(host: World, cause: str) -> None:
    """SIGKILL; systemd starts it again. One reset for one fault, and everything is in its place afterwards."""
    host.fresh(MANY)
    one, dice = host, random.Random(number := seed())
    phases = PHASES[cause] if FULL else PHASES[cause][:: 1 if cause == "xid:48" else 6]
    killed: list[str] = []
    fault_box.change(one.box, seconds=1.0)
    with one.load(8) as load:
        for incident in range(1, 1 + KILL_ROUNDS):
            one.until(lambda: one.gpu()["probed_at"] is not None)  # NVML tells of nothing from before it was opened
            inject(one.nvml, UUIDS[0], cause)
            for phase in phases:
                one.until(lambda phase=phase, n=incident: one.way().count(phase) >= n)
                if FULL:
                    time.sleep(dice.uniform(0.0, 0.3))
                one.until(one.kill)
                killed.append(one.ledger()["state"])
            one.until(lambda n=incident: one.way().count("HEALTHY") == n, 120)
            assert one.resets() == [incident, 0], f"seed {number}, killed in {killed}"
    load.nothing_lost()
    one.healthy()
    assert one.box.show(WATCHDOG, "NRestarts")["NRestarts"] == str(len(killed))
    assert "QUARANTINED" not in one.way() and one.way(1) == []
    assert fault_box.all_is_back(one.box) and one.launcher(0)["holds"] == {}
    ledger = one.ledger()
    assert ledger["state"] == "HEALTHY" and ledger["incident"] is None
    print(f"\n{cause}: killed in {', '.join(killed)} (seed {number})")


def test_a_reboot_takes_what_needed_one_back_into_service(one: World) -> None:
    inject(one.nvml, UUIDS[0], "xid:79")
    one.until(lambda: one.ledger()["state"] == "QUARANTINED")
    assert one.ledger()["needs"] == "reboot" and one.resets() == [0, 0]
    one.box.run(["systemctl", "restart", WATCHDOG])  # not a reboot
    one.until(lambda: one.ledger()["state"] == "QUARANTINED" and "v1" in str(one.gpu(1)["checks"]))
    seen = len(one.way())
    one.reboot()
    one.healthy()
    assert one.way()[seen:] == ["WARMUP", "VERIFY", "PROBATION", "HEALTHY"] and one.resets() == [0, 0]
    assert "golden answers and weights as recorded" in one.events("watchdog_verified", gpu=0)[-1]["detail"]
    assert one.way(1) == [] and one.serves(1)
    tell(one, "after a reboot")


@pytest.fixture
def as_a_power_cut(host: World) -> Iterator[None]:
    """Nothing follows a reset that was killed: no ExecStopPost."""
    drop_in = "/etc/systemd/system/appliance-gpu-reset@.service.d/cut.conf"
    host.box.write(drop_in, "[Service]\nExecStopPost=\n")
    host.box.run(["systemctl", "daemon-reload"])
    yield
    host.box.run(["rm", drop_in])
    host.box.run(["systemctl", "daemon-reload"])


@pytest.mark.parametrize("rebooted", [True, False] if FULL else [False])
def test_all_are_killed_in_the_middle_of_a_reset(as_a_power_cut: None, one: World, rebooted: bool) -> None:
    """Watchdog and reset at once. After a power cut the reboot has reset the GPU, and has started services and
    persistence mode anew; else the watchdog's unit starts what the reset had stopped, and there is a second try."""
    fault_box.change(one.box, reset="hang")
    inject(one.nvml, UUIDS[0], "xid:95")
    one.until(lambda: any("--gpu-reset" in call for call in fault_box.state(one.box)["calls"]))
    assert not fault_box.all_is_back(one.box)
    assert one.kill()
    one.box.run(["systemctl", "kill", "--signal=KILL", "appliance-gpu-reset@*"])
    fault_box.change(one.box, reset="ok")
    if rebooted:
        one.reboot()
    one.until(lambda: one.way()[-1:] == ["HEALTHY"], 90)
    assert one.resets() == ([0, 0] if rebooted else [1, 0])
    again = [] if rebooted else ["STOPPING", "RESETTING"]
    assert one.way() == ["STOPPING", "RESETTING", *again, "WARMUP", "VERIFY", "PROBATION", "HEALTHY"]
    assert rebooted or fault_box.all_is_back(one.box)
    one.healthy()
    assert one.ledger()["incident"] is None and list((one.paths.state / "resets").glob("*.intent.json")) == []


@pytest.mark.skipif(not FULL, reason="APPLIANCE_FULL=1")
@pytest.mark.parametrize("phase", ["STOPPING", "RESETTING", "WARMUP", "VERIFY"])
def test_a_launcher_that_is_killed_meanwhile_delays_the_repair(one: World, phase: str) -> None:
    """Its hold is on disk, and the watchdog asks until a launcher answers."""
    fault_box.change(one.box, seconds=1.0)
    with one.load(4) as load:
        inject(one.nvml, UUIDS[0], "xid:95")
        one.until(lambda: phase in one.way())
        one.box.run(["systemctl", "kill", "--kill-who=main", "--signal=KILL", "appliance-gpu@0"])
        one.until(lambda: one.way()[-1:] == ["HEALTHY"], 120)
        one.healthy()
    load.nothing_lost()
    assert one.resets() == [1, 0] and one.way(1) == [] and fault_box.all_is_back(one.box)


@pytest.mark.skipif(not FULL, reason="APPLIANCE_FULL=1")
@pytest.mark.parametrize("phase", ["RESETTING", "WARMUP", "PROBATION"])
def test_stopped_and_started_as_a_whole_in_the_middle_of_a_repair(one: World, phase: str) -> None:
    """`appliance stop` and `appliance start`, as an upgrade does."""
    fault_box.change(one.box, seconds=1.0)
    inject(one.nvml, UUIDS[0], "xid:95")
    one.until(lambda: phase in one.way())
    one.cli("appliance", "stop")
    assert one.box.show(WATCHDOG, "ActiveState")["ActiveState"] == "inactive"
    one.cli("appliance", "start")
    assert one.box.show(WATCHDOG, "ActiveState")["ActiveState"] == "active"
    one.until(lambda: one.way()[-1:] == ["HEALTHY"], 120)
    one.healthy()
    assert one.resets() == [1, 0] and one.serves(1) and one.way(1) == [] and fault_box.all_is_back(one.box)
    with one.load(4) as load:
        time.sleep(1.0)
    load.nothing_lost()


# -------------------------------------------------------------------------------------------------- what people see
def test_what_people_see_of_it(one: World) -> None:
    """The command as root and as somebody else, and the gateway's /metrics, which hands on the watchdog's."""
    one.until(lambda: compared(one) >= 1)
    state = 'appliance_gpu_state{gpu="0",uuid="CPU-0",state="%s"}'
    one.until(lambda: one.gateway_metrics().get(state % "HEALTHY") == 1)
    for user in (None, "appliance", "daemon"):
        lines = one.cli("healthcheck.cli", "status", user=user).splitlines()
        assert "2 of 2 GPUs healthy" in lines[0] and all(line == line.rstrip(": ") for line in lines), lines
    argv = [PYTHON, "-P", "-m", "healthcheck.cli"]
    refused = one.box.run([*argv, "maintenance", "on", "--reason", "x"], user="daemon", check=False)
    assert refused.returncode not in (0, 2) and "Traceback" not in refused.stderr
    one.cli("healthcheck.cli", "inject-fault", "0", "xid:79", "--i-know")
    one.until(lambda: one.ledger()["state"] == "QUARANTINED")
    one.until(lambda: one.gateway_metrics().get(state % "QUARANTINED") == 1)
    assert one.gateway_metrics()['appliance_gpu_needs{gpu="0",needs="reboot"}'] == 1
    seen = one.box.run([*argv, "status"], user="daemon", check=False)
    assert seen.returncode == 1 and "QUARANTINED" in seen.stdout and "reboot" in seen.stdout
    assert "xid:79" in one.cli("healthcheck.cli", "history", "--gpu", "0")
    one.script()
    one.cli("healthcheck.cli", "set-healthy", "0", "--reason", "test")
    one.healthy()
