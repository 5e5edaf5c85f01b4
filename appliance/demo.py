"""`appliance demo`: the main job, seen from outside. Starts the real server, asks it over HTTP, stops it.

Only the standard library speaks to the server here: what is printed is what any client would get.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO, Any

from appliance.gpus import visible_gpus
from appliance.log import ApplianceError, ExitCode, UsageError, emit_json
from appliance.serve import engine_command
from engine.spawn import python_env

QUESTIONS = ("What is the capital of France?", "Name three colours of the rainbow.")
START_TIMEOUT_SECONDS = 180.0


class NoGpu(ApplianceError):
    """Nothing falls back to the CPU."""

    exit_code = ExitCode.REFUSED


def configure(parser: argparse.ArgumentParser, _common: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="one JSON document at the end")
    parser.add_argument("--model", default="smollm2", help="a model of the store (pulled if it is not there yet)")
    parser.add_argument("--backend", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tokens", type=int, default=64, help="at most this many tokens an answer")


def run(args: argparse.Namespace) -> int:
    if args.tokens < 1:
        raise UsageError("--tokens must be at least 1")
    if args.backend == "cuda" and not visible_gpus():  # before a model is fetched for it
        raise NoGpu(
            "there is no GPU here: the NVIDIA driver shows none", hint="--backend cpu; or see `appliance doctor`"
        )
    for number in (signal.SIGTERM, signal.SIGHUP):  # the server must not outlive us: let `finally` run
        signal.signal(number, lambda received, _frame: sys.exit(128 + received))
    say = Printer(quiet=args.json)
    port = _free_port()
    command = engine_command(args.model, backend=args.backend, host="127.0.0.1", port=port)
    say(f"starting the server: model {args.model}, backend {args.backend}, http://127.0.0.1:{port}\n")
    started = time.monotonic()
    result: dict[str, Any] = {"schema": 1, "backend": args.backend, "answers": []}
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stderr=log, stdout=log, env=python_env())
        try:
            _wait_ready(server, port, log)
            result["ready_seconds"] = round(time.monotonic() - started, 2)
            say(f"ready after {result['ready_seconds']:.1f} s\n\n")
            result["model"] = _get(port, "/v1/models")["data"][0]["id"]
            for question in QUESTIONS:
                result["answers"].append(_chat(port, result["model"], question, args.tokens, say))
            result["infer"] = _infer(port, "Complete: the opposite of hot is", say)
        finally:
            code = _stop(server)
    if code != 0:
        raise ApplianceError(f"the server ended with status {code}")
    say("server stopped cleanly\n")
    if args.json:
        emit_json(result)
    return 0


class Printer:
    """Text as it comes; silent when the result is to be one JSON document."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet

    def __call__(self, text: str) -> None:
        if not self._quiet:
            print(text, end="", flush=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_ready(server: subprocess.Popen[bytes], port: int, log: IO[str]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/readyz")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    log.seek(0)
    lines = [line for line in log if "/readyz" not in line]
    sys.stderr.write("".join(lines[-20:]))
    raise ApplianceError("the server did not become ready", hint="its log is above")


def _get(port: int, path: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path)
    return json.load(connection.getresponse())


def _post(port: int, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise ApplianceError(f"POST {path} answered {response.status}: {response.read(2000).decode(errors='replace')}")
    return response


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line[6:])


def _chat(port: int, model: str, question: str, max_tokens: int, say: Printer) -> dict[str, Any]:
    """Streamed, so that the reader sees the words come; speed from the usage block and the clock."""
    say(f"> {question}\n  ")
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent = time.monotonic()
    first = last = sent
    answer = ""
    usage: dict[str, int] = {}
    for event in _events(_post(port, "/v1/chat/completions", body)):
        if "error" in event:
            raise ApplianceError(f"the stream ended with an error: {event['error']}")
        for choice in event["choices"]:
            text = choice["delta"].get("content") or ""
            if text:
                last = time.monotonic()
                first = last if first == sent else first
                answer += text
                say(text.replace("\n", "\n  "))
        usage = event.get("usage") or usage
    tokens = usage["completion_tokens"]
    speed = (tokens - 1) / (last - first) if tokens > 1 and last > first else 0.0
    ttft_ms = (first - sent) * 1000
    say(
        f"\n  [{usage['prompt_tokens']} tokens in, {tokens} out, first token after {ttft_ms:.0f} ms, "
        f"{speed:.1f} tokens/s]\n\n"
    )
    return {
        "question": question, "answer": answer, "prompt_tokens": usage["prompt_tokens"], "completion_tokens": tokens,
        "ttft_ms": round(ttft_ms, 1), "tokens_per_second": round(speed, 2),
    }  # fmt: skip


def _infer(port: int, text: str, say: Printer) -> Any:
    answer = json.load(_post(port, "/infer", {"input": text}))
    say(f"> POST /infer {json.dumps({'input': text})}\n  {json.dumps(answer)}\n\n")
    return answer


def _stop(server: subprocess.Popen[bytes]) -> int:
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.kill(server.pid, signal.SIGKILL)
    return server.wait()
