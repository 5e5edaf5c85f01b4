"""The checks between the scope and the engine. What they protect is shown in the box (test_box_scope.py)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.launcher.trampoline import GO, REFUSED, Refusal, check_denied, check_self
from engine.spawn import python_env

DROPPED = """Name:\tpython3
Uid:\t64700\t64700\t64700\t64700
Gid:\t64700\t64700\t64700\t64700
Groups:\t
CapInh:\t0000000000000000
CapPrm:\t0000000000000000
CapEff:\t0000000000000000
CapBnd:\t0000000000000000
CapAmb:\t0000000000000000
NoNewPrivs:\t1
"""


def test_dropped_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "status").write_text(DROPPED)
    check_self(64700, 64700, tmp_path / "status")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Uid:\t64700\t64700", "Uid:\t64700\t0"),
        ("Gid:\t64700", "Gid:\t0"),
        ("Groups:\t", "Groups:\t0"),
        ("CapBnd:\t0000000000000000", "CapBnd:\t0000000000000080"),
        ("CapAmb:\t0000000000000000", "CapAmb:\t0000000000000001"),
        ("NoNewPrivs:\t1", "NoNewPrivs:\t0"),
        ("NoNewPrivs:\t1\n", ""),
    ],
)
def test_anything_left_is_refused(tmp_path: Path, before: str, after: str) -> None:
    assert before in DROPPED
    (tmp_path / "status").write_text(DROPPED.replace(before, after))
    with pytest.raises(Refusal, match=before.split(":")[0]):
        check_self(64700, 64700, tmp_path / "status")


def test_a_node_that_is_let_through_is_refused(tmp_path: Path) -> None:
    check_denied([str(tmp_path / "absent")])
    with pytest.raises(Refusal, match="lets /dev/null through"):
        check_denied(["/dev/null"])
    with socket.socket(socket.AF_UNIX) as sock:  # opening a socket file is ENXIO, as a node without a driver is
        sock.bind(str(tmp_path / "node"))
        with pytest.raises(Refusal, match="through"):
            check_denied([str(tmp_path / "node")])


def run(word: bytes | None, **order: object) -> tuple[int, bytes]:
    """Exit status, and what it said on its channel."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        text = json.dumps({"fd": theirs.fileno(), "uid": 1, "gid": 1, "denied": [], "argv": [], "env": {}} | order)
        argv = [sys.executable, "-P", "-m", "appliance.launcher.trampoline", text]
        process = subprocess.Popen(argv, env=python_env(), pass_fds=[theirs.fileno()])
        theirs.close()
        if word is None:
            ours.shutdown(socket.SHUT_RDWR)
        else:
            ours.sendall(word)
        said = b"" if word is None else ours.recv(1000)
        return process.wait(30), said


@pytest.mark.parametrize("word", [None, b"no\n"], ids=["launcher gone", "another word"])
def test_without_the_word_nothing_runs(tmp_path: Path, word: bytes | None) -> None:
    status, said = run(word, argv=["/usr/bin/touch", str(tmp_path / "ran")])
    assert status == REFUSED and said == b""
    assert not (tmp_path / "ran").exists()


def test_what_cannot_be_executed_is_said() -> None:
    status, said = run(GO, argv=["/nowhere/python"])
    assert status == REFUSED
    assert b"/nowhere/python" in said if os.geteuid() == 0 else said
