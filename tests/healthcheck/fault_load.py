"""Clients of the gateway, in the box, while something happens there: `python -m tests.healthcheck.fault_load URL N`.

Each of a few requests is asked once, undisturbed; then "ready" is printed, and the clients stream them, over and over,
until stdin ends. Each answer has to be the undisturbed one, character for character, in however many pieces it came.
On stdout in the end: {"answers", "lost": [what happened], "wrong": [...], "longest_pause": seconds, "seconds"}.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp

REQUESTS = 12
TIMEOUT = 120.0  # s without a piece of an answer: it is lost


def request(number: int) -> dict[str, Any]:
    """Long and short ones, greedy and sampled ones; `seed` makes the sampled ones repeatable."""
    body: dict[str, Any] = {
        "model": "tiny", "prompt": f"{number}: " + "the quick brown fox " * (1 + number % 4), "stream": True,
        "max_tokens": 40 + 20 * (number % 5), "ignore_eos": True, "temperature": 0,
    }  # fmt: skip
    return body | ({"temperature": 0.9, "top_p": 0.95, "seed": 1000 + number} if number % 2 else {})


class Lost(Exception):
    """No answer, or not a whole one."""


@dataclass
class Tally:
    answers: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    longest_pause: float = 0.0
    seconds: float = 0.0


async def answer(session: aiohttp.ClientSession, url: str, number: int, tally: Tally | None = None) -> tuple[str, str]:
    """(text, finish_reason)."""
    text, finished, last = "", "", time.monotonic()
    async with session.post(f"{url}/v1/completions", json=request(number)) as response:
        if response.status != 200:
            raise Lost(f"status {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if tally is not None:
                tally.longest_pause = max(tally.longest_pause, round(time.monotonic() - last, 3))
                last = time.monotonic()
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                if not finished:
                    raise Lost("[DONE] without a finish_reason")
                return text, finished
            piece = json.loads(line[6:])
            if "error" in piece:
                raise Lost(f"error in the stream: {piece['error']}")
            for choice in piece["choices"]:
                text += choice["text"]
                finished = choice["finish_reason"] or finished
    raise Lost(f"the stream ended without [DONE] after {len(text)} characters")


async def client(
    session: aiohttp.ClientSession, url: str, first: int, expected: list[tuple[str, str]], tally: Tally,
    over: asyncio.Event,
) -> None:  # fmt: skip
    number = first % REQUESTS
    while not over.is_set():
        try:
            got = await answer(session, url, number, tally)
        except (Lost, OSError, aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            tally.lost.append(f"request {number}: {type(error).__name__}: {error}")
            await asyncio.sleep(0.5)
        else:
            tally.answers += 1
            if got != expected[number]:
                tally.wrong.append(f"request {number}: {got!r} instead of {expected[number]!r}")
        number = (number + 5) % REQUESTS


async def main(url: str, clients: int) -> None:
    over, tally = asyncio.Event(), Tally()
    asyncio.get_running_loop().add_reader(0, lambda: over.set() if not os.read(0, 4096) else None)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=TIMEOUT)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        expected = [await answer(session, url, number) for number in range(REQUESTS)]
        print("ready", flush=True)
        began = time.monotonic()
        await asyncio.gather(*(client(session, url, n, expected, tally, over) for n in range(clients)))
        tally.seconds = round(time.monotonic() - began, 3)
    print(json.dumps(asdict(tally)), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
