"""Questions to an engine over its Unix socket (/run/appliance/gpuN/engines/RELEASE.sock), for tools of the host.

Blocking, one connection a question, everything bounded: size and time. Not for the launcher, whose loop must
not wait.
"""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.log import ApplianceError, ExitCode
from appliance.unix_http import UnixConnection

MAX_ANSWER_BYTES = 16 << 20
CONTROL_SECONDS = 130.0  # a little over what the engine itself gives /admin/golden and /admin/checksum
FORCED_SECONDS = 600.0


class EngineUnavailable(ApplianceError):
    """No answer, or not the kind that was asked for: nothing is known about the engine's arithmetic."""

    exit_code = ExitCode.INCONCLUSIVE


@dataclass(frozen=True, slots=True)
class EngineCalls:
    """All methods raise EngineUnavailable."""

    socket: Path

    def state(self) -> dict[str, Any]:
        """GET /admin/state."""
        return self._ask("GET", "/admin/state", None, 10.0)

    def device(self) -> str:
        """What golden answers are kept by: "cpu", or the GPU's model name."""
        state = self.state()
        if _text(state, "engine", "backend") == "cpu":
            return "cpu"
        name = _text(state, "device", "name")
        if not name:
            raise EngineUnavailable(f"{self.socket}: the engine does not say which device it runs on")
        return name

    def context(self) -> int | None:
        """The longest sequence it takes; None: it does not say."""
        table = self.state().get("engine")
        length = table.get("max_model_len") if isinstance(table, dict) else None
        return length if type(length) is int and length > 0 else None

    def golden(self, prompt_ids: list[int]) -> dict[str, Any]:
        """{"sha256", "positions", "finite"} of the float32 logits of every position of the prompt."""
        return self._control("golden", {"prompt_ids": prompt_ids}, {"sha256": str, "positions": int, "finite": bool})

    def checksum(self) -> dict[str, Any]:
        """{"expected", "actual", "ok"}: the weight arena hashed again, and its hash when it was loaded."""
        return self._control("checksum", {}, {"expected": str, "actual": str, "ok": bool})

    def complete(self, model: str, prompt: str | list[int], tokens: int, seconds: float) -> str:
        """The text of `tokens` new tokens at temperature 0, as a client would get it."""
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "timeout": seconds}
        answer = self._ask("POST", "/v1/completions", body, seconds + 10)
        try:
            choice = answer["choices"][0]
            text, finished = choice["text"], choice["finish_reason"]
        except (KeyError, IndexError, TypeError):
            text = finished = None
        if not isinstance(text, str) or finished not in ("stop", "length"):
            raise EngineUnavailable(f"{self.socket}: no completion in the answer: {str(answer)[:200]}")
        return text

    def forced_logprobs(self, model: str, ids: list[int], last: int) -> list[tuple[float, float]]:
        """For each of the `last` positions of the prompt `ids`: (log probability of that very token, of the best one),
        given all before it."""
        body = {
            "model": model, "prompt": ids, "echo": True, "max_tokens": 0, "logprobs": 1, "temperature": 0,
            "add_special_tokens": False, "timeout": FORCED_SECONDS,
        }  # fmt: skip
        answer = self._ask("POST", "/v1/completions", body, FORCED_SECONDS + 10)
        try:
            logprobs = answer["choices"][0]["logprobs"]
            own = [float(value) for value in logprobs["token_logprobs"][-last:]]
            best = [max(map(float, top.values())) for top in logprobs["top_logprobs"][-last:]]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise EngineUnavailable(f"{self.socket}: no logprobs in the answer: {error!r}") from None
        if len(own) != last or len(best) != last or len(logprobs["token_logprobs"]) != len(ids):
            raise EngineUnavailable(f"{self.socket}: logprobs of {len(own)} positions, asked for {last} of {len(ids)}")
        return list(zip(own, best))

    def _control(self, op: str, args: dict[str, Any], kinds: dict[str, type]) -> dict[str, Any]:
        result = self._ask("POST", f"/admin/{op}", {"args": args}, CONTROL_SECONDS).get("result")
        if not isinstance(result, dict) or any(type(result.get(name)) is not kind for name, kind in kinds.items()):
            raise EngineUnavailable(f"{self.socket}: /admin/{op} answered {str(result)[:200]}")
        return result

    def _ask(self, method: str, path: str, body: dict[str, Any] | None, seconds: float) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        connection = UnixConnection(self.socket, seconds)
        try:
            connection.request(method, path, data, {"Content-Type": "application/json"} if data else {})
            response = connection.getresponse()
            raw = response.read(MAX_ANSWER_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise EngineUnavailable(
                f"{self.socket}: {path}: no answer: {reason}", hint="see `appliance logs`"
            ) from None
        finally:
            connection.close()
        try:
            answer = json.loads(raw)
        except (ValueError, RecursionError):
            answer = None
        if response.status != 200:
            raise EngineUnavailable(
                f"{self.socket}: {path}: status {response.status}: {_text(answer, 'error', 'message')}"
            )
        if not isinstance(answer, dict) or len(raw) > MAX_ANSWER_BYTES:
            raise EngineUnavailable(f"{self.socket}: {path}: the answer is no JSON object")
        return answer


def _text(value: Any, *keys: str) -> str:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else ""
