"""The policy against NVIDIA's catalogue, NVML's header and DCGM's next steps; overrides; `explain`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healthcheck.limits import LimitsError, read_limits
from healthcheck.machine_types import Needs
from healthcheck.policy import SHIPPED, PolicyError, load_policy, normalise_key, parse_policy
from healthcheck.policy_review import warnings
from healthcheck.types import Action, Signal
from tests.healthcheck.xid_catalogue import BUCKETS

POLICY = load_policy()
NONE, ALERT, RESTART, DEFERRED = Action.NONE, Action.ALERT, Action.RESTART_ENGINE, Action.DEFERRED_RESET
DRAIN, ABORT, QUARANTINE = Action.DRAIN_RESET, Action.ABORT_RESET, Action.QUARANTINE

# What each bucket allows. 43 and 45 are IGNORE and must not touch the GPU; 63 is IGNORE, and its pending row is
# activated by a reset that can wait (nvml.h on remapping).
ALLOWED = {
    "RESTART_APP": {RESTART},
    "IGNORE": {NONE, ALERT, DEFERRED},
    "RESET_GPU": {ABORT},
    "RESTART_BM": {QUARANTINE},
    "RESTART_VM": {QUARANTINE},
    "CHECK_MECHANICALS": {QUARANTINE},
    "CHECK_UVM": {ALERT},
    "UPDATE_SWFW": {ALERT},
    "WORKFLOW_NVLINK_ERR": {ALERT},
    "WORKFLOW_NVLINK5_ERR": {ALERT},
    "FOLLOW_TEXT": {NONE},
    "NONE_GIVEN": {NONE, ALERT, QUARANTINE},
}

# Everything that is no Xid: key, action where the recovery action is known to be none, where it is not known, needs.
ROWS = [
    ("recovery_action:0", NONE, NONE, Needs.HUMAN),  # nvml.h: NONE
    ("recovery_action:1", ABORT, ABORT, Needs.REBOOT),  # GPU_RESET: terminate all GPU processes and reset
    ("recovery_action:2", QUARANTINE, QUARANTINE, Needs.REBOOT),  # NODE_REBOOT
    ("recovery_action:3", DRAIN, DRAIN, Needs.HUMAN),  # DRAIN_P2P: query again, then reset
    ("recovery_action:4", DRAIN, DRAIN, Needs.HUMAN),  # DRAIN_AND_RESET
    ("recovery_action:5", QUARANTINE, QUARANTINE, Needs.HUMAN),  # RECOVER_IMEX_DOMAIN
    ("recovery_action:6", QUARANTINE, QUARANTINE, Needs.HUMAN),  # BUS_RESET
    ("recovery_action:7", QUARANTINE, QUARANTINE, Needs.REBOOT),  # SYSTEM_REBOOT
    ("recovery_action:99", QUARANTINE, QUARANTINE, Needs.HUMAN),  # of a newer driver: a human
    ("nvml:gpu_is_lost", QUARANTINE, QUARANTINE, Needs.REBOOT),  # NVML_ERROR_GPU_IS_LOST
    ("nvml:reset_required", ABORT, ABORT, Needs.REBOOT),  # NVML_ERROR_RESET_REQUIRED
    ("nvml:driver_mismatch", ALERT, ALERT, Needs.HUMAN),  # a package upgrade, no fault of a GPU
    ("nvml:unknown", ALERT, ALERT, Needs.HUMAN),
    ("gpu:missing", QUARANTINE, QUARANTINE, Needs.REBOOT),
    ("gpu:off_the_bus", QUARANTINE, QUARANTINE, Needs.REBOOT),
    ("gpu:unexpected", ALERT, ALERT, Needs.HUMAN),
    ("gpu:mig", ALERT, ALERT, Needs.HUMAN),
    ("gpu:other", ALERT, ALERT, Needs.HUMAN),
    ("probe:hung", ALERT, ALERT, Needs.HUMAN),  # unknown never drains
    ("ecc:uncorrected", ALERT, DRAIN, Needs.RMA),  # DCGM: drain and reset; gpud #108: not where the driver recovered
    ("ecc:corrected", ALERT, ALERT, Needs.HUMAN),  # DCGM: this GPU can still perform workload
    ("ecc:corrected_rate", ALERT, ALERT, Needs.HUMAN),
    ("ecc:off", ALERT, ALERT, Needs.HUMAN),
    ("ecc:pending_off", ALERT, ALERT, Needs.HUMAN),
    ("ecc:of_a_later_version", ALERT, ALERT, Needs.HUMAN),
    ("sxid:20034", ALERT, ALERT, Needs.HUMAN),
    ("remap:pending", DEFERRED, DEFERRED, Needs.RMA),  # nvml.h: won't affect future work
    ("pages:pending", DEFERRED, DEFERRED, Needs.RMA),
    ("remap:failure", QUARANTINE, QUARANTINE, Needs.RMA),  # RMA criterion
    ("sram:threshold", QUARANTINE, QUARANTINE, Needs.RMA),
    ("clocks:slowdown", ALERT, ALERT, Needs.HUMAN),
    ("clocks:thermal", ALERT, ALERT, Needs.HUMAN),
    ("clocks:other", ALERT, ALERT, Needs.HUMAN),
    ("clocks:power_brake", ALERT, ALERT, Needs.HUMAN),
    ("thermal:high", ALERT, ALERT, Needs.HUMAN),
    ("temperature:slowdown", ALERT, ALERT, Needs.HUMAN),
    ("temperature:other", ALERT, ALERT, Needs.HUMAN),
    ("power:high", ALERT, ALERT, Needs.HUMAN),
    ("link:degraded", ALERT, ALERT, Needs.HUMAN),
    ("link:other", ALERT, ALERT, Needs.HUMAN),
    ("pcie:replays", ALERT, ALERT, Needs.HUMAN),
    ("pcie:other", ALERT, ALERT, Needs.HUMAN),
    ("nvlink:down", ALERT, ALERT, Needs.HUMAN),
    ("nvlink:errors", ALERT, ALERT, Needs.HUMAN),
    ("nvlink:other", ALERT, ALERT, Needs.HUMAN),
    ("fabric:unhealthy", ALERT, ALERT, Needs.HUMAN),
    ("fabric:other", ALERT, ALERT, Needs.HUMAN),
    ("persistence:off", ALERT, ALERT, Needs.HUMAN),
    ("persistence:other", ALERT, ALERT, Needs.HUMAN),
    ("engine:error", RESTART, RESTART, Needs.HUMAN),  # a sticky CUDA error ends with its process
    ("engine:stalled", RESTART, RESTART, Needs.HUMAN),
    ("engine:unreachable", RESTART, RESTART, Needs.HUMAN),
    ("engine:nonfinite", ALERT, ALERT, Needs.HUMAN),  # golden answers decide
    ("engine:index", RESTART, RESTART, Needs.HUMAN),
    ("engine:step", ALERT, ALERT, Needs.HUMAN),
    ("engine:fault", ALERT, ALERT, Needs.HUMAN),
    *((f"trial:{name}", ALERT, ALERT, Needs.HUMAN) for name in ("error", "stalled", "unreachable", "nonfinite")),
    *((f"trial:{name}", ALERT, ALERT, Needs.HUMAN) for name in ("index", "step", "fault", "mismatch", "other")),
    ("golden:mismatch", ABORT, ABORT, Needs.RMA),
    ("checksum:mismatch", ABORT, ABORT, Needs.RMA),
]


def signal(key: str, detail: str = "") -> Signal:
    return Signal(key, "GPU-0", detail, 1.0, "test")


def decided(*keys: str, recovery: int | None = 0) -> Action:
    return POLICY.decide([signal(key) for key in keys], recovery_action=recovery).action


@pytest.mark.parametrize(("bucket", "xid"), [(bucket, xid) for bucket, xids in BUCKETS.items() for xid in xids])
def test_every_xid_of_the_catalogue(bucket: str, xid: int) -> None:
    rule = POLICY.rule(f"xid:{xid}")
    assert rule.pattern != "xid:*", "the catalogue has it, the policy does not"
    assert rule.action in ALLOWED[bucket]
    assert str(xid) in rule.source or any(low <= xid <= high for low, high in _ranges(rule.source)), (
        f"the row of {xid} does not cite it"
    )


def _ranges(text: str) -> list[tuple[int, int]]:
    return [(int(low), int(high)) for low, high in re.findall(r"(\d+)-(\d+)", text)]


# IGNORE with nothing for people to do, as the catalogue has it; and what the recovery action (field 230) decides.
@pytest.mark.parametrize("xid", [37, 38, 44, 45, 66, 67, 93, 106, 107, 137, 141, 152, 153, 162])
def test_what_is_only_logged_tells_nobody(xid: int) -> None:
    assert decided(f"xid:{xid}", recovery=0) == decided(f"xid:{xid}", recovery=None) == NONE


@pytest.mark.parametrize(
    ("xid", "not_known"), [(74, ALERT), (144, ALERT), (150, ALERT), (157, ALERT), (159, ABORT), (166, ALERT),
                           (167, ALERT), (169, ALERT), (171, DRAIN), (172, DRAIN), (175, ALERT)],
)  # fmt: skip
def test_where_the_recovery_action_decides(xid: int, not_known: Action) -> None:
    """159 is CHECK_UVM: reset where UVM is used, and CUDA uses it. 171 and 172 are the detail of a 48."""
    assert POLICY.rule(f"xid:{xid}").recheck
    assert decided(f"xid:{xid}", recovery=0) == ALERT and decided(f"xid:{xid}", recovery=1) == ABORT
    assert decided(f"xid:{xid}", recovery=None) == not_known


@pytest.mark.parametrize(("key", "known", "unknown", "needs"), ROWS)
def test_every_other_row(key: str, known: Action, unknown: Action, needs: Needs) -> None:
    assert decided(key, recovery=0) == known
    assert decided(key, recovery=None) == unknown
    assert POLICY.rule(key).needs == needs


def test_no_row_is_without_a_test() -> None:
    tested = {POLICY.rule(key).pattern for key, *_ in ROWS}
    tested |= {POLICY.rule(f"xid:{xid}").pattern for xids in BUCKETS.values() for xid in xids}
    assert set(POLICY.rules) - tested == {"xid:*"}  # test_unknown_xid


def test_every_row_says_why_and_where_from() -> None:
    for rule in POLICY.rules.values():
        assert rule.title and rule.source and rule.where == str(SHIPPED)


def test_unknown_xid_is_looked_up_and_never_reset_by_default() -> None:
    rule = POLICY.rule("xid:175")
    assert rule.recheck
    assert decided("xid:175", recovery=0) == decided("xid:175", recovery=None) == ALERT
    assert decided("xid:175", recovery=1) == ABORT  # what the driver asks for


def test_a_signal_that_nobody_knows_only_alerts() -> None:
    assert decided("quantum:decoherence", recovery=None) == ALERT


@pytest.mark.parametrize(
    ("keys", "recovery", "action"),
    [
        (("xid:48",), 0, ABORT),  # catalogue: solo RESET_GPU
        (("xid:48", "xid:63"), 0, DRAIN),  # WORKFLOW_XID_48: DRAIN_AND_RESET
        (("xid:63", "xid:48"), 4, DRAIN),
        (("xid:48", "xid:64"), 0, DRAIN),
        (("xid:48", "xid:63"), 1, ABORT),  # the stronger one wins: the driver wants it at once
        (("xid:48", "xid:63", "xid:95"), 0, ABORT),
        (("xid:13",), 1, ABORT),  # an application's fault, but the driver says reset
        (("xid:13", "xid:43", "xid:45"), 0, RESTART),
        (("xid:154",), 2, QUARANTINE),
        (("xid:154",), None, NONE),
        (("ecc:uncorrected", "remap:pending"), 0, DEFERRED),
        (("ecc:uncorrected", "xid:94"), 0, RESTART),
        (("ecc:uncorrected", "xid:95"), 1, ABORT),
        (("remap:pending", "remap:failure"), 0, QUARANTINE),  # gpud: failure outranks pending
        (("xid:92", "ecc:corrected_rate"), 0, ALERT),
    ],
)
def test_signals_that_come_together(keys: tuple[str, ...], recovery: int | None, action: Action) -> None:
    assert decided(*keys, recovery=recovery) == action


def test_contained_error_restarts_the_engine_and_owes_a_reset() -> None:
    decision = POLICY.decide([signal("xid:94")], recovery_action=0)
    assert (decision.action, decision.then) == (RESTART, DEFERRED)


@given(st.lists(st.sampled_from(sorted(k for k, *_ in ROWS) + ["xid:13", "xid:95", "xid:63"]), min_size=1, max_size=5))
@settings(max_examples=100, deadline=None)
def test_more_signals_never_weaken_a_decision(keys: list[str]) -> None:
    """Without the pairs of [[together]], which exist to weaken one."""
    assert decided(*keys) == max(decided(key) for key in keys)


# ----------------------------------------------------------------------------------------------------------- override
def override(text: str) -> object:
    return parse_policy(b"schema = 1\n" + text.encode(), where="healthcheck.toml", base=POLICY)


def test_an_override_changes_one_xid_of_a_range_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "healthcheck.toml"
    file.write_text('schema = 1\n[attempts]\nresets = 1\n[[rule]]\nkeys = ["xid:40"]\naction = "alert"\n')
    policy = load_policy(file)
    assert policy.rule("xid:40").action == ALERT
    assert policy.rule("xid:39").action == policy.rule("xid:41").action == RESTART
    assert policy.rule("xid:40").where == str(file)
    assert policy.attempts.resets == 1 and policy.attempts.window == POLICY.attempts.window


def test_no_override_is_the_shipped_policy(tmp_path: Path) -> None:
    assert load_policy(tmp_path / "absent.toml") == POLICY


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[attempt]\nresets = 1", "attempt"),
        ("[attempts]\nreset = 1", "reset"),
        ("[attempts]\nresets = -1", "resets"),
        ("[attempts]\nresets = 'two'", "resets"),
        ("[breaker]\nmax_out = 1.5", "max_out"),
        ("[probation]\nshare = 0", "share"),
        ('[[rule]]\nkeys = ["xid:13"]\naction = "reboot"', "reboot"),
        ('[[rule]]\nkeys = ["xid:13"]\nactions = "alert"', "actions"),
        ('[[rule]]\nkeys = ["ecx:uncorrected"]\naction = "alert"', "ecx:uncorrected"),
        ('[[rule]]\nkeys = ["xid"]\naction = "alert"', "xid"),
        ('[[rule]]\nkeys = ["xid:13a"]\naction = "alert"', "xid:13a"),
        ('[[rule]]\nkeys = ["xid:20-10"]\naction = "alert"\ntitle="t"\nnote="n"\nsource="s"', "xid:20-10"),
        ('[[rule]]\nkeys = ["xid:38-40"]\naction = "alert"\ntitle="t"\nnote="n"\nsource="s"', "overlap"),
        ('[[rule]]\nkeys = ["clocks:5"]\naction = "alert"', "clocks:5"),
        ('[[rule]]\nkeys = []\naction = "alert"', "keys"),
        ('[[rule]]\nkeys = ["xid:13"]\n[[rule]]\nkeys = ["xid:13"]', "two rules"),
        ('[[rule]]\nkeys = ["xid:13"]\naction = "abort_reset"\ndeferrable = true', "deferrable"),
        ('[[rule]]\nkeys = ["xid:13"]\nfallback = "alert"', "recheck"),
        ('[[rule]]\nkeys = ["xid:13"]\nmuted = "always"', "always"),
        ('[[rule]]\nkeys = ["xid:13"]\nneeds = "luck"', "needs"),
        ('[[together]]\nkeys = ["xid:13"]\naction = "alert"\nnote="n"\nsource="s"', "alone"),
        ('[[together]]\nkeys = ["xid:13", "xid:*"]\naction = "alert"\nnote="n"\nsource="s"', "pattern"),
        ('[[rule]]\nkeys = ["ecc:corrected"]\naction = "abort_reset"', "corrected errors never drain"),
        ('[[rule]]\nkeys = ["xid:92"]\naction = "restart_engine"', "corrected errors never drain"),
        ('[[rule]]\nkeys = ["xid:*"]\naction = "drain_reset"', "catch-all"),
        ('[[rule]]\nkeys = ["xid:*"]\nfallback = "drain_reset"', "catch-all"),
        ('[[rule]]\nkeys = ["probe:hung"]\naction = "quarantine"', "unknown is no reason to act"),
        ('[[rule]]\nkeys = ["trial:error"]\naction = "restart_engine"', "unknown is no reason to act"),
        ("rule = 3", "rule"),
        ("[[decide]]", "decide"),
        ("not toml", "TOML"),
    ],
)
def test_what_is_refused_and_that_it_says_what(text: str, says: str) -> None:
    with pytest.raises(PolicyError) as caught:
        override(text)
    assert says in caught.value.message and "healthcheck.toml" in caught.value.message
    assert caught.value.hint


def test_what_is_allowed_and_looks_wrong_is_said() -> None:
    def warned(text: str) -> str:
        return "\n".join(warnings(parse_policy(text.encode(), where="f", base=POLICY), POLICY))

    assert warned("") == "", "an empty file changes nothing"
    assert "probe_deadline = 2 s" in warned("[limits]\nprobe_deadline = 2.0")
    assert "probe_interval = 1 s" in warned("[limits]\nprobe_interval = 1.0")
    assert "reset = 5 s is less than the reset unit may take (1200 s)" in warned("[timeouts]\nreset = 5.0")
    assert "resets = 20" in warned("[attempts]\nresets = 20")
    assert "thermal" in warned('[[rule]]\nkeys = ["clocks:thermal"]\naction = "drain_reset"')


@pytest.mark.parametrize(
    "value", ["probe_interval = 0.000001", "heartbeat_interval = 0.001", "probe_deadline = 7200.0"]
)
def test_a_pace_that_nobody_can_mean_is_refused(value: str) -> None:
    policy = parse_policy(f"[limits]\n{value}".encode(), where="f", base=POLICY)
    with pytest.raises(LimitsError, match=value.split()[0]):
        read_limits(policy.limits)


def test_an_unknown_table_is_answered_with_all_that_are_known() -> None:
    with pytest.raises(PolicyError) as caught:
        override("[limit]\nprobe_interval = 3.0")
    assert caught.value.hint is not None and "[limits]" in caught.value.hint and "schema" in caught.value.hint


def test_another_schema_is_refused() -> None:
    with pytest.raises(PolicyError, match="schema 2"):
        parse_policy(b"schema = 2", where="f", base=POLICY)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_a_policy_or_a_policy_error(data: bytes) -> None:
    try:
        parse_policy(data, where="f", base=POLICY)
    except PolicyError as error:
        assert "f" in error.message


# ------------------------------------------------------------------------------------------------------------ explain
@pytest.mark.parametrize("text", ["48", "xid 48", "Xid:48", "XID 48 ", "xid:48"])
def test_explain_takes_what_people_type(text: str) -> None:
    lines = POLICY.explain(text)
    assert lines[0].startswith("xid:48: double bit")
    assert any(line.startswith("action: abort reset") for line in lines)
    assert any(line.startswith("with xid:63: drain reset") for line in lines)
    assert any("2 resets in 24 h" in line and "rma" in line for line in lines)


def test_explain_says_what_is_asked_first() -> None:
    assert any("other GPUs" in line for line in POLICY.explain("golden:mismatch"))
    assert any("recovery action is read again" in line for line in POLICY.explain("ecc:uncorrected"))


@pytest.mark.parametrize("text", ["", "xid:", "clocks:*", "79; reboot", "xid:39-41", "GPU"])
def test_what_is_no_signal(text: str) -> None:
    with pytest.raises(PolicyError):
        normalise_key(text)
