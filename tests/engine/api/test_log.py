"""Logs: one JSON object a line, journald's native fields, one id through all layers."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from engine import log, serve
from engine.log import JournalHandler, JsonFormatter, journal_datagram, log_event
from engine.messages import Ready
from engine.types import DeviceId

from .fakes import Script


def record(message="hello", level=logging.INFO, **fields):
    caught = []
    logger = logging.Logger("test")
    handler = logging.Handler()
    handler.emit = caught.append
    logger.addHandler(handler)
    log_event(logger, level, "something", message, **fields)
    return caught[0]


def test_a_newline_cannot_forge_a_line():
    text = JsonFormatter().format(record('a\n{"level":"error"}', req_id="r\n1"))
    assert "\n" not in text
    parsed = json.loads(text)
    assert parsed["msg"] == 'a\n{"level":"error"}'
    assert (parsed["event"], parsed["level"], parsed["req_id"]) == ("something", "info", "r\n1")
    assert parsed["ts"].endswith("Z")


def test_none_is_left_out_and_tracebacks_are_kept():
    assert "key" not in json.loads(JsonFormatter().format(record(key=None)))
    try:
        raise ValueError("boom")
    except ValueError:
        parsed = json.loads(JsonFormatter().format(record(exc_info=True)))
    assert "ValueError: boom" in parsed["traceback"]


def parse_journal(data):
    """The reader of systemd.io/JOURNAL_NATIVE_PROTOCOL, written from the page."""
    fields = {}
    while data:
        end = data.index(b"\n")
        head, rest = data[:end], data[end + 1 :]
        if b"=" in head:
            name, value = head.split(b"=", 1)
            data = rest
        else:
            size = int.from_bytes(rest[:8], "little")
            name, value = head, rest[8 : 8 + size]
            assert rest[8 + size : 9 + size] == b"\n"
            data = rest[9 + size :]
        fields[name.decode()] = value.decode()
    return fields


def test_journal_fields(tmp_path):
    path = tmp_path / "journal"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(str(path))
        handler = JournalHandler(path, "appliance-api")
        handler.emit(record("two\nlines", logging.ERROR, req_id="r1", where={"layer": 3}))
        fields = parse_journal(journal.recv(65536))
        handler.close()
    assert fields["MESSAGE"] == "two\nlines"
    assert fields["PRIORITY"] == "3"
    assert fields["SYSLOG_IDENTIFIER"] == "appliance-api"
    assert fields["APPLIANCE_REQ_ID"] == "r1"
    assert fields["APPLIANCE_EVENT"] == "something"
    assert json.loads(fields["APPLIANCE_WHERE"]) == {"layer": 3}


def test_field_names_are_legal():
    fields = parse_journal(journal_datagram(record(**{"a-b": 1, "é": 2, "x" * 100: 3}), "i"))
    for name in fields:
        assert len(name) <= 64
        assert name.replace("_", "").isalnum() and name.isascii() and name == name.upper()


def test_a_full_journal_falls_back_to_stderr(tmp_path, capfd):
    path = tmp_path / "journal"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(str(path))
        handler = JournalHandler(path)
        for _ in range(2000):  # nobody reads
            handler.emit(record("x" * 1000))
        handler.close()
    assert "something" in capfd.readouterr().err


def test_setup(monkeypatch, capfd):
    monkeypatch.setenv("JOURNAL_STREAM", "0:0")
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        log.setup_logging("info")
        log_event(logging.getLogger("engine.x"), logging.INFO, "started", port=1)
        logging.getLogger("engine.x").debug("not shown")
        root.handlers[0].close()
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    lines = capfd.readouterr().err.splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["started"]
    assert json.loads(lines[0])["port"] == 1


def entries(caplog, event):
    return [r.fields | {"level": r.levelname} for r in caplog.records if getattr(r, "event", None) == event]


async def test_one_line_a_request_with_its_id(make_endpoint, caplog):
    caplog.set_level("INFO")
    endpoint = await make_endpoint(Script(fail_after=3))
    headers = {"X-Request-Id": "abc"}
    await endpoint.post("/v1/completions", {"prompt": "x", "max_tokens": 2, "seed": 4}, headers=headers)
    await endpoint.post("/v1/completions", {"prompt": "x", "max_tokens": 9}, headers=headers)
    await endpoint.post("/v1/completions", {"prompt": 5}, headers=headers)
    good, failed, bad = entries(caplog, "http_request")
    assert (good["req_id"], good["status"], good["prompt_tokens"], good["completion_tokens"]) == ("abc", 200, 2, 2)
    assert (good["seed"], good["finish"]) == (4, ["length"])
    assert (failed["status"], failed["error"], failed["level"]) == (500, "engine_error", "WARNING")
    assert (bad["status"], bad["error"], bad["param"]) == (400, "invalid_type", "prompt")
    (where,) = entries(caplog, "engine_error")
    assert (where["req_id"], where["where"]["op"]) == ("abc", "lm_head")
    ids = [msg.request_id for msg in endpoint.client.submitted]
    assert len(set(ids)) == 2 and all(name.startswith("abc.") for name in ids)


async def test_probes_are_not_logged_unless_they_fail(endpoint, caplog):
    caplog.set_level("INFO")
    for path in ("/livez", "/readyz", "/health"):
        await endpoint.get(path)
    assert entries(caplog, "http_request") == []
    endpoint.client.state = "dead"
    await endpoint.get("/readyz")
    assert len(entries(caplog, "http_request")) == 1


@pytest.mark.parametrize("asked", [False, True])
async def test_prompts_and_outputs_are_logged_only_when_asked_for(make_endpoint, caplog, asked):
    caplog.set_level("DEBUG")
    reply = list(b"the-output")
    endpoint = await make_endpoint(Script(reply=lambda msg, index: reply), log_prompts=asked)
    await endpoint.post("/v1/completions", {"prompt": "the-prompt", "max_tokens": 10})
    text = "\n".join(JsonFormatter().format(r) for r in caplog.records if r.name.startswith("engine"))
    assert ("the-prompt" in text, "the-output" in text) == (asked, asked)


async def test_a_client_that_leaves_is_logged_as_499(make_endpoint, caplog):
    import asyncio

    caplog.set_level("INFO")
    endpoint = await make_endpoint(Script(never_answer=True))
    task = asyncio.create_task(endpoint.post("/v1/completions", {"prompt": "x"}))
    while not endpoint.client.running:
        await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for _ in range(100):
        if entries(caplog, "http_request"):
            break
        await asyncio.sleep(0.01)
    assert [line["status"] for line in entries(caplog, "http_request")] == [499]


def test_a_reader_that_stops_reading_stops_nobody():
    """A full pipe behind the log (a paused terminal, a hung log driver) blocked the event loop and all requests."""
    reading, writing = os.pipe()
    writer = log.LineWriter(writing, max_lines=50)
    finished = threading.Event()

    def flood():
        for number in range(5000):
            writer.put(f"{number} " + "x" * 100)
        finished.set()

    threading.Thread(target=flood, daemon=True).start()
    assert finished.wait(10), "put() waits for the reader"
    os.set_blocking(reading, False)
    got, seen, lost = b"", [], 0
    for _ in range(500):
        with contextlib.suppress(BlockingIOError):
            got += os.read(reading, 1 << 16)
        lines = got.decode().splitlines()
        lost = sum(json.loads(line)["lost"] for line in lines if "log_lost" in line and line.endswith("}"))
        seen = [int(line.split()[0]) for line in lines if line.endswith("x" * 100)]
        if lost + len(seen) == 5000:
            break
        time.sleep(0.01)
    assert lost + len(seen) == 5000 and lost > 0
    assert seen == sorted(seen) and seen[0] == 0
    writer.close()
    os.close(reading)
    os.close(writing)


def test_what_was_logged_is_written_before_the_process_ends():
    code = "import logging; from engine.log import setup_logging; setup_logging(); logging.getLogger('a').error('last')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert json.loads(result.stderr)["msg"] == "last"


@pytest.mark.parametrize(
    ("drain", "says"),
    [(30.0, "(Ctrl-C stops, after at most 30 s for open requests; a second one at once)"), (0.0, "(Ctrl-C stops)")],
)
async def test_the_line_for_a_person_says_how_it_stops(monkeypatch, capsys, drain, says):
    """With an open stream Ctrl-C seems to do nothing for half a minute."""
    ready = Ready(
        kv_pages=1, max_model_len=2, vocab_size=3, weights_bytes=4, weights_checksum="", load_seconds=0.0,
        backend="cpu", device=DeviceId("cpu", "CPU", "cpu"),
    )  # fmt: skip

    class Client:
        async def wait_ready(self):
            return ready

    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    await serve._announce(Client(), "m on http://127.0.0.1:1", drain)
    assert capsys.readouterr().out == f"ready: m on http://127.0.0.1:1 {says}\n"
