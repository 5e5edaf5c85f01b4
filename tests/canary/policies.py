"""Policies of canary runs as canary.toml has them."""

from __future__ import annotations

import json
from typing import Any


def toml(policy: dict[str, Any]) -> str:
    limits = policy["limits"]
    lines = [f"{key} = {json.dumps(value)}" for key, value in policy.items() if key != "limits"]
    tables = ["[[policy.limits]]\n" + "\n".join(f"{k} = {json.dumps(v)}" for k, v in limit.items()) for limit in limits]
    return "\n".join(["[policy]", *lines, *tables]) + "\n"
