"""The step ring as another process sees it: whole entries only, the last ones, and what the command prints."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.cuda.step_ring import ENTRY, GAP_UNKNOWN, HEADER_BYTES, Kind, StepRingReader, StepRingWriter, summarize
from engine.errors import ConfigError


def write(
    ring: StepRingWriter, step: int, *, kind: Kind = Kind.DECODE_GRAPH, gap: int = 5_000, ms: float = 4.0
) -> None:
    begin = step * 10_000_000
    ring.write(kind, rows=8, step=step, begin_ns=begin, end_ns=begin + int(ms * 1e6), gap_ns=gap, tokens=7, decodes=7,
               host_ns=step)  # fmt: skip


def test_entries_come_back_in_order_and_the_oldest_make_room(tmp_path: Path) -> None:
    ring = StepRingWriter(str(tmp_path / "ring"), num_entries=100)
    reader = StepRingReader(tmp_path / "ring")
    assert len(reader.read()) == 0
    for step in range(250):
        write(ring, step)
    assert reader.written == 250
    assert reader.read()["step"].tolist() == list(range(150, 250))
    assert reader.read(last=3)["step"].tolist() == [247, 248, 249]
    assert reader.read(since=245)["step"].tolist() == [245, 246, 247, 248, 249]
    one = reader.read(last=1)[0]
    assert (one["kind"], one["rows"], one["tokens"], one["gap_ns"]) == (Kind.DECODE_GRAPH, 8, 7, 5_000)
    assert one["end_ns"] - one["begin_ns"] == 4_000_000


def test_an_anonymous_ring_is_readable_through_proc() -> None:
    ring = StepRingWriter(None, num_entries=10)
    assert ring.readable_as.startswith(f"/proc/{os.getpid()}/fd/")
    write(ring, 1)
    assert StepRingReader(ring.readable_as).read()["step"].tolist() == [1]
    ring.close()


def test_an_entry_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    """As it looks in the middle of write(): number 0, or still that of the entry before, or already another."""
    ring = StepRingWriter(str(tmp_path / "ring"), num_entries=4)
    for step in range(6):
        write(ring, step)
    reader = StepRingReader(tmp_path / "ring")
    with open(tmp_path / "ring", "r+b") as file:
        for number in (0, 1, 99):
            file.seek(HEADER_BYTES + 3 * ENTRY.itemsize)  # the place of step 3
            file.write(np.uint64(number).tobytes())
            file.flush()
            assert reader.read()["step"].tolist() == [2, 4, 5]


def _write_many(path: str, count: int) -> None:
    ring = StepRingWriter(path, num_entries=64)
    for step in range(count):
        ring.write(Kind.EAGER, rows=step, step=step, begin_ns=step, end_ns=3 * step, gap_ns=5 * step, tokens=step,
                   decodes=step, host_ns=7 * step)  # fmt: skip


def test_a_reader_beside_a_fast_writer_sees_no_torn_entry(tmp_path: Path) -> None:
    """Every field of an entry is a multiple of its step: a mixture of two steps shows."""
    path, count = tmp_path / "ring", 60_000
    writer = multiprocessing.get_context("spawn").Process(target=_write_many, args=(str(path), count))
    writer.start()
    seen = 0
    try:
        while not path.exists() or path.stat().st_size < HEADER_BYTES + 64 * ENTRY.itemsize:
            assert writer.is_alive()
        reader = StepRingReader(path)
        while reader.written < count:
            assert writer.is_alive() or reader.written == count
            entries = reader.read()
            step = entries["step"]
            assert np.array_equal(entries["end_ns"], 3 * step) and np.array_equal(entries["gap_ns"], 5 * step)
            assert np.array_equal(entries["host_ns"], 7 * step) and np.array_equal(entries["tokens"], step)
            seen += len(entries)
    finally:
        writer.join(30)
    assert seen > 0 and writer.exitcode == 0


def test_percentiles_are_numpys_and_gaps_only_of_steps_queued_behind_others(tmp_path: Path) -> None:
    ring = StepRingWriter(str(tmp_path / "ring"), num_entries=1000)
    for step in range(101):
        write(ring, step, ms=step / 10, gap=step * 1000 if step % 2 else GAP_UNKNOWN)
    write(ring, 999, kind=Kind.EAGER, ms=40, gap=GAP_UNKNOWN)
    decode, eager = summarize(StepRingReader(tmp_path / "ring").read())
    assert (decode.kind, decode.count, decode.tokens) == ("decode_graph", 101, 707)
    assert decode.step_p50_ms == pytest.approx(5.0) and decode.step_p99_ms == pytest.approx(9.9)
    assert decode.gap_p50_ms == pytest.approx(0.050)  # 1, 3 ... 99 us
    assert (eager.count, eager.gap_p50_ms) == (1, None)


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "engine.cuda.step_ring", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_command_prints_a_table_and_json_without_touching_the_ring(tmp_path: Path) -> None:
    ring = StepRingWriter(str(tmp_path / "ring"), num_entries=100)
    for step in range(50):
        write(ring, step)
    ring.write(Kind.KERNEL, rows=3, step=49, begin_ns=100, end_ns=2_100, gap_ns=0, tokens=5, decodes=17, host_ns=0)
    path = tmp_path / "ring"
    path.chmod(0o440)
    before = path.read_bytes()
    printed = run_cli(str(path)).stdout
    assert "decode_graph" in printed and "4.000" in printed and "0.005" in printed
    result: dict[str, Any] = json.loads(run_cli(str(path), "--json", "--last", "11").stdout)
    assert result["written"] == 51 and result["steps"][0]["count"] == 10
    assert result["kernels"] == {"attention": {"count": 1, "mean_ns": 2000.0}}
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"APPLSTEP" + b"\xff" * 5000, b"NOTARING" + bytes(10_000)])
def test_what_is_no_ring_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        StepRingReader(path)
    assert run_cli(str(path)).returncode == 1
    assert run_cli(str(tmp_path / "missing")).returncode == 1


def test_another_schema_is_named(tmp_path: Path) -> None:
    StepRingWriter(str(tmp_path / "ring"), num_entries=4).close()
    with open(tmp_path / "ring", "r+b") as file:
        file.seek(8)
        file.write(np.uint32(77).tobytes())
    with pytest.raises(ConfigError, match="schema 77"):
        StepRingReader(tmp_path / "ring")


def test_a_ring_that_cannot_be_made_says_which_option(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path / "no" / "ring", tmp_path / "link", tmp_path):
        with pytest.raises(ConfigError) as caught:
            StepRingWriter(str(path), num_entries=4)
        assert "--step-ring" in str(caught.value.hint)
    assert not (tmp_path / "elsewhere").exists()


def test_a_second_engine_on_the_same_path_takes_nothing_from_the_first(tmp_path: Path) -> None:
    """It gets a new file in its place: whoever has the old one mapped keeps it (a truncated mapping is a SIGBUS)."""
    path = str(tmp_path / "steps")
    first = StepRingWriter(path, 64)
    reader = StepRingReader(path)
    second = StepRingWriter(path, 64)
    fields = {"rows": 1, "begin_ns": 0, "end_ns": 5, "gap_ns": 0, "tokens": 1, "decodes": 1, "host_ns": 9}
    for step in range(3):
        first.write(Kind.EAGER, step=step, **fields)
    assert reader.written == 3 and StepRingReader(path).written == 0
    second.write(Kind.EAGER, step=7, **fields)
    assert reader.written == 3 and StepRingReader(path).written == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["steps"]
    first.close()
    second.close()


def test_its_memory_is_taken_at_the_start(tmp_path: Path) -> None:
    """A sparse file on a tmpfs that is full later would kill the engine in the middle of a step."""
    writer = StepRingWriter(str(tmp_path / "steps"), 4096)
    status = (tmp_path / "steps").stat()
    assert status.st_blocks * 512 >= status.st_size > 4096 * 64
    writer.close()
