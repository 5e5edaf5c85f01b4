"""Every error the engine raises on purpose. Each says what is wrong and, where there is one, what to do next."""

from __future__ import annotations

from typing import Any


class EngineError(Exception):
    """Base class; `hint` is the next step for the operator, shown on its own line by the CLIs."""

    exit_code = 1  # of a process that ends with it (the design's table): 1 failed, 4 refused, 5 busy

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(EngineError):
    """A model's config.json (or ours) asks for something unsupported or inconsistent; names the key."""

    exit_code = 4


class BusyError(EngineError):
    """Somebody else holds what we need (a port, a socket)."""

    exit_code = 5


class CheckpointError(EngineError):
    """A checkpoint is damaged, hostile or does not fit the model; names file and tensor."""

    exit_code = 4


class TokenizerError(EngineError):
    """tokenizer.json is damaged or uses a feature that is refused by name."""

    exit_code = 4


class TextError(EngineError):
    """Text that cannot be encoded; for invalid UTF-8 `position` is the byte offset of the first bad byte."""

    def __init__(self, message: str, *, position: int | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.position = position


class TemplateError(EngineError):
    """The chat template is missing, does not compile, or rejected these messages."""


class AdmissionError(EngineError):
    """A request that can never be served (too long for the context or for the KV pool)."""


class QueueFull(EngineError):
    """Too many requests or prompt tokens are waiting; the client should retry after `retry_after_seconds`."""

    def __init__(self, message: str, *, retry_after_seconds: int = 1) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class NumericError(EngineError):
    """NaN or Inf where numbers are expected; carries where it happened."""

    def __init__(self, message: str, *, layer: int | None = None, op: str = "", position: int | None = None) -> None:
        super().__init__(message)
        self.layer, self.op, self.position = layer, op, position


class DeviceLost(EngineError):
    """The device cannot be used any more in this process (a sticky CUDA error): every request in flight fails, the
    process ends. `where`: what is known of the place ({"op", "error" ...}, sent to the clients)."""

    def __init__(self, message: str, *, where: dict[str, Any] | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.where = where or {"op": "device"}


class EngineDead(EngineError):
    """engine-core is gone; every request in flight fails with this."""
