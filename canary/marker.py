"""The file that tells the gateways of a run: they close keep-alive connections sooner while it is there
(appliance/gateway/canary_run.py reads it)."""

from __future__ import annotations

from typing import Literal

from appliance.paths import Paths
from appliance.statefile import remove_state, write_state

SCHEMA = 1


def write_marker(paths: Paths, run: str, *, draining: Literal["stable", "canary"] | None = None) -> None:
    """`draining`: the slot whose connections shall end as soon as they can, each with its next answer. Gateways see it
    within 0.1 s. Under /run: a reboot ends it."""
    write_state(paths.canary_marker, {"run": run, "draining_slot": draining}, schema=SCHEMA, durable=False)


def clear_marker(paths: Paths) -> None:
    """No run; also where there was none."""
    remove_state(paths.canary_marker)
