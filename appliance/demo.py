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

from appliance.log import ApplianceError
from appliance.serve import engine_command

QUESTIONS = ("What is the capital of France?", "Name three colours of the rainbow.")
START_TIMEOUT_SECONDS = 180.0


def configure(parser: argparse.ArgumentParser, _common: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", help="a model of the store (pulled if it is not there yet)")
    parser.add_argument("--backend", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tokens", type=int, default=64, help="at most this many tokens an answer")


def run(args: argparse.Namespace) -> int:
    port = _free_port()
    command = engine_command(args.model, backend=args.backend, host="127.0.0.1", port=port)
    print(f"starting the server: model {args.model}, backend {args.backend}, http://127.0.0.1:{port}", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stderr=log, stdout=log)
        try:
            _wait_ready(server, port, log)
            print(f"ready after {time.monotonic() - started:.1f} s\n", flush=True)
            for question in QUESTIONS:
                _chat(port, args.model, question, args.tokens)
            _infer(port, "Complete: the opposite of hot is")
        finally:
            code = _stop(server)
    if code != 0:
        raise ApplianceError(f"the server ended with status {code}")
    print("server stopped cleanly")
    return 0


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
    sys.stderr.write(log.read()[-4000:])
    raise ApplianceError("the server did not become ready", hint="its log is above")


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


def _chat(port: int, model: str, question: str, max_tokens: int) -> None:
    """Streamed, so that the reader sees the words come; speed from the usage block and the clock."""
    print(f"> {question}\n  ", end="", flush=True)
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
    usage: dict[str, int] = {}
    for event in _events(_post(port, "/v1/chat/completions", body)):
        if "error" in event:
            raise ApplianceError(f"the stream ended with an error: {event['error']}")
        for choice in event["choices"]:
            text = choice["delta"].get("content") or ""
            if text:
                last = time.monotonic()
                first = last if first == sent else first
                print(text.replace("\n", "\n  "), end="", flush=True)
        usage = event.get("usage") or usage
    tokens = usage["completion_tokens"]
    speed = (tokens - 1) / (last - first) if tokens > 1 and last > first else 0.0
    print(
        f"\n  [{usage['prompt_tokens']} tokens in, {tokens} out, first token after {(first - sent) * 1000:.0f} ms, "
        f"{speed:.1f} tokens/s]\n",
        flush=True,
    )


def _infer(port: int, text: str) -> None:
    answer = json.load(_post(port, "/infer", {"input": text}))
    print(f"> POST /infer {json.dumps({'input': text})}\n  {json.dumps(answer)}\n", flush=True)


def _stop(server: subprocess.Popen[bytes]) -> int:
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.kill(server.pid, signal.SIGKILL)
    return server.wait()
