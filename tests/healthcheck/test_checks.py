"""What readings mean. Figures and rules are nvml.h's, DCGM's and those of the threads named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthcheck.checks import (
    RECOVERY_ACTIONS,
    Baseline,
    Judged,
    check_age,
    check_hosts_gpus,
    decode_baselines,
    encode_baselines,
    event_signals,
    hang_signals,
    judge,
)
from healthcheck.limits import Limits, LimitsError, read_limits
from healthcheck.nvml import Hang, Round
from healthcheck.nvml_protocol import Event, Value
from healthcheck.nvml_read import FIELDS
from healthcheck.scripted_nvml import HEALTHY
from healthcheck.types import Check, GpuReading, Status

RECORD = Path(__file__).parents[1] / "bench/results/nvml-2026-11-30T060740Z.json"
LIMITS = Limits()
UUID = "GPU-aaaaaaaa-0000-0000-0000-000000000000"
START = 1_800_000_000.0


def reading(at: float = 0.0, error: str | None = None, **fields: Value) -> GpuReading:
    """Of a healthy H200, but for `fields`; None is not supported. `at`: seconds after the first one."""
    found = HEALTHY | fields
    unknown = {name: "not supported" for name, value in found.items() if value is None}
    return GpuReading(UUID, START + at, found, unknown, error)


def run(*readings: GpuReading, limits: Limits = LIMITS) -> Judged:
    """The last of them, each judged by what the one before left."""
    baseline: Baseline | None = None
    judged = None
    for each in readings:
        judged = judge(each, baseline, limits)
        baseline = judged.baseline
    assert judged is not None
    return judged


def keys(judged: Judged) -> list[str]:
    assert all(signal.uuid == UUID and signal.source == "nvml" for signal in judged.signals)
    return [signal.key for signal in judged.signals]


def check(judged: Judged, name: str) -> Check:
    (found,) = [one for one in judged.checks if one.name == name]
    return found


# -- healthy ones
@pytest.mark.parametrize("number", [0, 1])
def test_real_h200s_are_ok_in_every_check(number: int) -> None:
    gpu = json.loads(RECORD.read_text())["gpus"][number]
    judged = judge(GpuReading(gpu["uuid"], gpu["at"], gpu["fields"], gpu["unknown"], gpu["error"]), None, LIMITS)
    assert judged.signals == () and {one.status for one in judged.checks} == {Status.OK}
    assert {one.name for one in judged.checks} >= {
        "recovery action", "uncorrected errors", "corrected errors", "SRAM threshold", "row remapping", "PCIe link",
        "NVLink", "fabric", "clocks", "temperature", "power", "persistence mode",
    }  # fmt: skip


def test_a_card_that_supports_nothing_is_unknown_and_brings_no_signal() -> None:
    """GeForce: NOT_SUPPORTED is no 0 (nvtop PR #486) and no fault (gpud PR #1140)."""
    judged = run(reading(**dict.fromkeys(HEALTHY)), reading(30, **dict.fromkeys(HEALTHY)))
    assert keys(judged) == []
    assert {one.status for one in judged.checks if one.name != "NVML"} == {Status.UNKNOWN}
    assert check(judged, "uncorrected errors").reason == "not supported"


# -- memory errors
def test_corrected_and_aggregate_counts_never_bring_more_than_a_rate() -> None:
    """NVIDIA/DCGM #313, NVSentinel #1748: 9.6e9 corrected errors at 17,700 per second, none uncorrected."""
    many = {"corrected_volatile": 9_600_000_000, "corrected_aggregate": 2**63, "uncorrected_aggregate": 5}
    judged = run(reading(**many), reading(30, **many | {"corrected_volatile": 9_600_000_000 + 17_700 * 30}))
    assert keys(judged) == ["ecc:corrected_rate"] and "1.77e+04" in judged.signals[0].detail
    assert check(judged, "corrected errors").status is Status.DEGRADED
    assert check(judged, "errors ever").status is Status.OK
    assert keys(run(reading(**many), reading(30, **many))) == []


def test_what_was_there_before_us_is_history_what_is_added_is_not() -> None:
    old = {"uncorrected_volatile": 4, "uncorrected_volatile_dram": 4}
    assert keys(run(reading(**old))) == []
    assert keys(run(reading(**old), reading(30, **old))) == []
    judged = run(reading(**old), reading(30, uncorrected_volatile=6, uncorrected_volatile_dram=5,
                                         uncorrected_volatile_sram=1))  # fmt: skip
    assert keys(judged) == ["ecc:uncorrected"]
    assert "2 uncorrected" in judged.signals[0].detail and "1 in DRAM, 1 in SRAM" in judged.signals[0].detail
    assert check(judged, "uncorrected errors").status is Status.FAILED


def test_a_counter_that_goes_back_is_a_new_beginning() -> None:
    """nvml.h: volatile counters start again whenever the driver loads, and with a reset."""
    up, down = reading(uncorrected_volatile=9), reading(30, uncorrected_volatile=2)
    assert keys(run(up, down)) == []
    assert keys(run(up, down, reading(60, uncorrected_volatile=2))) == []
    assert keys(run(up, down, reading(60, uncorrected_volatile=3))) == ["ecc:uncorrected"]


def test_a_reading_that_failed_between_two_others_hides_nothing() -> None:
    between = reading(30, uncorrected_volatile=None, pcie_replays=None)
    judged = run(reading(), between, reading(60, uncorrected_volatile=1))
    assert keys(judged) == ["ecc:uncorrected"]


def test_a_rate_is_over_the_whole_time_that_a_counter_was_not_read() -> None:
    between = reading(60, corrected_volatile=None)
    assert keys(run(reading(), between, reading(61, corrected_volatile=300))) == []  # 4.9 per second, not 300
    assert keys(run(reading(), reading(60), reading(61, corrected_volatile=300))) == ["ecc:corrected_rate"]


def test_without_a_recovery_action_the_signal_says_so() -> None:
    judged = run(reading(), reading(30, recovery_action=None, uncorrected_volatile=1))
    assert keys(judged) == ["ecc:uncorrected"] and "recovery action is not known" in judged.signals[0].detail
    assert check(judged, "recovery action").status is Status.UNKNOWN


@pytest.mark.parametrize(
    ("fields", "expected", "name", "status"),
    [
        ({"remap_pending": True, "remapped_uncorrected": 1}, "remap:pending", "row remapping", Status.DEGRADED),
        ({"remap_failure": True, "remap_pending": True}, "remap:failure", "row remapping", Status.FAILED),
        ({"sram_threshold_exceeded": True}, "sram:threshold", "SRAM threshold", Status.FAILED),
        ({"ecc_mode": False, "ecc_mode_pending": False}, "ecc:off", "ECC", Status.DEGRADED),
        ({"ecc_mode_pending": False}, "ecc:pending_off", "ECC", Status.DEGRADED),
        ({"mig_mode": True}, "gpu:mig", "MIG", Status.DEGRADED),
    ],
)
def test_levels_count_from_the_first_reading_on(
    fields: dict[str, Value], expected: str, name: str, status: Status
) -> None:
    """scitix/sichek PR #121: a fault from while nobody watched leaves no difference, only the level."""
    judged = run(reading(**fields))
    assert keys(judged) == [expected] and check(judged, name).status is status
    assert keys(run(reading(**fields), reading(30, **fields))) == [expected]


def test_remapped_rows_are_history_not_a_fault() -> None:
    """NVSentinel: UNCORRECTABLE_ROW_REMAP -> NONE; 512 is DCGM's warning."""
    assert keys(run(reading(remapped_uncorrected=8, remapped_corrected=100))) == []
    assert check(run(reading(remapped_uncorrected=511)), "row remapping").status is Status.OK
    judged = run(reading(remapped_uncorrected=512))
    assert check(judged, "row remapping").status is Status.DEGRADED and keys(judged) == []


def test_an_older_generation_retires_pages_instead() -> None:
    old = {"remap_pending": None, "remap_failure": None, "retired_pages_pending": True}
    judged = run(reading(**old))
    assert keys(judged) == ["pages:pending"] and not [c for c in judged.checks if c.name == "row remapping"]
    assert not [c for c in run(reading()).checks if c.name == "retired pages"]


@pytest.mark.parametrize("action", [1, 2, 3, 4, 5, 6, 7, 99])
def test_the_recovery_action_is_passed_on_whatever_its_number(action: int) -> None:
    judged = run(reading(recovery_action=action))
    assert keys(judged) == [f"recovery_action:{action}"]
    assert check(judged, "recovery action").status is Status.FAILED
    assert (action in RECOVERY_ACTIONS) == ("not known" not in check(judged, "recovery action").reason)


@pytest.mark.parametrize(
    ("error", "expected", "status"),
    [
        ("gpu_is_lost", ["nvml:gpu_is_lost"], Status.FAILED),
        ("reset_required", ["nvml:reset_required"], Status.FAILED),
        ("nvml_999", [], Status.UNKNOWN),
        ("timeout", [], Status.UNKNOWN),
        ("not_found", [], Status.FAILED),
    ],
)
def test_errors_of_a_whole_gpu(error: str, expected: list[str], status: Status) -> None:
    judged = run(replace(reading(error=error), fields={}))
    assert keys(judged) == expected and check(judged, "NVML").status is status


def test_a_gpu_that_requires_a_reset_still_says_what_it_can() -> None:
    assert keys(run(reading(error="reset_required", recovery_action=1))) == ["nvml:reset_required", "recovery_action:1"]


# -- links
def test_a_link_counts_only_under_load_and_only_when_it_lasts() -> None:
    """open-gpu-kernel-modules #1010, NVSentinel #890: an idle link at generation 1 is power saving."""
    slow: dict[str, Value] = {"pcie_generation": 1, "pcie_width": 8}
    busy: dict[str, Value] = slow | {"clocks_event_reasons": 4, "utilization_percent": 95}
    assert [keys(run(*[reading(30 * n, **slow) for n in range(1, count)])) for count in (2, 9)] == [[], []]
    assert keys(run(*[reading(30 * n, **busy) for n in range(2)])) == []
    judged = run(*[reading(30 * n, **busy) for n in range(3)])
    assert keys(judged) == ["link:degraded"] and "gen 1 x8" in check(judged, "PCIe link").reason
    # a reading at full speed begins the count anew; an idle one says nothing
    assert keys(run(reading(**busy), reading(1, **busy), reading(2), reading(3, **busy))) == []
    assert keys(run(reading(**busy), reading(1, **busy), reading(2, **slow), reading(3, **busy))) == ["link:degraded"]


def test_a_load_that_is_not_known_is_no_load() -> None:
    unclear: dict[str, Value] = {"pcie_generation": 1, "clocks_event_reasons": None, "utilization_percent": 95}
    assert keys(run(*[reading(n, **unclear) for n in range(9)])) == []


@pytest.mark.parametrize(("generation", "per_minute"), [(4, 15.36), (5, 30.72)])
def test_replays_by_rate_generation_and_lanes(generation: int, per_minute: float) -> None:
    """DCGM: 0.96 and 1.92 per minute and lane, so about 15 and 31 for x16."""

    def after(count: int) -> list[str]:
        link: dict[str, Value] = {"pcie_generation": generation, "pcie_generation_max": generation}
        return keys(run(reading(**link, pcie_replays=1000), reading(60, **link, pcie_replays=1000 + count)))

    assert after(int(per_minute)) == [] and after(int(per_minute) + 1) == ["pcie:replays"]


def test_few_replays_in_a_short_time_are_no_rate() -> None:
    assert keys(run(reading(), reading(0.1, pcie_replays=2))) == []


def test_links_are_compared_with_this_gpus_own_best() -> None:
    """Azure #162: an H100 PCIe has 12 of 18 links by design."""
    assert keys(run(reading(nvlinks_up=12), reading(30, nvlinks_up=12))) == []
    judged = run(reading(nvlinks_up=18), reading(30, nvlinks_up=17))
    assert keys(judged) == ["nvlink:down"] and "17 links are up, there were 18" in check(judged, "NVLink").reason
    none = run(reading(nvlinks_up=None), reading(30, nvlinks_up=None))
    assert keys(none) == [] and not [c for c in none.checks if c.name == "NVLink"]
    assert check(run(reading(), reading(30, nvlinks_up=None)), "NVLink").status is Status.UNKNOWN


def test_nvlink_errors_by_rate() -> None:
    """DCGM: "CRC errors only matter at rates of 100+ per second"."""
    for added, expected in ((2900, []), (3100, ["nvlink:errors"])):
        first, second = reading(nvlink_crc_errors=10**6), reading(30, nvlink_crc_errors=10**6 + added)
        assert keys(run(first, second)) == expected


@pytest.mark.parametrize(
    ("fields", "bad"),
    [
        (
            {"fabric_state": 3, "fabric_status": 0, "fabric_health_mask": 0x80, "fabric_health": 1},
            False,
        ),  # EKS: healthy
        ({"fabric_state": 0}, False),  # not supported: no NVSwitch
        ({"fabric_state": 3, "fabric_status": 23}, True),  # NVSentinel #883: completed, insufficient resources
        ({"fabric_state": 2}, True),
        ({"fabric_health_mask": 0b01}, True),  # degraded bandwidth: true
        ({"fabric_health_mask": 0b10}, False),  # degraded bandwidth: false
        ({"fabric_health_mask": 0x10}, True),  # unhealthy route
        ({"fabric_health_mask": 0x100}, False),  # incorrect configuration: none
        ({"fabric_health_mask": 0x500}, True),  # insufficient NVLinks
        ({"fabric_health": 2}, True),
        ({"fabric_health": None}, False),  # a driver before the summary
    ],
)
def test_the_fabrics_mask_is_decoded_and_has_time_to_settle(fields: dict[str, Value], bad: bool) -> None:
    assert keys(run(reading(**fields), reading(30, **fields))) == []
    expected = ["fabric:unhealthy"] if bad else []
    assert keys(run(*[reading(30 * n, **fields) for n in range(LIMITS.settle_samples)])) == expected


# -- clocks, temperature, persistence
@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (0x1, []), (0x4, []), (0x5, []), (0x104, []), (0x20, []),  # 0x5 warned where masks are compared as a whole
        (0x48, ["clocks:thermal"]), (0x40, ["clocks:thermal"]), (0x80, ["clocks:power_brake"]),
        (0x88 | 0x4, ["clocks:power_brake"]), (0x8, ["clocks:slowdown"]), (0x1000, []),
    ],
)  # fmt: skip
def test_clocks_by_bits_and_only_if_sustained(mask: int, expected: list[str]) -> None:
    """gpud: 6 of 10 readings; software power cap is ordinary under load."""
    bad = {"clocks_event_reasons": mask}
    assert keys(run(*[reading(30 * n, **bad) for n in range(5)])) == []
    assert keys(run(*[reading(30 * n, **(bad if n % 2 else {})) for n in range(40)])) == []
    assert keys(run(*[reading(30 * n, **bad) for n in range(6)])) == expected


def test_a_reason_that_this_version_does_not_know_is_shown() -> None:
    assert check(run(reading(clocks_event_reasons=0x1004)), "clocks").reason == "software power cap, 0x1000"


def test_persistence_mode_has_time_after_a_boot() -> None:
    """gpud #431: the check ran before nvidia-persistenced was up."""
    off: dict[str, Value] = {"persistence_mode": False}
    assert keys(run(reading(**off), reading(30, **off))) == []
    assert keys(run(*[reading(30 * n, **off) for n in range(3)])) == ["persistence:off"]
    assert keys(run(reading(**off), reading(30, **off), reading(60), reading(90, **off))) == []


def test_temperature_from_the_cards_own_threshold_on() -> None:
    hot: dict[str, Value] = {"temperature_c": 90}
    assert keys(run(*[reading(30 * n, **hot) for n in range(2)])) == []
    assert keys(run(*[reading(30 * n, **hot) for n in range(3)])) == ["temperature:slowdown"]
    unclear = [reading(30 * n, **hot | {"temperature_slowdown_c": None}) for n in range(9)]
    assert keys(run(*unclear)) == []


# -- the host
A, B, C = "GPU-a", "GPU-b", "GPU-c"


def hosts(
    read: dict[str, str | None], bound: list[str], **options: object
) -> tuple[Check, list[tuple[str, str | None]]]:
    done = Round(**({"ok": True, "error": None, "detail": "", "driver": "580", "read": tuple(read), "skipped": ()}
                    | options))  # type: ignore[arg-type]  # fmt: skip
    readings = {uuid: GpuReading(uuid, START, {}, {}, error) for uuid, error in read.items()}
    (found,), signals = check_hosts_gpus(done, readings, bound, START)
    return found, [(signal.key, signal.uuid) for signal in signals]


def test_the_set_of_gpus() -> None:
    assert hosts({A: None, B: None}, [A, B]) == (Check("GPUs", Status.OK, "2 of 2", 2), [])
    found, signals = hosts({A: None}, [A, B])
    assert found.status is Status.FAILED and signals == [("gpu:missing", B)]
    found, signals = hosts({A: None, B: "not_found"}, [A, B])
    assert found.status is Status.FAILED and signals == [("gpu:missing", B)]
    found, signals = hosts({A: None, C: None}, [A])
    assert found.status is Status.DEGRADED and signals == [("gpu:unexpected", C)]


def test_a_lost_or_a_hung_gpu_is_not_missing() -> None:
    assert hosts({A: None, B: "gpu_is_lost"}, [A, B])[1] == []
    assert hosts({A: None}, [A, B], skipped=(B,))[1] == []


def test_where_a_gpu_could_not_be_identified_nobody_is_missing() -> None:
    """koordinator PR #2706: nvmlDeviceGetHandleByIndex says "Unknown error"."""
    found, signals = hosts({A: None}, [A, B], unread={"index 1": "nvml_999"})
    assert found.status is Status.UNKNOWN and signals == [] and "nvml_999" in found.reason


def test_nvml_that_does_not_work_makes_nobody_missing() -> None:
    found, signals = hosts({}, [A, B], ok=False, error="driver_not_loaded", detail="Driver Not Loaded")
    assert found.status is Status.UNKNOWN and signals == []
    found, signals = hosts({}, [A, B], ok=False, error="driver_mismatch", detail="version mismatch")
    assert found.status is Status.UNKNOWN and signals == [("nvml:driver_mismatch", None)] and "reboot" in found.reason


def test_events_and_hangs() -> None:
    (signal,) = event_signals(Event("xid", START, A, xid=79))
    assert (signal.key, signal.uuid, signal.source, signal.at) == ("xid:79", A, "nvml-event", START)
    assert [s.key for s in event_signals(Event("double_bit", START, A, data=7))] == ["ecc:uncorrected"]
    assert event_signals(Event("recovery_action", START, A, data=1)) == []  # not an Xid: the level is read instead
    assert event_signals(Event("events_lost", START, data=15)) == []
    assert [hang_signals(Hang(A, A, 60.0, count), LIMITS, START) == [] for count in (1, 2, 3)] == [True, True, False]
    (signal,) = hang_signals(Hang(None, "nvml", 60.0, 3), LIMITS, START)
    assert (signal.key, signal.uuid) == ("probe:hung", None)


def test_an_old_reading_is_unknown() -> None:
    statuses = [check_age(age, LIMITS).status for age in (None, 10.0, 500.0)]
    assert statuses == [Status.UNKNOWN, Status.OK, Status.UNKNOWN]


# -- what is kept
def test_baselines_survive_a_state_file_and_what_is_broken_begins_anew() -> None:
    judged = run(reading(uncorrected_volatile=4, nvlinks_up=18, clocks_event_reasons=0x40))
    kept = json.loads(json.dumps(encode_baselines({UUID: judged.baseline})))
    assert decode_baselines(kept) == {UUID: judged.baseline}
    assert decode_baselines(kept | {"x": {"counters": 7}, "y": []}) == {UUID: judged.baseline}
    again = judge(reading(30, uncorrected_volatile=5), decode_baselines(kept)[UUID], LIMITS)
    assert keys(again) == ["ecc:uncorrected"]  # it happened while the watchdog was down


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(FIELDS),
            st.none()
            | st.booleans()
            | st.integers(-(2**63), 2**64)
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(max_size=5),
            max_size=6,
        ),
        max_size=6,
    ),
    st.sampled_from([None, "gpu_is_lost", "reset_required", "not_found", "nvml_999"]),
)
def test_no_reading_breaks_the_checks_and_what_is_unknown_signals_nothing(
    changes: list[dict[str, Value]], error: str | None
) -> None:
    baseline: Baseline | None = None
    for number, fields in enumerate(changes):
        judged = judge(reading(30.0 * number, error, **fields), baseline, LIMITS)
        baseline = msgspec.convert(msgspec.to_builtins(judged.baseline), Baseline)
        assert baseline == judged.baseline
        assert all(one.reason for one in judged.checks)


# -- limits
def test_limits_have_defaults_and_are_checked() -> None:
    assert read_limits({}) == Limits() and read_limits({"link_samples": 5}).link_samples == 5
    for table, text in (
        ({"probe_deadlin": 1}, "probe_deadlin"), ({"probe_deadline": 0}, "probe_deadline"),
        ({"link_samples": "3"}, "link_samples"), ({"clocks_hits": 11}, "larger than clocks_window"),
        ({"load_percent": 101.0}, "load_percent"), ({"corrected_per_second": float("nan")}, "corrected_per_second"),
    ):  # fmt: skip
        with pytest.raises(LimitsError, match=text):
            read_limits(table)
