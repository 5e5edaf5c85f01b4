"""How a job of the controller ended."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Result(NamedTuple):
    outcome: Literal["ok", "wait", "fail"]  # wait: not yet, or not known: asked again
    text: str = ""


def ok(text: str = "") -> Result:
    return Result("ok", text)


def wait(text: str) -> Result:
    return Result("wait", text)


def fail(text: str) -> Result:
    return Result("fail", text)
