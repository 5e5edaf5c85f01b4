"""Asking the controller (commands.py), for the CLI."""

from __future__ import annotations

import json
import time
from typing import Any

from appliance.control import ControlClient
from appliance.log import ApplianceError, ExitCode
from appliance.paths import Paths

UNIT = "appliance-canary.service"


class ControllerError(ApplianceError):
    """The controller refused or failed; `reply` is what it said."""

    def __init__(self, message: str, *, hint: str | None, code: ExitCode, reply: dict[str, Any]) -> None:
        super().__init__(message, hint=hint)
        self.exit_code, self.reply = code, reply


class NoController(ApplianceError):
    """Nobody listens, or nobody answers."""


class Client(ControlClient):
    """The exchange is that of the launchers' control sockets."""

    def __init__(self, paths: Paths) -> None:
        self._path = paths.canary_control

    def call(self, op: str, *, timeout: float = 30.0, **args: Any) -> dict[str, Any]:
        """NoController, or ControllerError with the exit code that the command should end with."""
        request = json.dumps({"op": op} | args).encode() + b"\n"
        try:
            reply = json.loads(self._exchange(request, time.monotonic() + timeout))
        except PermissionError:
            raise ControllerError(
                "no permission to ask the canary controller", hint="run as root", code=ExitCode.REFUSED, reply={}
            ) from None
        except (FileNotFoundError, ConnectionRefusedError):
            raise NoController("the canary controller is not running", hint=f"systemctl start {UNIT}") from None
        except TimeoutError:
            raise NoController(
                f"the canary controller did not answer {op} within {timeout:g} s", hint=f"systemctl status {UNIT}"
            ) from None
        except (OSError, ValueError):
            raise NoController(
                f"the canary controller ended in the middle of {op}", hint=f"journalctl -u {UNIT}"
            ) from None
        if not isinstance(reply, dict) or reply.get("ok") is not True:
            reply = reply if isinstance(reply, dict) else {}
            code = reply.get("exit_code")
            raise ControllerError(
                str(reply.get("error")), hint=reply.get("hint"),
                code=ExitCode(code) if code in list(ExitCode) else ExitCode.FAILED, reply=reply,
            )  # fmt: skip
        return reply
