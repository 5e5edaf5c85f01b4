"""Clients of the endpoint inside a box: `python gpu_client.py JSON`. The standard library only, one thread a client.

The order: {"port" | "socket", "ask": [[path, body], ...]} prints each answer; {"port" | "socket", "bodies": [...],
"seconds": S} streams all bodies at once (S = 0: each once; else again and again for S seconds), prints "begun" when
each has begun, and at the end what came: for each body the distinct texts, errors, the longest pause.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
import sys
import threading
import time
from typing import Any

TIMEOUT = 120.0
BEGUN_EVENTS = 3


class Connection(http.client.HTTPConnection):
    """To a port of this host, or to a Unix socket."""

    def __init__(self, order: dict[str, Any]) -> None:
        super().__init__("127.0.0.1", order.get("port") or 80, timeout=TIMEOUT)
        self._path = order.get("socket")

    def connect(self) -> None:
        if self._path is None:
            super().connect()
            return
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(TIMEOUT)
        self.sock.connect(self._path)


def send(order: dict[str, Any], path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
    connection = Connection(order)
    data = None if body is None else json.dumps(body).encode()
    connection.request("GET" if body is None else "POST", path, data, {"Content-Type": "application/json"})
    return connection.getresponse()


def ask(order: dict[str, Any]) -> None:
    for path, body in order["ask"]:
        began = time.monotonic()
        response = send(order, path, body)
        raw = response.read().decode(errors="replace")
        try:
            answer = json.loads(raw)
        except ValueError:
            answer = raw
        shown = {"path": path, "status": response.status, "seconds": round(time.monotonic() - began, 4)}
        print(json.dumps(shown | {"answer": answer}), flush=True)


class Client(threading.Thread):
    """Streams one body, once or until the time is over."""

    def __init__(self, order: dict[str, Any], body: dict[str, Any], until: float) -> None:
        super().__init__(daemon=True)
        self.order, self.body, self.until = order, body, until
        self.begun = threading.Event()
        self.texts: dict[str, int] = {}
        self.errors: list[str] = []
        self.requests = self.tokens = self.events = 0
        self.pause = 0.0
        self.first: list[float] = []

    def run(self) -> None:
        while True:
            self.requests += 1
            try:
                self.stream()
            except Exception as error:  # every trouble of a client is what we are looking for
                self.errors.append(f"{type(error).__name__}: {error}"[:300])
            if time.monotonic() >= self.until or len(self.errors) > 5:
                self.begun.set()
                return

    def stream(self) -> None:
        began = last = time.monotonic()
        response = send(self.order, "/v1/completions", self.body)
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {response.read(300)!r}")
        text, finish, usage, done, seen = "", None, None, False, 0
        for line in response:
            if not line.startswith(b"data: "):
                continue
            now = time.monotonic()
            if seen == 0:
                self.first.append(now - began)
            self.pause, last, seen = max(self.pause, now - last), now, seen + 1
            if seen == BEGUN_EVENTS:
                self.begun.set()
            if line.strip() == b"data: [DONE]":
                done = True
                break
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"error event: {event['error']}")
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text += choice["text"]
                finish = choice["finish_reason"] or finish
        if not done or finish != "length" or usage is None or usage["completion_tokens"] != self.body["max_tokens"]:
            raise RuntimeError(f"not whole: [DONE] {done}, finish_reason {finish}, usage {usage}, {seen} events")
        self.events += seen
        self.tokens += usage["completion_tokens"]
        digest = hashlib.sha256(text.encode()).hexdigest()
        self.texts[digest] = self.texts.get(digest, 0) + 1


def load(order: dict[str, Any]) -> None:
    began = time.monotonic()
    clients = [Client(order, body, began + order["seconds"]) for body in order["bodies"]]
    for client in clients:
        client.start()
    for client in clients:
        client.begun.wait(TIMEOUT)
    print("begun", flush=True)
    for client in clients:
        client.join()
    seconds = time.monotonic() - began
    first = sorted(second for client in clients for second in client.first)
    result = {
        "texts": [client.texts for client in clients],
        "errors": [error for client in clients for error in client.errors][:20],
        "requests": sum(client.requests for client in clients),
        "tokens": sum(client.tokens for client in clients),
        "events": sum(client.events for client in clients),
        "seconds": round(seconds, 3),
        "tokens_per_second": round(sum(client.tokens for client in clients) / seconds, 1),
        "longest_pause_seconds": round(max(client.pause for client in clients), 3),
        "first_token_seconds_p50": round(first[len(first) // 2], 4) if first else None,
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    (ask if "ask" in given else load)(given)
