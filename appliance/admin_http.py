"""GET of a JSON object from an admin Unix socket (gateways, engines), bounded in time and size."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

from appliance.log import ApplianceError
from appliance.unix_http import UnixConnection

MAX_BYTES = 4 << 20


class AdminError(ApplianceError):
    """The other side did not answer as it should; the message says what happened."""


class NotRunning(AdminError):
    """Nobody listens on the socket."""


def get_json(path: Path, target: str, *, timeout: float = 2.0, statuses: tuple[int, ...] = (200,)) -> dict[str, Any]:
    """The JSON object at `target` of the server on the Unix socket `path`. NotRunning, or AdminError."""
    connection = UnixConnection(path, timeout)
    try:
        connection.request("GET", target)
        response = connection.getresponse()
        data = response.read(MAX_BYTES + 1)
    except (FileNotFoundError, ConnectionRefusedError):
        raise NotRunning(f"nobody listens on {path}", hint="is its unit running? see `appliance status`") from None
    except PermissionError:
        raise AdminError(f"no permission to connect to {path}", hint="run as root") from None
    except TimeoutError:
        raise AdminError(f"{path} did not answer in {timeout:g} s", hint="see `appliance logs`") from None
    except (OSError, http.client.HTTPException) as error:
        raise AdminError(f"{path}: {error or type(error).__name__}", hint="see `appliance logs`") from None
    finally:
        connection.close()
    if response.status not in statuses:
        raise AdminError(f"{path}{target}: HTTP status {response.status}", hint="see `appliance logs`")
    try:
        value = json.loads(data, parse_constant=_no_constant) if len(data) <= MAX_BYTES else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise AdminError(f"{path}{target}: the answer is no JSON object", hint="are both sides of one version?")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
