"""The parts of the run on a GPU host that need neither GPU nor box."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.host.box import CHECKOUT
from tests.host.gpu_record import Record
from tests.host.gpu_sandbox import LOOSER, unit_text
from tests.host.gpu_world import collect_driver

SHIPPED = (CHECKOUT / "systemd/appliance-gpu@.service").read_text()
SANDBOX = (
    "Private", "Protect", "Restrict", "System", "Capability", "NoNew", "Lock", "Memory", "Device", "IPAddress",
    "Limit", "UMask", "Slice", "Proc",
)  # fmt: skip


def record(path: Path, *, strict: bool, seconds: float = 100.0) -> Record:
    return Record(path / "run.json", seconds, strict=strict)


def test_a_record_is_on_disk_after_every_step_and_nothing_stops_it(tmp_path: Path) -> None:
    run = record(tmp_path, strict=True)
    run.check("good", True, value=1)
    run.part("broken", {}.__getitem__, "x")
    begun: list[int] = []
    run.part("too long", begun.append, 1, needs=1000)
    assert begun == [], "a part that does not fit was begun"
    run.check("unknown", None)
    kept = json.loads((tmp_path / "run.json").read_text())
    assert kept["checks"]["good"] == {"ok": True, "value": 1}
    assert kept["failed"] == run.failed() == ["broken", "too long", "unknown"]
    assert "KeyError" in kept["texts"]["traceback broken"]


def test_a_rehearsal_is_not_failed_by_what_it_cannot_tell(tmp_path: Path) -> None:
    run = record(tmp_path, strict=False)
    run.check("unknown", None)
    assert run.failed() == []
    run.check("bad", False)
    assert run.failed() == ["bad"]


def test_the_probe_has_the_launchers_sandbox_line_by_line() -> None:
    text = unit_text(SHIPPED, 1, []).splitlines()
    wanted = [line for line in SHIPPED.splitlines() if line.startswith(SANDBOX)]
    assert len(wanted) > 25 and [line for line in text if line.startswith(SANDBOX)] == wanted
    for name in ("ExecStart=", "Type="):
        assert len([line for line in text if line.startswith(name)]) == 1
    assert not any(line.startswith(("Restart=", "WatchdogSec=", "ExecStopPost=", "%")) for line in text)
    assert text[-1] == unit_text(SHIPPED, 1, ["PrivateNetwork=no"]).splitlines()[-2]


def test_what_loosens_the_sandbox_names_lines_that_are_in_it() -> None:
    shipped = {line.partition("=")[0] for line in SHIPPED.splitlines()}
    for lines in LOOSER.values():
        assert {line.partition("=")[0] for line in lines} <= shipped


def test_the_drivers_libraries_are_copied_with_their_links_and_without_graphics(tmp_path: Path) -> None:
    source = tmp_path / "lib"
    source.mkdir()
    for name in ("libcuda.so.580.1", "libnvidia-ptxjitcompiler.so.580.1", "libnvidia-glcore.so.580.1", "libc.so.6"):
        (source / name).write_text(name)
    (source / "libcuda.so.1").symlink_to("libcuda.so.580.1")
    (source / "libcuda.so").symlink_to(source / "libcuda.so.1")
    copied = collect_driver(source, tmp_path / "driver")
    assert sorted(copied) == ["libcuda.so.580.1", "libnvidia-ptxjitcompiler.so.580.1"]
    names = sorted(path.name for path in (tmp_path / "driver").iterdir())
    assert names == ["libcuda.so", "libcuda.so.1", "libcuda.so.580.1", "libnvidia-ptxjitcompiler.so.580.1"]
    for name in names[:3]:
        assert (tmp_path / "driver" / name).read_text() == "libcuda.so.580.1"


# -- the clients, against a server whose answers are known
class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        texts = ["a", "b", "c", "d"] if body["prompt"] != "cut" else ["a", "b", "c"]
        for text in texts:
            last = text == "d"
            choice = {"index": 0, "text": text, "finish_reason": "length" if last else None}
            self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        if body["prompt"] == "error":
            self.wfile.write(b'data: {"error": {"message": "an engine died"}}\n\n')
        elif body["prompt"] != "cut":
            usage = {"choices": [], "usage": {"completion_tokens": 4}}
            self.wfile.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def clients(port: int, *prompts: str, seconds: float = 0.0) -> dict[str, Any]:
    bodies = [{"prompt": prompt, "max_tokens": 4} for prompt in prompts]
    order = json.dumps({"port": port, "bodies": bodies, "seconds": seconds})
    done = subprocess.run(
        [sys.executable, "-P", CHECKOUT / "tests/host/gpu_client.py", order], capture_output=True, text=True, timeout=60
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "begun", done.stderr
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def test_clients_tell_whole_answers_from_others(port: int) -> None:
    result = clients(port, "x", "cut", "error")
    assert [len(texts) for texts in result["texts"]] == [1, 0, 0]
    assert result["tokens"] == 4 and result["requests"] == 3
    assert any("not whole: [DONE] False" in error for error in result["errors"])
    assert any("an engine died" in error for error in result["errors"])


def test_clients_go_on_for_the_time_they_are_given(port: int) -> None:
    result = clients(port, "x", "y", seconds=0.5)
    assert result["requests"] > 4 and result["errors"] == [] and result["seconds"] >= 0.5
    digest = hashlib.sha256(b"abcd").hexdigest()
    assert [set(texts) for texts in result["texts"]] == [{digest}] * 2
    assert sum(texts[digest] for texts in result["texts"]) == result["requests"]
