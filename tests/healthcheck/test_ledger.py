"""gpus.json: what `appliance gpus bind` writes is read, what the watchdog keeps comes back, what others keep stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.gpus import bind_slots, read_slots
from appliance.statefile import StateError
from healthcheck.ledger import adopt, read_ledger, worth_writing, write_ledger
from healthcheck.machine import step
from healthcheck.machine_types import HostState, ResetDone, SignalSeen, State, Stopped, Tick
from healthcheck.policy import load_policy
from healthcheck.types import Signal

POLICY = load_policy()
UUIDS = [f"GPU-{n:08x}-0000-4000-8000-000000000000" for n in range(2)]


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / "gpus.json"
    bind_slots(path, UUIDS)
    return path


def struck(path: Path) -> HostState:
    host = read_ledger(path)
    now = 1_790_000_000.0
    for event in (SignalSeen(Signal("xid:95", UUIDS[0], "a line", now, "kmsg")), Stopped(0)):
        host, _ = step(host, event, now, POLICY)
    return host


def test_a_fresh_install_is_healthy(ledger: Path) -> None:
    found = {n: (gpu.uuid, gpu.state) for n, gpu in read_ledger(ledger).gpus.items()}
    assert found == {n: (uuid, State.HEALTHY) for n, uuid in enumerate(UUIDS)}


def test_what_is_written_is_read(ledger: Path) -> None:
    host = struck(ledger)
    write_ledger(ledger, host)
    assert read_ledger(ledger) == host
    assert read_ledger(ledger).resetting == 0 and read_ledger(ledger).gpus[0].attempts


def test_other_tools_read_the_entry_as_before(ledger: Path) -> None:
    write_ledger(ledger, struck(ledger))
    entry = read_slots(ledger)[0]
    assert {"uuid", "slot", "state", "reason", "since", "needs", "attempts", "incident"} <= entry.keys()
    assert entry["state"] == "RESETTING" and entry["incident"]["cause"] == "xid:95"
    assert bind_slots(ledger, [*UUIDS, "GPU-0000000a-0000-4000-8000-000000000000"]) == [2]
    assert read_ledger(ledger).gpus[0].state == State.RESETTING


def test_unknown_keys_survive(ledger: Path) -> None:
    whole = json.loads(ledger.read_text())
    whole["note"], whole["gpus"][0]["asset"], whole["watchdog"] = "rack 7", "A-113", {"future": [1]}
    ledger.write_text(json.dumps(whole))
    write_ledger(ledger, struck(ledger))
    after = json.loads(ledger.read_text())
    assert (after["note"], after["gpus"][0]["asset"], after["watchdog"]["future"]) == ("rack 7", "A-113", [1])


def test_a_slot_bound_meanwhile_is_not_lost(ledger: Path) -> None:
    host = struck(ledger)
    bind_slots(ledger, ["GPU-0000000a-0000-4000-8000-000000000000"])
    write_ledger(ledger, host)
    assert set(read_slots(ledger)) == {0, 1, 2}
    assert adopt(host, ledger).gpus[2].state == State.HEALTHY and adopt(host, ledger).gpus[0] == host.gpus[0]


def test_no_file_is_no_gpu(tmp_path: Path) -> None:
    assert read_ledger(tmp_path / "gpus.json").gpus == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [("state", "FINE"), ("needs", "luck"), ("attempts", 3), ("since", "noon"), ("incident", []), ("held", "no"),
     ("attempts", [{"at": 1.0}])],
)  # fmt: skip
def test_a_ledger_that_is_not_understood_is_left_alone(ledger: Path, key: str, value: Any) -> None:
    whole = json.loads(ledger.read_text())
    whole["gpus"][1][key] = value
    ledger.write_text(json.dumps(whole))
    with pytest.raises(StateError, match="slot 1"):
        read_ledger(ledger)
    assert json.loads(ledger.read_text()) == whole


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda t: st.lists(t, max_size=3))


@given(st.dictionaries(st.sampled_from(["boot_id", "halt", "resetting", "failures", "alerts", "maintenance"]), JSON))
@settings(max_examples=150, deadline=None)
def test_any_host_part_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, kept: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "gpus.json"
    path.write_text(json.dumps({"schema": 1, "gpus": [], "watchdog": kept}))
    try:
        assert read_ledger(path).gpus == {}
    except StateError as error:
        assert "watchdog" in error.message


def test_only_what_matters_is_written(ledger: Path) -> None:
    host = struck(ledger)
    idle, _ = step(host, Tick(frozenset({1}), {0: 0, 1: 0}), 1_790_000_005.0, POLICY)
    assert not worth_writing(host, idle)
    done, _ = step(idle, ResetDone(0, True), 1_790_000_009.0, POLICY)
    assert worth_writing(idle, done)
