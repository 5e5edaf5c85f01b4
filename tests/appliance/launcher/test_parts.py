"""The pure parts, against their definitions: systemd.resource-control(5), cgroup-v2.rst, HTTP/1.1 (RFC 9112)."""

from __future__ import annotations

import itertools
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.gpus import Gpu
from appliance.hostconfig import parse_config
from appliance.launcher import spec as spec_module
from appliance.launcher.health import MAX_REPLY_BYTES, StallWatch, parse_reply, read_health
from appliance.launcher.lifecycle import LIVE, TRANSITIONS, State, check_transition
from appliance.launcher.restart import Backoff, exit_text
from appliance.launcher.scope import ScopePlan, check_scope, cpu_mask, own_cgroup, scope_name, slice_name
from appliance.launcher.spec import SpecError, plan_engine, plan_memory, pointed_releases, read_release
from appliance.paths import Paths
from tests.release_files import release_json

GIB = 1 << 30

# -- restarts


def test_delays_double_up_to_the_limit_then_it_stays_down() -> None:
    backoff = Backoff(first_delay=1, max_delay=5, limit=5, window=600)
    assert [backoff.ended(now) for now in range(5)] == [1, 2, 4, 5, None]
    backoff.reset()
    assert backoff.ended(6) == 1


def test_old_ends_are_forgotten() -> None:
    backoff = Backoff(first_delay=1, max_delay=60, limit=3, window=100)
    assert [backoff.ended(now) for now in (0, 99, 150, 240)] == [1, 2, 2, 2]  # never three within 100 s


def test_a_systemd_that_is_late_never_counts_and_is_asked_again_for_ever() -> None:
    backoff = Backoff(first_delay=1, max_delay=5, limit=3, window=600)
    assert [backoff.not_started() for _ in range(6)] == [1, 2, 4, 5, 5, 5]
    assert [backoff.ended(now) for now in range(2)] == [1, 2], "what the engine does itself counts from one"
    assert backoff.not_started() == 1


def test_ends_in_words() -> None:
    assert exit_text(-9) == "killed by SIGKILL"
    assert exit_text(0) == "exit status 0"
    assert "refused" in exit_text(4)
    assert exit_text(-9, killed_because="stalled", oom=True) == (
        "stalled; killed by SIGKILL; the kernel killed a process at MemoryMax"
    )
    assert exit_text(-50) == "killed by signal 50"  # a real-time signal without a name


def test_every_state_can_be_left_and_reached() -> None:
    assert set(TRANSITIONS) == set(State)
    assert {after for afters in TRANSITIONS.values() for after in afters} == set(State)
    for before, after in itertools.product(State, State):
        if after in TRANSITIONS[before]:
            check_transition(before, after)
        else:
            with pytest.raises(RuntimeError, match=f"{before} to {after}"):
                check_transition(before, after)
    # Whatever may hold the device goes through "stopping", where its scope is emptied, before anything else starts.
    for state in LIVE - {State.STOPPING}:
        assert TRANSITIONS[state] <= LIVE


# -- the scope

PLAN = ScopePlan(3, "llama-8b.2", memory_max=5 * GIB, cpu_weight=100, tasks_max=1024)


def test_names() -> None:
    assert slice_name(3) == "appliance-gpu3.slice"
    assert scope_name(3, "llama-8b.2") == "appliance-gpu3-llama-8b.2.scope"
    assert len(scope_name(99, "a" * 64)) < 255


@given(st.sets(st.integers(0, 1000), min_size=1, max_size=50))
def test_cpu_mask_is_the_bit_field_systemd_takes(cpus: set[int]) -> None:
    mask = cpu_mask(tuple(sorted(cpus)))
    assert int.from_bytes(bytes(mask), "little") == sum(1 << cpu for cpu in cpus)


def test_properties_of_a_plan() -> None:
    plan = ScopePlan(
        0, "r1", memory_max=GIB, cpu_weight=50, tasks_max=64, cpu_quota=250, allowed_cpus=(0, 9),
        devices=("/dev/nvidia2", "/dev/nvidiactl"), stop_seconds=45,
    )  # fmt: skip
    properties = plan.properties()
    assert properties["CPUQuotaPerSecUSec"] == ("t", 2_500_000)  # 250 % of a second
    assert properties["AllowedCPUs"] == ("ay", [1, 2])
    assert properties["DevicePolicy"] == ("s", "closed")
    assert properties["DeviceAllow"] == ("a(ss)", [("/dev/nvidia2", "rw"), ("/dev/nvidiactl", "rw")])
    assert properties["TimeoutStopUSec"] == ("t", 45_000_000)
    assert "CPUQuotaPerSecUSec" not in PLAN.properties() and "AllowedCPUs" not in PLAN.properties()


UNIT: dict[str, Any] = {"ControlGroup": PLAN.cgroup_suffix, "DevicePolicy": "closed", "DeviceAllow": []}
FILES = {"memory.max": "5368709120", "pids.max": "1024", "cpu.max": "max 100000", "cpu.weight": "100"}


def cgroup(root: Path, files: dict[str, str], controllers: str = "cpuset cpu io memory pids") -> Path:
    group = root / PLAN.cgroup_suffix.lstrip("/")
    group.mkdir(parents=True)
    (root / "cgroup.controllers").write_text(controllers + "\n")
    for name, text in files.items():
        (group / name).write_text(text + "\n")
    return root


def test_a_scope_as_asked(tmp_path: Path) -> None:
    found = check_scope(PLAN, PLAN.cgroup_suffix, UNIT, cgroup(tmp_path, FILES))
    assert found.wrong == () and found.unknown == ()


@pytest.mark.parametrize(
    ("file", "text"),
    [("memory.max", "max"), ("memory.max", "5368713216"), ("pids.max", "max"), ("cpu.max", "20000 100000"),
     ("cpu.weight", "10"), ("memory.swap.max", "max")],
)  # fmt: skip
def test_a_limit_that_differs_is_wrong(tmp_path: Path, file: str, text: str) -> None:
    found = check_scope(PLAN, PLAN.cgroup_suffix, UNIT, cgroup(tmp_path, FILES | {file: text}))
    assert len(found.wrong) == 1 and file in found.wrong[0] and text in found.wrong[0]


def test_a_limit_file_that_is_missing_though_the_controller_is_there_is_wrong(tmp_path: Path) -> None:
    rest = {name: text for name, text in FILES.items() if name != "memory.max"}
    found = check_scope(PLAN, PLAN.cgroup_suffix, UNIT, cgroup(tmp_path, rest))
    assert len(found.wrong) == 1 and "memory.max is missing" in found.wrong[0]


def test_no_controller_is_unknown_not_right(tmp_path: Path) -> None:
    found = check_scope(PLAN, PLAN.cgroup_suffix, UNIT, cgroup(tmp_path, {}, controllers="hugetlb"))
    assert found.wrong == ()
    assert [text.split(":")[0] for text in found.unknown] == [
        "no memory controller", "no pids controller", "no cpu controller",
    ]  # fmt: skip


@pytest.mark.parametrize("path", [None, "/", "/system.slice/appliance-gpu@3.service", PLAN.cgroup_suffix + "/sub"])
def test_another_cgroup_is_wrong(tmp_path: Path, path: str | None) -> None:
    assert check_scope(PLAN, path, UNIT, cgroup(tmp_path, FILES)).wrong


@pytest.mark.parametrize(
    "unit",
    [{"DevicePolicy": "auto"}, {"DeviceAllow": [("/dev/nvidia0", "rw")]}, {"ControlGroup": "/other.scope"},
     {"DeviceAllow": [("char-nvidia", "rwm")]}],
)  # fmt: skip
def test_other_device_rules_are_wrong(tmp_path: Path, unit: dict[str, Any]) -> None:
    assert check_scope(PLAN, PLAN.cgroup_suffix, UNIT | unit, cgroup(tmp_path, FILES)).wrong


def test_quota_and_cpus_compare_by_meaning(tmp_path: Path) -> None:
    plan = ScopePlan(3, "llama-8b.2", 5 * GIB, 100, 1024, cpu_quota=50, allowed_cpus=(0, 1, 2, 8))
    files = FILES | {"cpu.max": "100000 200000", "cpuset.cpus": "0-2,8"}
    assert check_scope(plan, plan.cgroup_suffix, UNIT, cgroup(tmp_path / "a", files)).wrong == ()
    files = FILES | {"cpu.max": "50000 200000", "cpuset.cpus": "0-3,8"}
    assert len(check_scope(plan, plan.cgroup_suffix, UNIT, cgroup(tmp_path / "b", files)).wrong) == 2


def test_own_cgroup_is_the_v2_line(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7/cgroup").write_text("4:memory:/other\n0::/appliance.slice/x.scope\n")
    assert own_cgroup(7, tmp_path) == "/appliance.slice/x.scope"
    assert own_cgroup(8, tmp_path) is None


# -- health


def test_replies() -> None:
    reply = parse_reply(b"HTTP/1.1 503 Service Unavailable\r\ncontent-LENGTH: 2\r\n\r\n{}", ended=False)
    assert reply is not None and reply.status == 503 and reply.json() == {}
    assert parse_reply(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{}", ended=False) is None
    assert parse_reply(b"", ended=False) is None


@pytest.mark.parametrize(
    "data",
    [b"", b"SSH-2.0\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n{}", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}",
     b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
     b"HTTP/1.1 OK\r\nContent-Length: 0\r\n\r\n"],
)  # fmt: skip
def test_what_is_no_reply(data: bytes) -> None:
    with pytest.raises(ValueError):
        parse_reply(data, ended=True)


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_a_reply_or_an_error(data: bytes, ended: bool) -> None:
    for prefix in (b"", b"HTTP/1.1 200 OK\r\nContent-Length: "):
        try:
            reply = parse_reply(prefix + data, ended=ended)
        except ValueError:
            continue
        assert reply is None or 0 <= reply.status <= 999


KEYS = ["status", "engine", "requests", "device", "progress", "loading", "steps", "queued", "running", "total_bytes",
        "done_bytes", "in_flight_http", "uuid", "backend", "draining"]  # fmt: skip
HUGE = 10**4300 - 1  # the longest number that Python's JSON reader takes
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "ready", "GPU-1", HUGE, -HUGE])
    | st.sampled_from(["\ud800", "a\0b", "\x1b]0;x\x07", "\n<0>x", "x" * 5000])
)  # fmt: skip
TABLES = st.dictionaries(st.sampled_from(KEYS), LEAVES | st.lists(LEAVES, max_size=2), max_size=6)


@given(st.dictionaries(st.sampled_from(KEYS), LEAVES | TABLES, max_size=6))
def test_any_state_of_an_engine_is_read(value: Any) -> None:
    health = read_health(value)
    assert isinstance(health.ready, bool) and isinstance(health.queued, int)
    assert health.progress is None or 0 <= health.progress <= 1
    for text in (health.reason, health.uuid, health.backend):  # they go to systemd, the journal and a terminal
        assert text is None or (text.isprintable() and text.encode() and len(text) <= 4000) or text == ""
    for number in (health.steps, health.queued, health.in_flight):
        assert number is None or 0 <= number < 1 << 63


def test_an_answer_that_says_it_is_longer_than_it_may_be() -> None:
    for length in (MAX_REPLY_BYTES + 1, f"{0:020}{MAX_REPLY_BYTES + 1}", "9" * 5000):
        with pytest.raises(ValueError):
            parse_reply(f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n".encode(), ended=False)


def test_the_engines_own_state_is_understood() -> None:
    """The fields of engine/api/probes.py:state while it loads and when it is ready."""
    progress = {"phase": "x", "done_bytes": 30, "total_bytes": 120}
    engine = {"backend": None, "steps": None}
    loading = read_health({"status": "loading", "engine": engine, "loading": progress, "requests": {}})
    assert (loading.ready, loading.progress, loading.queued) == (False, 0.25, 0)
    ready = read_health({"status": "ready", "engine": {"backend": "cuda", "steps": 7}, "device": {"uuid": "GPU-1"},
                         "requests": {"running": 2, "waiting": 3, "in_flight_http": 6}})  # fmt: skip
    assert (ready.ready, ready.steps, ready.queued, ready.in_flight, ready.uuid) == (True, 7, 5, 6, "GPU-1")


def busy(steps: int, queued: int = 1) -> Any:
    return read_health({"status": "ready", "progress": {"steps": steps, "queued": queued}})


def test_stall_is_no_step_with_work_for_the_whole_time() -> None:
    watch = StallWatch(60)
    assert [watch.answered(now, busy(5)) for now in (0, 1, 30, 60)] == [None] * 4
    assert "no step for 60 s while 1" in str(watch.answered(61, busy(5)))


@pytest.mark.parametrize("between", [busy(6), busy(5, queued=0)], ids=["a step", "no work"])
def test_a_step_or_no_work_starts_the_clock_again(between: Any) -> None:
    watch = StallWatch(60)
    watch.answered(0, busy(5))
    watch.answered(1, busy(5))
    assert watch.answered(59, between) is None
    assert [watch.answered(now, busy(between.steps)) for now in (70, 100, 129)] == [None] * 3
    assert watch.answered(131, busy(between.steps))


def test_a_launcher_that_slept_has_seen_nothing() -> None:
    watch = StallWatch(60)
    watch.answered(0, busy(5))
    assert watch.silent(5000) is None and watch.silent(5001) is None
    assert watch.silent(5061) is not None


def test_an_answer_ends_a_silence() -> None:
    watch = StallWatch(60)
    for now in range(0, 59, 5):
        assert watch.silent(now) is None
    watch.answered(59, busy(1))
    assert watch.silent(61) is None and watch.silent(62) is None and watch.silent(100) is None


# -- releases and plans


def host(tmp_path: Path, backend: str = "cpu", engine: str = "", **release: Any) -> tuple[Paths, Any]:
    paths = Paths.under(tmp_path)
    paths.release("r1").mkdir(parents=True)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    defaults = {"model_name": "llama", "engine_version": "9.9", "python": str(python), "model_bytes": 15 * GIB}
    table = release_json("r1") | defaults | release
    (paths.release("r1") / "release.json").write_text(json.dumps(table))
    text = f'[gpus]\nbackend = "{backend}"\n[engine]\n{engine}\n'
    return paths, parse_config(text.encode(), where="test")


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_a_cuda_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu("GPU-5fd4f087", 4, "NVIDIA H200", "0000:1b:00.0", None)
    monkeypatch.setattr(spec_module, "find_gpu", lambda uuid: gpu)
    paths, config = host(tmp_path, "cuda", "gpu_memory_fraction = 0.3", options={"max_model_len": 4096})
    found = plan_engine(paths, config, 2, "GPU-5fd4f087", "r1")
    assert found.scope.devices == ("/dev/nvidia4", "/dev/nvidiactl", "/dev/nvidia-uvm")  # by the minor of today
    assert found.env["CUDA_VISIBLE_DEVICES"] == "GPU-5fd4f087"
    assert found.scope.memory_max == 19 * GIB
    assert option(found.argv, "--gpu-memory-fraction") == "0.3"
    assert option(found.argv, "--max-model-len") == "4096"
    assert found.argv[1:4] == ["-P", "-m", "engine"]


def test_the_smaller_limit_counts_and_free_arguments_come_last(tmp_path: Path) -> None:
    paths, config = host(
        tmp_path, engine='max_model_len = 1000\nmax_batch_seqs = 64\narguments = ["--threads", "2"]',
        options={"max_model_len": 2000, "max_batch_seqs": 8, "arguments": ["--no-prefix-cache"]},
    )  # fmt: skip
    argv = plan_engine(paths, config, 0, "CPU-0", "r1").argv
    assert option(argv, "--max-model-len") == "1000" and option(argv, "--max-batch-seqs") == "8"
    assert argv[-3:] == ["--no-prefix-cache", "--threads", "2"]


def test_the_engine_of_the_releases_own_version_is_run(tmp_path: Path) -> None:
    paths, config = host(tmp_path)
    python = paths.lib / "9.9/venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("")
    python.chmod(0o755)
    found = plan_engine(paths, config, 0, "CPU-0", "r1")
    assert found.argv[0] == str(python) and "PYTHONPATH" not in found.env


def test_an_engine_version_that_is_not_there_is_refused(tmp_path: Path) -> None:
    paths, config = host(tmp_path, python="/nowhere/python")
    with pytest.raises(SpecError, match=r"9\.9, which is not installed"):
        plan_engine(paths, config, 0, "CPU-0", "r1")


def test_memory_of_a_cpu_engine_has_room_for_its_pool(tmp_path: Path) -> None:
    paths, config = host(tmp_path, engine='placement = "exclusive"')
    limit, fraction = plan_memory(config, read_release(paths, "r1"), 64 * GIB)
    left_after_loading = limit - 15 * GIB
    pool = left_after_loading * fraction  # what engine/core_config.py:plan_kv_pages takes
    assert pool <= left_after_loading - 4 * GIB * 0.999
    assert pool == pytest.approx(64 * GIB * 0.9 / 2, rel=0.01)


def test_memory_as_the_admin_says(tmp_path: Path) -> None:
    paths, config = host(tmp_path, engine='memory_max = "24G"')
    assert plan_memory(config, read_release(paths, "r1"), 64 * GIB)[0] == 24 * GIB


@pytest.mark.parametrize(
    ("change", "words"),
    [({"name": "other"}, "belongs to the release 'other'"), ({"model_bytes": "1"}, "model_bytes"),
     ({"model_bytes": True}, "model_bytes"),
     ({"model_bytes": -1}, "model_bytes"), ({"model_name": 5}, "model_name"), ({"options": []}, "options"),
     ({"options": {"max_model_len": "1"}}, "max_model_len"), ({"options": {"arguments": [1]}}, "arguments"),
     ({"options": {"gpu_memory_fraction": 0.2}}, "gpu_memory_fraction"), ({"options": {"else": 1}}, "else")],
)  # fmt: skip
def test_a_release_that_cannot_be_used_is_refused_by_key(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    paths, _ = host(tmp_path, **change)
    with pytest.raises(SpecError, match=words):
        read_release(paths, "r1")


def test_pointers(tmp_path: Path) -> None:
    paths = Paths.under(tmp_path)
    assert pointed_releases(paths, {}) == ({}, [])
    paths.slot_pointer("stable").parent.mkdir(parents=True)
    paths.slot_pointer("stable").symlink_to("../releases/r1")
    assert pointed_releases(paths, {"stable": "old", "canary": "gone"}) == ({"stable": "r1"}, [])


@pytest.mark.parametrize("target", [None, "../releases/NO RELEASE"])
def test_a_pointer_that_cannot_be_read_stops_nobody(tmp_path: Path, target: str | None) -> None:
    paths = Paths.under(tmp_path)
    pointer = paths.slot_pointer("stable")
    pointer.parent.mkdir(parents=True)
    if target is None:
        pointer.write_text("a file")
    else:
        pointer.symlink_to(target)
    found, problems = pointed_releases(paths, {"stable": "r1"})
    assert found == {"stable": "r1"} and str(pointer) in problems[0]
    assert pointed_releases(paths, {})[0] == {}


def test_signals_have_names() -> None:
    assert exit_text(-signal.SIGBUS) == "killed by SIGBUS"
