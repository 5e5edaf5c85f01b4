"""The NVML child's own code and the real pynvml, on a library that says what a GPU may say: fake_nvml.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthcheck.nvml_child import NvmlBackend
from healthcheck.nvml_protocol import Begin, Done, Gpu, LibraryError, Message, Request, serve
from healthcheck.nvml_read import EVENTS, FIELDS
from healthcheck.scripted_nvml import HEALTHY, UNSUPPORTED
from tests.healthcheck.fake_nvml import ALL, IS_LOST, NOT_SUPPORTED, RESET_REQUIRED, UNKNOWN, Card, FakeNvml

A, B = (f"GPU-{n * 8}-0000-0000-0000-000000000000" for n in "ab")
KNOWN = {"0000:1b:00.0": A, "0000:1c:00.0": B}


class World:
    def __init__(self) -> None:
        self.a, self.b = Card(A, "00000000:1B:00.0", 3), Card(B, "00000000:1C:00.0", 0)
        self.library = FakeNvml([self.a, self.b])
        self.backend = NvmlBackend(pynvml)
        self.begun: list[Begin] = []
        self.gpus: dict[str, Gpu] = {}

    def read(self, known: dict[str, str] | None = None, skip: tuple[str, ...] = ()) -> Done:
        self.begun.clear()
        self.gpus.clear()
        return self.backend.read(
            known or {}, frozenset(skip), self.begun.append, lambda gpu: self.gpus.update({gpu.uuid: gpu})
        )


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World()
    monkeypatch.setattr(pynvml, "nvmlLib", world.library)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    yield world


def test_nobody_else_opens_nvml() -> None:
    """Nor imports what could: a call may hang, and an open handle forbids a reset."""
    root = Path(__file__).parents[2]
    folders = ("appliance", "canary", "engine", "healthcheck", "kernels")
    sources = [path for folder in folders for path in (root / folder).rglob("*.py")]
    importers = [
        path for path in sources if re.search(r"^\s*(import|from) pynvml|CDLL.*libnvidia-ml", path.read_text(), re.M)
    ]
    assert [path.name for path in importers] == ["nvml_child.py"]


# -- a reading
def test_every_field_comes_through_pynvml_as_the_library_said_it(world: World) -> None:
    done = world.read()
    assert done == Done(True, driver="580.159.04")
    fields, unknown = world.gpus[A].fields, world.gpus[A].unknown
    assert fields == {
        "name": "NVIDIA H200", "serial": "1650924000000", "vbios": "96.00.BC.00.03", "pci": "0000:1b:00.0", "minor": 3,
        "recovery_action": 0, "ecc_mode": True, "ecc_mode_pending": False, "corrected_volatile": 10,
        "uncorrected_volatile": 2, "corrected_aggregate": 2**40, "uncorrected_aggregate": 3,
        "uncorrected_volatile_dram": 1, "uncorrected_volatile_sram": 1, "sram_threshold_exceeded": True,
        "sram_uncorrected_parity": 4, "sram_uncorrected_secded": 2, "remapped_corrected": 5, "remapped_uncorrected": 6,
        "remap_pending": True, "remap_failure": False, "remap_banks_low": 7, "remap_banks_without_spare": 8,
        "retired_pages_pending": None, "retired_pages_corrected": 0, "retired_pages_uncorrected": 0,
        "pcie_generation": 5, "pcie_generation_max": 5, "pcie_width": 16, "pcie_width_max": 16, "pcie_replays": 1,
        "pcie_tx_kib_per_second": 906, "pcie_rx_kib_per_second": 560, "nvlinks": 18, "nvlinks_up": 18,
        "nvlink_crc_errors": None, "nvlink_replays": None, "nvlink_recoveries": None, "clocks_event_reasons": 1,
        "performance_state": 0, "sm_clock_mhz": 345, "memory_clock_mhz": 3201, "temperature_c": 37,
        "temperature_slowdown_c": 90, "memory_temperature_c": 40, "power_mw": 79884, "power_limit_mw": 700000,
        "utilization_percent": 12, "memory_used_bytes": 644939776, "memory_total_bytes": 150754820096,
        "compute_processes": 2, "persistence_mode": True, "fabric_state": 3, "fabric_status": 0,
        "fabric_health_mask": 0x80, "fabric_health": 1, "mig_mode": False,
    }  # fmt: skip
    assert set(fields) == set(FIELDS)
    assert set(unknown) == {name for name, value in fields.items() if value is None}
    assert set(unknown.values()) == {"not supported"}
    assert world.gpus[B].fields["minor"] == 0 and world.gpus[B].error is None


def test_the_script_of_tests_has_the_same_fields() -> None:
    assert {*HEALTHY, *UNSUPPORTED, "pci"} == set(FIELDS)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        ("nvmlDeviceGetTotalEccErrors", ("corrected_volatile", "uncorrected_volatile", "corrected_aggregate",
                                         "uncorrected_aggregate")),
        ("nvmlDeviceGetEccMode", ("ecc_mode", "ecc_mode_pending")),
        ("nvmlDeviceGetSramEccErrorStatus", ("sram_threshold_exceeded", "sram_uncorrected_parity",
                                             "sram_uncorrected_secded")),
        ("nvmlDeviceGetRemappedRows", ("remapped_corrected", "remapped_uncorrected", "remap_pending", "remap_failure")),
        ("nvmlDeviceGetPowerUsage", ("power_mw",)),
        ("nvmlDeviceGetNvLinkState", ("nvlinks", "nvlinks_up", "nvlink_crc_errors", "nvlink_replays",
                                      "nvlink_recoveries")),
        ("nvmlDeviceGetGpuFabricInfoV", ("fabric_state", "fabric_status", "fabric_health_mask", "fabric_health")),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("code", "why"),
    [(NOT_SUPPORTED, "not supported"), (13, "not known to this driver"), (UNKNOWN, "nvml_999"), (10, "timeout"),
     (17, "blocked_by_operating_system")],
)  # fmt: skip
def test_an_error_of_one_field_is_that_fields(
    world: World, function: str, names: tuple[str, ...], code: int, why: str
) -> None:
    world.read()
    before = dict(world.gpus[A].fields)
    world.a.errors[function] = code
    world.read()
    gpu = world.gpus[A]
    assert gpu.error is None
    assert all(gpu.fields[name] is None and gpu.unknown[name].startswith(why) for name in names)
    assert {name: value for name, value in gpu.fields.items() if name not in names} == {
        name: value for name, value in before.items() if name not in names
    }
    assert world.gpus[B].fields["power_mw"] == 79884


def test_functions_that_an_old_driver_has_not(world: World) -> None:
    """pynvml itself says NVML_ERROR_FUNCTION_NOT_FOUND then (nvidia-ml-py newer than the driver)."""
    world.library.absent = {
        "nvmlDeviceGetSramEccErrorStatus", "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGpuFabricInfoV",
        "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetFieldValues",
    }  # fmt: skip
    assert world.read().ok
    gpu = world.gpus[A]
    for name in ("sram_threshold_exceeded", "compute_processes", "fabric_state", "recovery_action"):
        assert gpu.fields[name] is None and gpu.unknown[name] == "not known to this driver"
    assert gpu.fields["clocks_event_reasons"] == 0x44  # by its old name


def test_an_nvidia_ml_py_that_is_older_than_a_field(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pynvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION")
    monkeypatch.delattr(pynvml, "c_nvmlGpuFabricInfo_v3_t")
    world.read()
    gpu = world.gpus[A]
    assert gpu.fields["recovery_action"] is None and "not in this nvidia-ml-py" in gpu.unknown["recovery_action"]
    assert gpu.fields["fabric_state"] == 3 and gpu.fields["fabric_health"] is None


def test_a_driver_that_knows_the_fabric_only_without_its_summary(world: World) -> None:
    world.library.old_fabric = True
    world.read()
    assert world.gpus[A].fields["fabric_health_mask"] == 0x80 and world.gpus[A].fields["fabric_health"] is None


@pytest.mark.parametrize("action", [0, 1, 2, 3, 4, 5, 6, 7, 4711])
def test_the_recovery_action_is_in_uival(world: World, action: int) -> None:
    for kind in (1, 0):  # nvml.h names the member, whatever the type says
        world.a.values["fields"] = {230: (kind, action, "uiVal")}
        world.read()
        assert world.gpus[A].fields["recovery_action"] == action


def test_the_return_code_of_a_field_counts_not_its_value(world: World) -> None:
    world.a.errors[230] = NOT_SUPPORTED
    world.read()
    assert world.gpus[A].fields["recovery_action"] is None
    assert world.gpus[A].unknown["recovery_action"] == "not supported"


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [(0, 3.7, 3), (1, 2**32 - 1, 2**32 - 1), (3, 2**63, 2**63), (4, -1, -1), (5, -7, -7), (6, 9, 9)],
)
def test_fields_are_decoded_by_their_type(world: World, kind: int, value: float, expected: int) -> None:
    world.a.values["fields"] = {29: (kind, value)}
    world.read()
    assert world.gpus[A].fields["retired_pages_corrected"] == expected


def test_a_type_of_a_later_nvml_is_not_guessed(world: World) -> None:
    world.a.values["fields"] = {29: (9, 1)}
    world.read()
    assert world.gpus[A].fields["retired_pages_corrected"] is None
    assert "unknown type 9" in world.gpus[A].unknown["retired_pages_corrected"]


def test_nvlinks_that_are_down_and_their_errors(world: World) -> None:
    world.a.values |= {"links": [1, 0, 1], "link errors": {0: 5, 1: 7, 2: 100, 3: 1000}}
    world.b.values |= {"links": []}
    world.read()
    fields = world.gpus[A].fields
    assert (fields["nvlinks"], fields["nvlinks_up"]) == (3, 2)
    assert (fields["nvlink_crc_errors"], fields["nvlink_replays"], fields["nvlink_recoveries"]) == (2200, 10, 14)
    assert world.gpus[B].fields["nvlinks_up"] is None and world.gpus[B].unknown["nvlinks_up"] == "not supported"


def test_blackwells_links_count_errors_in_fields(world: World) -> None:
    world.a.values |= {"links": [1, 1], "fields": {219: (3, 50), 211: (3, 6), 215: (3, 7)}}
    world.read()
    fields = world.gpus[A].fields
    assert (fields["nvlink_crc_errors"], fields["nvlink_replays"], fields["nvlink_recoveries"]) == (100, 12, 14)


# -- GPUs that are sick
def test_a_lost_gpu_is_asked_no_further_and_hides_no_other(world: World) -> None:
    world.read()
    world.a.lost = True
    calls = len(world.library.calls)
    world.read()
    gpu = world.gpus[A]
    assert gpu.error == "gpu_is_lost" and gpu.fields["uncorrected_volatile"] is None
    assert gpu.fields["pci"] == "0000:1b:00.0"  # what never changes is still known
    assert set(gpu.fields) == set(FIELDS) and gpu.unknown["power_mw"] == "not asked: the GPU is lost"
    assert world.gpus[B].error is None and world.gpus[B].fields["power_mw"] == 79884
    world.b.lost = True
    world.read()
    assert len(world.library.calls) > calls and world.gpus[B].error == "gpu_is_lost"


def test_a_gpu_that_is_lost_in_the_middle_of_a_reading_keeps_what_was_read(world: World) -> None:
    world.a.errors["nvmlDeviceGetPersistenceMode"] = IS_LOST
    world.a.values["fields"] = {230: (1, 2)}
    world.read()
    gpu = world.gpus[A]
    assert gpu.error == "gpu_is_lost" and gpu.fields["recovery_action"] == 2 and gpu.fields["power_mw"] == 79884
    assert gpu.fields["mig_mode"] is None


def test_a_gpu_that_requires_a_reset_is_read_as_far_as_it_goes(world: World) -> None:
    world.a.errors |= {"nvmlDeviceGetTotalEccErrors": RESET_REQUIRED, "nvmlDeviceGetPowerUsage": RESET_REQUIRED}
    world.a.values["fields"] = {230: (1, 1)}
    world.read()
    gpu = world.gpus[A]
    assert gpu.error == "reset_required" and gpu.fields["recovery_action"] == 1 and gpu.fields["mig_mode"] is False


def test_a_gpu_that_was_lost_before_we_opened_is_known_by_its_address(world: World) -> None:
    """Its index gives an error without saying whose it is (koordinator PR #2706); its address does (nvml.h)."""
    world.a.errors |= {"nvmlDeviceGetHandleByIndex_v2": UNKNOWN, "nvmlDeviceGetHandleByPciBusId_v2": IS_LOST}
    done = world.read(KNOWN)
    assert done.ok and done.unread == {"index 0": "nvml_999"}
    assert world.gpus[A].error == "gpu_is_lost" and world.gpus[B].error is None
    world.backend.close()
    world.a.errors = {"nvmlDeviceGetHandleByIndex_v2": UNKNOWN, "nvmlDeviceGetHandleByPciBusId_v2": UNKNOWN}
    world.read(KNOWN)
    assert world.gpus[A].error == "nvml_999"  # not said to be lost


def test_a_gpu_that_is_not_there_and_a_card_that_was_changed(world: World) -> None:
    world.a.listed = False
    world.read({"0000:99:00.0": "GPU-gone", "0000:1c:00.0": B})
    assert world.gpus["GPU-gone"].error == "not_found" and world.gpus[B].error is None and A not in world.gpus
    world.read({"0000:1b:00.0": "GPU-old"})
    assert world.gpus["GPU-old"].error == "not_found"
    world.read(KNOWN)
    assert world.gpus[A].error is None  # only not listed: its address finds it


@pytest.mark.parametrize(
    ("function", "code", "error"),
    [
        ("nvmlInitWithFlags", 9, "driver_not_loaded"), ("nvmlInitWithFlags", 18, "driver_mismatch"),
        ("nvmlDeviceGetCount_v2", UNKNOWN, "nvml_999"), ("nvmlDeviceGetPowerUsage", 18, "driver_mismatch"),
        ("nvmlDeviceGetPowerUsage", 1, "uninitialized"),
    ],
)  # fmt: skip
def test_an_error_of_the_library_is_no_gpus_fault(world: World, function: str, code: int, error: str) -> None:
    """18 is a driver package that was upgraded under the loaded module."""
    world.library.errors[function] = code
    with pytest.raises(LibraryError) as caught:
        world.read()
    assert caught.value.error == error and not [gpu for gpu in world.gpus.values() if gpu.error]
    world.backend.close()
    assert world.library.initialised == 0
    world.library.errors.clear()
    assert world.read().ok


def test_a_host_without_nvidia_ml_py(tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text("raise ImportError('No module named pynvml')")
    result = subprocess.run(
        [sys.executable, "-P", "-m", "healthcheck.nvml_child"], input=request(id=1, op="read"), capture_output=True,
        timeout=120, env=dict(os.environ) | {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}, check=True,
    )  # fmt: skip
    done = msgspec.json.decode(result.stdout.splitlines()[-1], type=Message).done
    assert done is not None and (done.ok, done.error) == (False, "no_nvidia_ml_py") and "No module" in done.detail


def test_a_library_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    with pytest.raises(LibraryError) as caught:
        World().read()
    assert caught.value.error == "library_not_found"


def test_what_may_hang_is_announced_before_it_is_called(world: World) -> None:
    world.read()
    assert [begin.stage for begin in world.begun] == ["nvml", "index 0", "index 1", "events", A, B]
    world.read()
    assert [begin.uuid for begin in world.begun] == [None, A, B]


def test_a_gpu_that_is_to_be_skipped_is_not_touched(world: World) -> None:
    """Not even to list the GPUs: nvmlDeviceGetHandleByIndex may be what hangs."""
    world.read(KNOWN, skip=(A,))
    assert set(world.gpus) == {B} and A not in [begin.uuid for begin in world.begun]
    assert "nvmlDeviceGetHandleByIndex_v2" not in world.library.calls
    assert all(world.library.handle(world.a) not in registered for registered in world.library.sets.values())
    world.read(KNOWN)
    assert set(world.gpus) == {A, B}


# -- opening and closing
def test_handles_are_made_anew_after_closing(world: World) -> None:
    world.read()
    world.read()
    assert world.library.calls.count("nvmlInitWithFlags") == 1
    world.backend.close()
    assert world.library.initialised == 0 and world.library.sets == {} and world.backend.poll_seconds is None
    world.backend.close()
    world.a.minor = 9
    world.read()
    assert world.gpus[A].fields["minor"] == 9 and world.library.initialised == 1
    assert world.library.calls.count("nvmlShutdown") == 1


# -- events
def test_events_by_kind_and_only_an_xid_has_an_xid(world: World) -> None:
    assert world.backend.poll_seconds is None
    world.read()
    assert world.backend.poll_seconds is not None and list(world.backend.events()) == []
    world.library.events = [(world.a, 0x8, 79), (world.b, 0x2, 79), (world.b, 0x8000, 1), (world.a, 0x1, 5)]
    found = list(world.backend.events())
    assert [(event.uuid, event.kind, event.xid, event.data) for event in found] == [
        (A, "xid", 79, None), (B, "double_bit", None, 79), (B, "recovery_action", None, 1),
    ]  # fmt: skip  # single-bit errors are not asked for


def test_an_event_of_a_gpu_that_is_lost_by_now_is_known_by_its_address(world: World) -> None:
    world.read()
    world.a.lost = True
    world.library.events = [(world.a, 0x8, 79)]
    (event,) = world.backend.events()
    assert (event.uuid, event.xid) == (A, 79)


def test_only_what_a_gpu_supports_is_asked_of_it(world: World) -> None:
    world.a.event_types, world.b.event_types = 0x8 | 0x1, 0
    assert world.read().deaf == {B: "not supported"}
    (registered,) = world.library.sets.values()
    assert registered == {world.library.handle(world.a): 0x8}


def test_every_kind_asked_for_has_its_bit_in_nvml() -> None:
    bits = {
        "double_bit": pynvml.nvmlEventTypeDoubleBitEccError, "xid": pynvml.nvmlEventTypeXidCriticalError,
        "dram_retirement": pynvml.nvmlEventTypeDramRetirementEvent,
        "dram_retirement_failure": pynvml.nvmlEventTypeDramRetirementFailure,
        "poison": pynvml.nvmlEventTypeNonFatalPoisonError, "fatal_poison": pynvml.nvmlEventTypeFatalPoisonError,
        "gpu_unavailable": pynvml.nvmlEventTypeGpuUnavailableError,
        "recovery_action": pynvml.nvmlEventTypeGpuRecoveryAction,
    }  # fmt: skip
    assert {name: bit for bit, name in EVENTS.items()} == bits and sum(EVENTS) & ALL == sum(EVENTS)


def test_a_set_that_became_undefined_is_made_anew_without_the_one_who_broke_it(world: World) -> None:
    """nvml.h: after NVML_ERROR_UNKNOWN from nvmlDeviceRegisterEvents the set is undefined and has to be freed."""
    world.b.errors["nvmlDeviceRegisterEvents"] = UNKNOWN
    assert world.read().deaf == {B: "nvml_999"}
    assert world.library.calls.count("nvmlEventSetFree") == 1
    (registered,) = world.library.sets.values()
    assert set(registered) == {world.library.handle(world.a)}


def test_lost_events_are_said_and_do_not_go_on_for_ever(world: World) -> None:
    world.read()
    world.library.wait_error = IS_LOST
    (event,) = world.backend.events()
    assert (event.kind, event.uuid, event.data) == ("events_lost", None, IS_LOST)
    assert world.backend.poll_seconds is None and world.library.sets == {}
    assert list(world.backend.events()) == []
    for _ in range(2):
        world.read()
        assert [one.kind for one in world.backend.events()] == ["events_lost"]
    assert set(world.read().deaf) == {A, B} and list(world.backend.events()) == []
    world.backend.close()
    world.library.wait_error = None
    assert world.read().deaf == {} and world.backend.poll_seconds is not None


def test_a_driver_without_events(world: World) -> None:
    world.library.absent = {"nvmlEventSetCreate"}
    assert world.read().deaf == dict.fromkeys((A, B), "nvml_13") and world.backend.poll_seconds is None


# -- the protocol
class Talk:
    """serve() in a thread, its other side here."""

    def __init__(self, backend: NvmlBackend) -> None:
        self.theirs, self.ours = os.pipe()
        self.back, answers = os.pipe()
        self.lines = os.fdopen(self.back, "rb")

        def run() -> None:
            serve(backend, self.theirs, answers)
            os.close(answers)

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def ask(self, data: bytes) -> list[Message]:
        """Until the end of the answer."""
        os.write(self.ours, data)
        found = [self.next()]
        while found[-1].done is None:
            found.append(self.next())
        return found

    def next(self) -> Message:
        return msgspec.json.decode(self.lines.readline(), type=Message)

    def end(self) -> None:
        os.close(self.ours)
        self.thread.join(20)
        assert not self.thread.is_alive()


def request(**fields: Any) -> bytes:
    return msgspec.json.encode(Request(**fields)) + b"\n"


def test_a_conversation(world: World) -> None:
    talk = Talk(world.backend)
    answer = talk.ask(request(id=7, op="read", known=KNOWN))
    assert {message.id for message in answer} == {7}
    assert [message.gpu.uuid for message in answer if message.gpu] == [A, B]
    assert answer[-1].done == Done(True, driver="580.159.04")
    assert answer[-2].gpu is not None and answer[-2].gpu.fields["corrected_aggregate"] == 2**40
    world.library.events.append((world.b, 0x8, 48))
    event = talk.next().event
    assert event is not None and (event.uuid, event.xid) == (B, 48)
    assert talk.ask(request(id=8, op="close"))[-1].done == Done(True) and world.library.initialised == 0
    world.library.errors["nvmlInitWithFlags"] = 18
    done = talk.ask(request(id=9, op="read"))[-1].done
    assert done is not None and (done.ok, done.error) == (False, "driver_mismatch")
    for wrong in (b"{}\n", b"\n", b"\xff\n", b'{"id":"x","op":"read"}\n', request(id=1, op="reset")):
        done = talk.ask(wrong)[-1].done
        assert done is not None and done.error == "bad_request"
    world.library.errors.clear()
    assert talk.ask(request(id=10, op="read"))[-1].done == Done(True, driver="580.159.04")
    talk.end()
    assert world.library.initialised == 0  # the end of its stdin closes NVML


def test_quit_closes(world: World) -> None:
    talk = Talk(world.backend)
    talk.ask(request(id=1, op="read"))
    os.write(talk.ours, request(id=2, op="quit"))
    talk.thread.join(20)
    assert not talk.thread.is_alive() and world.library.initialised == 0
    os.close(talk.ours)


@given(st.lists(st.binary(max_size=80), max_size=5))
def test_no_request_breaks_the_child(lines: list[bytes]) -> None:
    read, write = os.pipe()
    back, answers = os.pipe()
    os.write(write, b"\n".join(lines) + b"\n")
    os.close(write)

    class Nothing:
        poll_seconds = None
        closed = 0

        def read(self, *_: Any) -> Done:
            return Done(True)

        def close(self) -> None:
            self.closed += 1

        def events(self) -> list[Any]:
            return []

    backend = Nothing()
    serve(backend, read, answers)
    assert backend.closed >= 1
    for fd in (read, back, answers):
        os.close(fd)


def test_the_real_program_on_a_host_without_nvml() -> None:
    """Where there is a driver it answers, where there is none it says which part is missing; it never dies of it."""
    result = subprocess.run(
        [sys.executable, "-P", "-m", "healthcheck.nvml_child"], input=request(id=1, op="read"), capture_output=True,
        timeout=120, env=dict(os.environ) | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    done = msgspec.json.decode(result.stdout.splitlines()[-1], type=Message).done
    assert done is not None and (done.ok or done.error in ("library_not_found", "driver_not_loaded", "nvml_999"))
