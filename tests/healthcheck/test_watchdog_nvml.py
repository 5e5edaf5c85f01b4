"""The watchdog with a scripted NVML, real launchers and real engines: what NVML says decides, and what it does not say
decides nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from appliance.unix_http import UnixConnection
from healthcheck.cli import main as healthcheck
from healthcheck.script_edit import add_event, change_script, set_fields, set_gpu
from tests.appliance.gateway.world import metric_value
from tests.healthcheck.test_watchdog_life import REPAIR
from tests.healthcheck.watchdog_world import FULL, World


@pytest.fixture(autouse=True)
def scripted(one: World) -> Iterator[None]:
    with one.with_nvml():
        yield


def checks(one: World, gpu: int = 0) -> dict[str, str]:
    return {row["name"]: row["status"] for row in one.gpu(gpu)["checks"]}


def metrics(one: World) -> str:
    connection = UnixConnection(one.paths.watchdog_socket, 10)
    connection.request("GET", "/metrics")
    return connection.getresponse().read().decode()


def test_an_uncorrectable_error_is_repaired_by_what_nvml_says(one: World) -> None:
    """Xid 48 as an event, counter and recovery action with it (nvml.h: 1 is GPU_RESET)."""
    one.start()
    one.until(lambda: checks(one).get("recovery action") == "ok")
    set_fields(one.script, "CPU-0", uncorrected_volatile=1, uncorrected_aggregate=1, recovery_action=1)
    add_event(one.script, "CPU-0", "xid", xid=48)
    one.until(lambda: one.way()[-1:] == ["HEALTHY"])
    assert one.way()[-len(REPAIR) + 1 :] == REPAIR[1:] and one.way(1) == []
    assert one.resets() == ["CPU-0"]
    keys = {event["key"] for event in one.events("watchdog_signal", gpu=0)}
    assert {"xid:48", "recovery_action:1", "ecc:uncorrected"} <= keys
    one.until(lambda: checks(one)["uncorrected errors"] == "ok")


def test_corrected_errors_change_nothing_but_metrics(one: World) -> None:
    """17,700 a second, as NVIDIA/NVSentinel #1748 saw them, and a lifetime of aggregate errors."""
    set_gpu(one.script, "CPU-0", per_second={"corrected_volatile": 17_700, "corrected_aggregate": 17_700})
    set_fields(one.script, "CPU-0", uncorrected_aggregate=12, remapped_uncorrected=3, remapped_corrected=8)
    one.start()
    one.until(lambda: metric_value(metrics(one), "appliance_gpu_nvml", gpu="0", field="corrected_volatile") > 40_000)
    gpu = one.gpu()
    assert gpu["state"] == "HEALTHY" and one.hold() is None and one.resets() == [] and one.way() == []
    assert checks(one)["corrected errors"] == "degraded" and checks(one, 1)["corrected errors"] == "ok"


def test_a_gpu_that_hangs_is_unknown_and_stops_nobody(one: World) -> None:
    set_gpu(one.script, "CPU-0", hang=True)
    one.start()
    one.until(lambda: checks(one).get("NVML") == "unknown" and checks(one, 1).get("NVML") == "ok")
    begun, asked = time.monotonic(), 0
    while time.monotonic() - begun < 3:
        one.document()
        asked += 1
    assert asked > 30, "the loop answers while NVML hangs"
    assert one.document()["counters"]["nvml_hangs"] >= 1
    assert one.way() == [] and one.hold() is None and one.resets() == []
    set_gpu(one.script, "CPU-0", hang=None)


def test_what_a_gpu_shows_after_one_hang_is_seen_at_the_next_probe(one: World) -> None:
    set_gpu(one.script, "CPU-0", hang=True)
    one.start()
    one.until(lambda: one.document()["counters"]["nvml_hangs"] >= 1)
    assert healthcheck(["check", "--gpu", "0", "--timeout", "20"]) == 3
    set_gpu(one.script, "CPU-0", hang=None)
    one.until(lambda: checks(one)["NVML"] == "ok")  # a try that began before hangs once more
    set_fields(one.script, "CPU-0", recovery_action=1)
    one.until(lambda: one.way()[-1:] == ["HEALTHY"])
    assert one.resets() == ["CPU-0"] and one.way(1) == []


def test_status_names_a_gpu_that_is_not_read_and_history_the_hangs(
    one: World, capsys: pytest.CaptureFixture[str]
) -> None:
    one.start()
    one.until(lambda: checks(one).get("NVML") == checks(one, 1).get("NVML") == "ok")
    assert healthcheck(["status"]) == 0
    set_gpu(one.script, "CPU-0", hang=True)
    one.until(lambda: healthcheck(["status"]) == 1)
    out = capsys.readouterr().out
    assert "! gpu 0 has not been read for" in out and "! gpu 1" not in out
    one.until(lambda: one.events("watchdog_signal", gpu=0, key="probe:hung"))
    assert one.way() == [] and one.resets() == [], "unknown never takes a GPU out"
    set_gpu(one.script, "CPU-0", hang=None)
    one.until(lambda: healthcheck(["status"]) == 0)


def test_a_level_that_lasts_is_one_signal_in_the_history(one: World) -> None:
    """A corrected storm at every probe: README, once an hour."""
    set_gpu(one.script, "CPU-0", per_second={"corrected_volatile": 17_700})
    one.start()
    name = 'appliance_watchdog_signals_total{gpu="0",key="ecc:corrected_rate"}'
    one.until(lambda: any(line.startswith(name) and float(line.split()[-1]) >= 6 for line in metrics(one).splitlines()))
    assert len(one.events("watchdog_signal", gpu=0, key="ecc:corrected_rate")) == 1


def test_nvml_that_hangs_as_a_whole_is_unknown_for_all(one: World) -> None:
    """Not 180 s later, when the last reading is stale."""
    one.start()
    one.until(lambda: checks(one).get("NVML") == checks(one, 1).get("NVML") == "ok")
    change_script(one.script, lambda script: script.update(hang="nvml"))
    one.until(lambda: checks(one).get("NVML") == checks(one, 1).get("NVML") == "unknown")
    assert [row["status"] for row in one.document()["checks"] if row["name"] == "GPUs"] == ["unknown"]
    assert one.way() == [] and one.hold() is None
    change_script(one.script, lambda script: script.pop("hang"))
    one.until(lambda: checks(one).get("NVML") == checks(one, 1).get("NVML") == "ok")
    assert [row["status"] for row in one.document()["checks"] if row["name"] == "GPUs"] == ["ok"]


def test_a_fault_that_comes_back_at_each_reset_ends_in_quarantine(one: World) -> None:
    set_gpu(one.script, "CPU-1", again={"fields": {"recovery_action": 1}})
    one.start()
    one.until(lambda: checks(one, 1).get("recovery action") == "ok")
    set_fields(one.script, "CPU-1", recovery_action=1)
    gpu = one.reach("QUARANTINED", 1)
    assert one.resets() == ["CPU-1"] * 2 and one.way(0) == []
    assert "recovery_action:1" in gpu["reason"] and one.events("watchdog_alert", gpu=1, key="quarantined")
    set_gpu(one.script, "CPU-1", again=None)
    set_fields(one.script, "CPU-1", recovery_action=0)
    one.ask("set-healthy", gpu=1, reason="board swapped")
    one.reach("HEALTHY", 1)


@pytest.mark.skipif(not FULL, reason="APPLIANCE_FULL=1")
def test_a_fault_from_before_the_start_is_found_by_its_level(one: World) -> None:
    """scitix/sichek PR #121: Xid 95 while nobody looked, all counters 0, recovery action Reset."""
    set_fields(one.script, "CPU-0", recovery_action=1)
    one.start()
    one.until(lambda: one.way()[-1:] == ["HEALTHY"])
    assert one.resets() == ["CPU-0"]


@pytest.mark.skipif(not FULL, reason="APPLIANCE_FULL=1")
def test_errors_while_it_was_down_leave_a_difference(one: World) -> None:
    set_gpu(one.script, "CPU-0", unsupported=["recovery_action"])
    set_fields(one.script, "CPU-0", uncorrected_volatile=2)
    one.start()
    one.until(lambda: checks(one).get("uncorrected errors") == "ok")
    assert checks(one)["recovery action"] == "unknown" and one.way() == [], "not supported is not a fault"
    assert one.stop() == 0
    set_fields(one.script, "CPU-0", uncorrected_volatile=3)
    one.start()
    one.until(lambda: one.events("watchdog_signal", gpu=0, key="ecc:uncorrected"))
    one.until(lambda: one.resets() == ["CPU-0"])
    one.reach("HEALTHY")


@pytest.mark.skipif(not FULL, reason="APPLIANCE_FULL=1")
def test_the_ledger_of_a_reset_names_what_it_took(one: World) -> None:
    one.start()
    one.until(lambda: checks(one).get("recovery action") == "ok")
    one.inject("recovery_action:1")  # written into the script: the reset cures it
    one.until(lambda: one.way()[-1:] == ["HEALTHY"])
    phases = json.loads(one.paths.watchdog_state.read_text())["gpus"][0]["phases"]
    assert {"STOPPING", "RESETTING", "WARMUP", "VERIFY"} <= phases.keys()
    detail = one.events("watchdog_verified", gpu=0)[-1]["detail"]
    assert "NVML's levels allow it" in detail and "golden answers" in detail
