"""/etc/appliance/canary.toml (optional): what runs are like where the command line says nothing, and the hooks.

[policy]                 # canary/types.py:Policy; each key may be left out
steps = [5, 10, 25, 50, 100]
step_seconds = 300
[[policy.limits]]
metric = "itl"
seconds = 0.080
[[hooks]]                # canary/hooks.py
when = "promote"
exec = ["/usr/local/bin/ask-oncall"]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from appliance.log import ApplianceError, ExitCode, UsageError
from appliance.statefile import StateError, read_bounded
from appliance.tomlfile import NotToml, parse_toml
from canary.hooks import check_hook
from canary.run import Hook
from canary.types import Policy

_MAX_BYTES = 256 << 10


class SettingsError(ApplianceError):
    """canary.toml cannot be used; names the key."""

    exit_code = ExitCode.REFUSED


class Settings(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    policy: Policy = Policy()
    hooks: list[Hook] = []


def load_settings(path: Path) -> Settings:
    """The defaults where there is no such file."""
    try:
        table = parse_toml(read_bounded(path, _MAX_BYTES), str(path))
    except FileNotFoundError:
        return Settings()
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from None
    except StateError as error:
        raise SettingsError(error.message, hint="a file of TOML, or none: the defaults") from None
    except NotToml as error:
        raise SettingsError(error.message, hint=error.hint) from None
    try:
        settings = msgspec.convert(table, Settings)
    except msgspec.ValidationError as error:
        raise SettingsError(
            f"{path}: {error}", hint="the keys are those of canary/types.py:Policy and of hooks"
        ) from None
    for hook in settings.hooks:
        try:
            check_hook(hook)
        except UsageError as error:
            raise SettingsError(f"{path}: {error.message}", hint=error.hint) from None
    return settings


def without(policy: Policy, metric: str) -> Policy:
    """`policy` without its limits of `metric`."""
    return msgspec.structs.replace(policy, limits=[limit for limit in policy.limits if limit.metric != metric])


def merge(policy: Policy, changes: dict[str, Any]) -> Policy:
    """`policy` with the keys in `changes`, checked. UsageError names the key."""
    try:
        return msgspec.convert(msgspec.to_builtins(policy) | changes, Policy)
    except msgspec.ValidationError as error:
        raise UsageError(f"policy: {error}", hint="the keys are those of `canary start --help`") from None
