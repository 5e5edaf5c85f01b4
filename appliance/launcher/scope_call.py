"""One conversation with systemd over D-Bus, in a process of its own: `python -P -m appliance.launcher.scope_call`.

pydbus has no way out of a call that hangs in connecting, and with GLib it is twice the size of the launcher. So the
launcher starts this for each need and kills it when it is late; besides, every call here has a timeout. Request: one
JSON object on stdin, `{"op": "start"|"stop"|"clean", "timeout": seconds, ...}`. Answer: one JSON object on stdout,
`{"ok": true, ...}` or `{"ok": false, "error": text}`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

_SYSTEMD = ".systemd1"  # pydbus: org.freedesktop.systemd1
_BUSY_NAME = "org.freedesktop.systemd1.UnitExists"
_GONE = ("org.freedesktop.systemd1.NoSuchUnit", "org.freedesktop.DBus.Error.UnknownObject")
_ATTEMPTS = 3
_POLL_SECONDS = 0.01


class Systemd:
    """The manager, with a deadline for all calls together."""

    def __init__(self, seconds: float) -> None:
        # Here, so that importing this module needs no GLib. Debian packages without type information.
        import pydbus  # type: ignore[import-not-found,unused-ignore]
        from gi.repository import Gio, GLib  # type: ignore[import-not-found,unused-ignore]

        self._glib, self._gio = GLib, Gio
        self._deadline = time.monotonic() + seconds
        self._bus = pydbus.SystemBus()
        self._manager = self._bus.get(_SYSTEMD, timeout=self._left())["org.freedesktop.systemd1.Manager"]

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("systemd took too long")
        return left

    def _call(self, method: str, *args: Any) -> Any:
        return getattr(self._manager, method)(*args, timeout=self._left())

    def _error_name(self, error: Exception) -> str:
        return str(self._gio.DBusError.get_remote_error(error) or "")

    def start(self, name: str, pid: int, properties: dict[str, list[Any]]) -> dict[str, Any]:
        """Puts `pid` into a new scope and waits until that is active; what systemd says of it then."""
        variants = [(key, self._glib.Variant(kind, _tuples(kind, value))) for key, (kind, value) in properties.items()]
        variants.append(("PIDs", self._glib.Variant("au", [pid])))
        for attempt in range(_ATTEMPTS):
            try:
                self._call("StartTransientUnit", name, "fail", variants, [])
                break
            except self._glib.Error as error:
                if self._error_name(error) != _BUSY_NAME or attempt == _ATTEMPTS - 1:
                    raise
                self.stop(name, kill=True)  # left over by a launcher that died or by a failed scope
        self._wait(name, lambda state: state == "active")
        path = self._call("GetUnit", name)
        return self._properties(path, "org.freedesktop.systemd1.Scope", ("ControlGroup", "DevicePolicy", "DeviceAllow"))

    def stop(self, name: str, *, kill: bool) -> None:
        """Until no process of it is left and its name is free. `kill`: SIGKILL at once."""
        try:
            if kill:
                self._ignoring_gone("KillUnit", name, "all", 9)
            self._call("StopUnit", name, "replace")
            self._wait(name, lambda state: state in ("inactive", "failed", None))
        except self._glib.Error as error:
            if self._error_name(error) not in _GONE:
                raise
        self._ignoring_gone("ResetFailedUnit", name)

    def clean(self, pattern: str, *, kill: bool) -> list[str]:
        """Stops every unit of that pattern, all at the same time; their names."""
        units = [unit[0] for unit in self._call("ListUnitsByPatterns", [], [pattern])]
        for name in units:
            if kill:
                self._ignoring_gone("KillUnit", name, "all", 9)
            self._ignoring_gone("StopUnit", name, "replace")
        for name in units:
            self.stop(name, kill=kill)
        return units

    def _ignoring_gone(self, method: str, *args: Any) -> None:
        try:
            self._call(method, *args)
        except self._glib.Error as error:
            if self._error_name(error) not in _GONE:
                raise

    def _wait(self, name: str, reached: Callable[[str | None], bool]) -> None:
        while True:
            state = self._state(name)
            if reached(state):
                return
            if state in ("failed", None):
                raise RuntimeError(f"{name} became {state or 'unknown'} while it was started")
            time.sleep(min(_POLL_SECONDS, self._left()))

    def _state(self, name: str) -> str | None:
        try:
            path = self._call("GetUnit", name)
            return str(self._properties(path, "org.freedesktop.systemd1.Unit", ("ActiveState",))["ActiveState"])
        except self._glib.Error as error:
            if self._error_name(error) not in _GONE:
                raise
            return None

    def _properties(self, path: str, interface: str, names: tuple[str, ...]) -> dict[str, Any]:
        """Asked one by one without introspection: pydbus' own properties have no timeout."""
        found = {}
        for name in names:
            reply = self._bus.con.call_sync(
                "org.freedesktop.systemd1", path, "org.freedesktop.DBus.Properties", "Get",
                self._glib.Variant("(ss)", (interface, name)), self._glib.VariantType.new("(v)"), 0,
                int(self._left() * 1000), None,
            )  # fmt: skip
            found[name] = reply.unpack()[0]
        return found


def _tuples(kind: str, value: Any) -> Any:
    """JSON has no tuples; GLib wants them for structs."""
    return [tuple(item) for item in value] if kind.startswith("a(") else value


def answer(request: dict[str, Any]) -> dict[str, Any]:
    systemd = Systemd(float(request["timeout"]))
    if request["op"] == "start":
        return {"ok": True, "unit": systemd.start(request["name"], request["pid"], request["properties"])}
    if request["op"] == "stop":
        systemd.stop(request["name"], kill=request["kill"])
        return {"ok": True}
    if request["op"] == "clean":
        return {"ok": True, "stopped": systemd.clean(request["pattern"], kill=request["kill"])}
    raise ValueError(f"unknown op {request['op']!r}")


def main() -> int:
    try:
        reply = answer(json.load(sys.stdin))
    except Exception as error:  # whatever it is, the launcher has to read it; it decides
        reply = {"ok": False, "error": f"{type(error).__name__}: {error}"}
    print(json.dumps(reply), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
