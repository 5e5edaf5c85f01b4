"""Clients of an endpoint that notice every lost or wrong answer.

The model is exact: each prompt has one right text, taken before anything happens. `Traffic` asks without pause from
several threads, streamed and not; at the end every request that was begun must have ended well.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

REQUEST_SECONDS = 300.0


@dataclass
class Endpoint:
    """`url` parts of a gateway, and one model."""

    port: int
    key: str
    model: str = "tiny"

    def ask(self, path: str, body: dict[str, Any] | None = None, timeout: float = REQUEST_SECONDS) -> tuple[int, bytes]:
        # Bound, so that no two connections have the same port: qemu's network shows the guest nothing else of them.
        source = ("127.0.0.1", 0)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout, source_address=source)
        try:
            headers = {"content-type": "application/json", "authorization": f"Bearer {self.key}"}
            method = "GET" if body is None else "POST"
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def complete(self, prompt: str, tokens: int, *, stream: bool = False) -> str:
        """The text. AssertionError where the answer is not a whole, good one."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": stream}
        status, data = self.ask("/v1/completions", body | {"ignore_eos": True})
        assert status == 200, f"{status}: {data[:300]!r}"
        if not stream:
            return str(json.loads(data)["choices"][0]["text"])
        text, finished = "", False
        for block in data.decode().split("\n\n"):
            for line in block.splitlines():
                if line == "data: [DONE]":
                    finished = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    text += event["choices"][0]["text"] if event["choices"] else ""
        assert finished, f"the stream ended early: {data[-300:]!r}"
        return text


@dataclass
class Traffic:
    """`with Traffic(endpoints, texts) as traffic:`; leaving waits for all requests and raises for any that went wrong.

    endpoints: one a client; texts: prompt -> (number of tokens, right text)
    """

    endpoints: Sequence[Endpoint]
    texts: dict[str, tuple[int, str]]
    done: int = 0
    longest: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def __enter__(self) -> Traffic:
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(len(self.endpoints))]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(REQUEST_SECONDS + 60)
        if kind is None:
            assert not self.wrong, f"{len(self.wrong)} of {self.done}: {self.wrong[:5]}"
            assert self.done >= len(self.endpoints)

    def _run(self, number: int) -> None:
        prompts, turn = list(self.texts), number
        while not self._stop.is_set():
            prompt, turn = prompts[turn % len(prompts)], turn + 1
            tokens, right = self.texts[prompt]
            started = time.monotonic()
            try:
                text = self.endpoints[number].complete(prompt, tokens, stream=turn % 4 != 0)
                problem = "" if text == right else f"{prompt}: another text: {text[:80]!r}"
            except (AssertionError, OSError, http.client.HTTPException, ValueError, KeyError) as failure:
                problem = f"{prompt}: {failure!r}"
            with self._lock:
                self.done += 1
                self.longest = max(self.longest, time.monotonic() - started)
                if problem:
                    self.wrong.append(problem)

    def wait(self, more: int, timeout: float = REQUEST_SECONDS) -> None:
        """Until `more` further requests have ended."""
        target, deadline = self.done + more, time.monotonic() + timeout
        while self.done < target:
            assert time.monotonic() < deadline, (
                f"only {self.done} of {target} requests in {timeout:g} s: {self.wrong[:3]}"
            )
            time.sleep(0.1)
