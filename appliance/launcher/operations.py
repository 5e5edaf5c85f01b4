"""What may be asked of a launcher over its control socket: each op checks its arguments, acts, says when it is done.

run stop replace sync restart hold unhold share status; errors carry a hint and the exit code that the asking command
should end with.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from appliance.launcher.control_server import Client, failure
from appliance.launcher.holds import LEVELS, Level
from appliance.launcher.lifecycle import State
from appliance.launcher.spec import read_release
from appliance.log import ApplianceError, ExitCode
from appliance.paths import RELEASE_NAME

if TYPE_CHECKING:
    from appliance.launcher.launcher import Launcher

_OWNER = re.compile(r"[a-z][a-z0-9-]{0,31}")
_MAX_REASON = 500
_MAX_TIMEOUT = 86_400.0
_SETTLE = 0.5  # seconds after "not admitted" is published before "nothing in flight" counts

Outcome = Callable[[], dict[str, Any] | None]
"""The reply once it is reached or has failed, None until then."""


class RequestError(ApplianceError):
    """The request makes no sense."""

    exit_code = ExitCode.USAGE


class Refused(ApplianceError):
    exit_code = ExitCode.REFUSED


@dataclass(slots=True)
class Arguments:
    """Checked access to a request; `finish` refuses what nobody asked for."""

    request: dict[str, Any]

    def text(self, key: str, pattern: re.Pattern[str] | None = None, *, limit: int = 64) -> str:
        value = self.request.pop(key, None)
        if (
            not isinstance(value, str)
            or not 0 < len(value) <= limit
            or not value.isprintable()  # it goes into the journal
            or (pattern and not pattern.fullmatch(value))
        ):
            raise RequestError(f"{key}: {_shown(value)} is not usable", hint=f"a text like {_EXAMPLES.get(key, key)!r}")
        return value

    def choice(self, key: str, allowed: tuple[str, ...], default: str) -> str:
        value = self.request.pop(key, default)
        if value not in allowed:
            raise RequestError(f"{key}: {_shown(value)} is none of {', '.join(allowed)}")
        return str(value)

    def flag(self, key: str) -> bool:
        value = self.request.pop(key, False)
        if not isinstance(value, bool):
            raise RequestError(f"{key}: {_shown(value)} is neither true nor false")
        return value

    def seconds(self, key: str, default: float) -> float:
        value = self.request.pop(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _MAX_TIMEOUT:
            raise RequestError(f"{key}: {_shown(value)} is no number of seconds up to {_MAX_TIMEOUT:g}")
        return float(value)

    def fraction(self, key: str) -> float:
        value = self.request.pop(key, None)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise RequestError(f"{key}: {_shown(value)} is no number from 0 to 1")
        return float(value)

    def finish(self) -> None:
        if self.request:
            raise RequestError(f"unknown: {', '.join(map(repr, sorted(self.request)))}")


def _shown(value: Any) -> str:
    """Short, and never deeper than the stack: a request may be a thousand lists in each other."""
    return repr(value)[:80] if value is None or isinstance(value, (str, int, float)) else f"a {type(value).__name__}"


_EXAMPLES = {"release": "llama-8b.2", "owner": "operator", "reason": "XID 79"}


def handle(launcher: Launcher, request: dict[str, Any], client: Client) -> None:
    """Answers now, or when the outcome is there, the client's time is up, or it leaves."""
    op = request.pop("op")
    try:
        if op not in _OPS:
            raise RequestError(f"unknown op {op!r}", hint=f"known: {', '.join(_OPS)}")
        arguments = Arguments(request)
        timeout, wait = arguments.seconds("timeout", 600.0), arguments.flag("wait")
        outcome = _OPS[op](launcher, arguments)
    except ApplianceError as error:
        client.reply(failure(error.message, hint=error.hint, code=error.exit_code))
        return
    launcher.settle()  # the state file says so before the reply does
    reply = outcome()
    if reply is not None or not wait:
        client.reply(reply or {"ok": True})
        return
    launcher.wait_for(outcome, client, timeout)


def _status(launcher: Launcher, arguments: Arguments) -> Outcome:
    arguments.finish()
    return lambda: {"ok": True, "state": launcher.state()}


def _run(launcher: Launcher, arguments: Arguments) -> Outcome:
    release = _release(launcher, arguments)
    arguments.finish()
    _refuse_held(launcher)
    others = [engine.release for engine in launcher.engines.values() if engine.live and engine.release != release]
    if launcher.config.engine.placement == "exclusive" and others:
        raise Refused(
            f"{', '.join(others)} runs on GPU {launcher.gpu} and placement is exclusive", hint='ask for "replace"'
        )
    launcher.leases.add(release)
    launcher.want_again(release)
    return _when_ready(launcher, [release])


def _stop(launcher: Launcher, arguments: Arguments) -> Outcome:
    release = arguments.text("release", RELEASE_NAME)
    arguments.finish()
    launcher.leases.discard(release)
    if launcher.only == release:
        launcher.only = None
    launcher.reconcile()
    if release in launcher.desired():
        return lambda: {"ok": True, "stopped": False, "note": "it stays up: a slot names it"}

    def gone() -> dict[str, Any] | None:
        engine = launcher.engines.get(release)
        return {"ok": True, "stopped": True} if engine is None or engine.state is State.GONE else None

    return gone


def _replace(launcher: Launcher, arguments: Arguments) -> Outcome:
    release = _release(launcher, arguments)
    arguments.finish()
    _refuse_held(launcher)
    launcher.only = release
    launcher.leases.add(release)
    launcher.want_again(release)
    return _when_ready(launcher, [release])


def _sync(launcher: Launcher, arguments: Arguments) -> Outcome:
    arguments.finish()
    launcher.sync()
    return _when_settled(launcher)


def _restart(launcher: Launcher, arguments: Arguments) -> Outcome:
    release = None
    if arguments.request.get("release") is None:
        arguments.request.pop("release", None)
    else:
        release = arguments.text("release", RELEASE_NAME)
    if release is not None and release not in launcher.engines:
        raise RequestError(f"no engine of release {release!r} here", hint=f"there are: {', '.join(launcher.engines)}")
    arguments.finish()
    _refuse_held(launcher)
    chosen = launcher.desired() if release is None else [release]
    launcher.event("restart_asked", releases=chosen)
    for name in chosen:
        if name in launcher.engines:
            launcher.engines[name].restart()
    launcher.reconcile()
    return _when_ready(launcher, chosen)


def _hold(launcher: Launcher, arguments: Arguments) -> Outcome:
    owner = arguments.text("owner", _OWNER, limit=32)
    reason = arguments.text("reason", limit=_MAX_REASON)
    level = cast(Level, arguments.choice("level", LEVELS, "drain"))
    abort = arguments.choice("mode", ("graceful", "abort"), "graceful") == "abort"
    arguments.finish()
    if abort and level != "stop":
        raise RequestError("mode abort goes with level stop", hint="drain waits; stop with abort kills at once")
    was_stopped = launcher.holds.stopped
    try:
        launcher.holds.add(owner, level, reason)
    except OSError as error:
        raise ApplianceError(
            f"held, but only until the launcher ends: {launcher.paths.holds(launcher.gpu)}: {error.strerror}",
            hint="free some space; the launcher tries again every few seconds",
        ) from None
    finally:
        launcher.event("hold", owner=owner, level=level, reason=reason, saved=launcher.holds.saved)
        launcher.apply_holds(abort=abort, back=was_stopped and not launcher.holds.stopped)
    since = launcher.loop.time()

    def drained() -> dict[str, Any] | None:
        for engine in launcher.engines.values():
            if not engine.live:
                continue
            if launcher.holds.stopped or engine.in_flight != 0 or engine.health_at < since + _SETTLE:
                return None
        return {"ok": True}

    return drained


def _unhold(launcher: Launcher, arguments: Arguments) -> Outcome:
    owner = arguments.text("owner", _OWNER, limit=32)
    arguments.finish()
    if owner in launcher.holds:
        was_stopped = launcher.holds.stopped
        try:
            launcher.holds.remove(owner)
        except OSError as error:
            raise ApplianceError(
                f"still held: {launcher.paths.holds(launcher.gpu)}: {error.strerror}", hint="free some space"
            ) from None
        launcher.event("unhold", owner=owner)
        launcher.apply_holds(back=was_stopped and not launcher.holds.stopped)
    if launcher.holds:
        text = launcher.holds.text()
        return lambda: {"ok": True, "note": f"still held by {text}"}
    return _when_ready(launcher, launcher.desired())


def _share(launcher: Launcher, arguments: Arguments) -> Outcome:
    """How much of its usual load this GPU gets (the gateways divide by it); 1: all of it."""
    owner, share = arguments.text("owner", _OWNER, limit=32), arguments.fraction("share")
    arguments.finish()
    try:
        changed = launcher.holds.set_share(owner, share)
    except OSError as error:
        launcher.event("share", owner=owner, share=share, saved=False)
        raise ApplianceError(
            f"in force, but only until the launcher ends: {launcher.paths.holds(launcher.gpu)}: {error.strerror}",
            hint="free some space; the launcher tries again every few seconds",
        ) from None
    if changed:
        launcher.event("share", owner=owner, share=share)
    return lambda: {"ok": True, "share": launcher.holds.share}


def _release(launcher: Launcher, arguments: Arguments) -> str:
    release = arguments.text("release", RELEASE_NAME)
    read_release(launcher.paths, release)
    return release


def _refuse_held(launcher: Launcher) -> None:
    if launcher.holds.stopped:
        raise Refused(
            f"GPU {launcher.gpu} is held by {launcher.holds.text()}", hint=f"appliance undrain {launcher.gpu}"
        )


def _when_ready(launcher: Launcher, releases: list[str]) -> Outcome:
    """Reached: all of them ready. Failed: one of them gave up, or is not wanted any more."""

    def ready() -> dict[str, Any] | None:
        desired = launcher.desired()
        for name in releases:
            engine = launcher.engines.get(name)
            if name not in desired:
                why = f"held by {launcher.holds.text()}" if launcher.holds.stopped else "somebody stopped it"
                return failure(f"{name} will not become ready: {why}", code=ExitCode.REFUSED)
            if engine is not None and engine.state is State.FAILED:
                scope = engine.spec.scope.name if engine.spec else "appliance-*"
                return failure(f"{name} failed: {engine.last_exit}", hint=f"journalctl -u {scope}")
        everything = all(name in launcher.engines and launcher.engines[name].serving for name in releases)
        return {"ok": True} if everything else None

    return ready


def _when_settled(launcher: Launcher) -> Outcome:
    """Reached: what is wanted is ready and nothing else is there."""

    def settled() -> dict[str, Any] | None:
        desired = launcher.desired()
        reply = _when_ready(launcher, desired)()
        if reply is None or not reply["ok"]:
            return reply
        return reply if all(name in desired for name in launcher.engines) else None

    return settled


_OPS: dict[str, Callable[[Launcher, Arguments], Outcome]] = {
    "status": _status,
    "run": _run,
    "stop": _stop,
    "replace": _replace,
    "sync": _sync,
    "restart": _restart,
    "hold": _hold,
    "unhold": _unhold,
    "share": _share,
}
