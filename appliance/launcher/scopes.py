"""Starting and stopping scopes without ever waiting for D-Bus: each need is one short-lived child with a deadline."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, Protocol

from appliance.launcher.loop import READ, WRITE, Loop
from appliance.launcher.scope import ScopePlan, scope_groups, scope_name, scope_pattern
from engine.spawn import python_env

CALL_SECONDS = 20.0
_LOOKS, _LOOK_SECONDS = 6, 0.05
_KILL_GRACE = 2.0  # the child keeps its own deadline; this is for one that hangs where it cannot
_MAX_ANSWER = 1 << 20

Done = Callable[[dict[str, Any]], None]
"""Gets {"ok": true, ...} or {"ok": false, "error": text}."""


class Scopes(Protocol):
    """What the launcher asks of systemd. Every call returns at once; `done` comes later, exactly once."""

    def start(self, plan: ScopePlan, pid: int, done: Done) -> None: ...
    def stop(self, gpu: int, release: str, done: Done) -> None: ...
    def clean(self, gpu: int, *, kill: bool, seconds: float, done: Done) -> None: ...


class SystemdScopes:
    """The host's systemd, through launcher/scope_call.py."""

    def __init__(self, loop: Loop, seconds: float = CALL_SECONDS) -> None:
        self._loop, self._seconds = loop, seconds

    def start(self, plan: ScopePlan, pid: int, done: Done) -> None:
        """Puts our child `pid` into the scope of `plan`; a left-over scope of that name is removed first."""
        request = {"op": "start", "name": plan.name, "pid": pid, "properties": plan.properties()}
        self._call(request, self._seconds, done)

    def stop(self, gpu: int, release: str, done: Done) -> None:
        """SIGKILL to whatever is left in it; no process of it is there afterwards. systemd removes the cgroup of a
        scope as soon as it is empty, so mostly there is nothing to do."""
        name = scope_name(gpu, release)

        def look(again: int) -> None:
            groups = scope_groups(gpu)
            if groups is not None and name not in groups:
                done({"ok": True})
            elif again:
                self._loop.later(_LOOK_SECONDS, lambda: look(again - 1))
            else:
                self._call({"op": "stop", "name": name, "kill": True}, self._seconds, done)

        look(_LOOKS)

    def clean(self, gpu: int, *, kill: bool, seconds: float, done: Done) -> None:
        """All scopes of the slot, by name; `kill=False`: they get SIGTERM and their stop timeout to drain. Where none
        has a cgroup there is nothing to stop."""
        if scope_groups(gpu) == []:
            self._loop.later(0, lambda: done({"ok": True, "stopped": []}))
            return
        self._call({"op": "clean", "pattern": scope_pattern(gpu), "kill": kill}, seconds, done)

    def _call(self, request: dict[str, Any], seconds: float, done: Done) -> None:
        try:
            Call(self._loop, request, seconds, done)
        except OSError as error:  # no process or no descriptor to be had
            answer = {"ok": False, "error": f"cannot call systemd: {error.strerror}"}
            self._loop.later(0, lambda: done(answer))


class Call:
    """One run of a child that does what may block: a JSON object to its stdin, one back from its stdout."""

    argv: tuple[str, ...] = (sys.executable, "-P", "-m", "appliance.launcher.scope_call")
    whom = "systemd"

    def __init__(self, loop: Loop, request: dict[str, Any], seconds: float, done: Done) -> None:
        self._loop, self._done, self._seconds = loop, done, seconds
        self._out = json.dumps(request | {"timeout": seconds}).encode()
        self._in = bytearray()
        self._late = False
        child_in, self._stdin = os.pipe()
        self._stdout, child_out = os.pipe()
        for fd in (self._stdin, self._stdout):
            os.set_blocking(fd, False)
        try:
            self._pid = os.posix_spawn(
                self.argv[0],
                self.argv,
                python_env(),
                file_actions=[(os.POSIX_SPAWN_DUP2, child_in, 0), (os.POSIX_SPAWN_DUP2, child_out, 1)],
            )
        except OSError:
            os.close(self._stdin)
            os.close(self._stdout)
            raise
        finally:
            os.close(child_in)
            os.close(child_out)
        self._timer = loop.later(seconds + _KILL_GRACE, self._expired)
        loop.watch(self._stdin, WRITE, self._write)
        loop.watch(self._stdout, READ, self._read)
        loop.watch_child(self._pid, self._ended)

    def _write(self) -> None:
        try:
            self._out = self._out[os.write(self._stdin, self._out) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._out = b""
        if not self._out:
            self._close_stdin()

    def _close_stdin(self) -> None:
        if self._stdin >= 0:
            self._loop.unwatch(self._stdin)
            os.close(self._stdin)
            self._stdin = -1

    def _read(self) -> None:
        try:
            chunk = os.read(self._stdout, 1 << 16)
        except BlockingIOError:
            return
        self._in += chunk
        if not chunk or len(self._in) > _MAX_ANSWER:
            self._loop.unwatch(self._stdout)

    def _expired(self) -> None:
        self._late = True
        os.kill(self._pid, signal.SIGKILL)  # not reaped yet, so it is still our child

    def _ended(self, returncode: int) -> None:
        self._timer.cancel()
        self._close_stdin()
        self._drain()
        os.close(self._stdout)
        self._done(self._answer(returncode))

    def _drain(self) -> None:
        self._loop.unwatch(self._stdout)
        while len(self._in) <= _MAX_ANSWER:
            try:
                chunk = os.read(self._stdout, 1 << 16)
            except BlockingIOError:
                return
            if not chunk:
                return
            self._in += chunk

    def _answer(self, returncode: int) -> dict[str, Any]:
        if self._late:
            return {"ok": False, "error": f"{self.whom} did not answer within {self._seconds:g} s"}
        try:
            answer = json.loads(self._in)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            return {"ok": False, "error": f"the call to {self.whom} ended with {returncode}; see the journal"}
        return answer
