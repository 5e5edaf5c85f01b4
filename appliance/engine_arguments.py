"""Which options of `python -m engine` may be written as further arguments, in appliance.toml."""

from __future__ import annotations

_OWN_KEY = {
    "--gpu-memory-fraction": "gpu_memory_fraction",
    "--max-model-len": "max_model_len",
    "--max-batch-seqs": "max_batch_seqs",
    "--max-queued-requests": "max_queued_requests",
    "--request-timeout": "request_timeout",
    "--drain-timeout": "drain_timeout",
}
_LAUNCHER_SETS = (
    "--model-dir", "--model-name", "--backend", "--device", "--host", "--port", "--uds",
    "--auth", "--key-file", "--admin-key-file", "--tls-cert", "--tls-key",
)  # fmt: skip


def bad_engine_arguments(arguments: list[str]) -> str | None:
    """An option that has a key of its own would be a second place for one value; some only the launcher may set."""
    for argument in arguments:
        if "\0" in argument:
            return f"{argument!r} holds a NUL byte"
        option = argument.partition("=")[0]
        if not option.startswith("--") or option == "--":
            continue
        for known, key in _OWN_KEY.items():
            if known.startswith(option):  # argparse takes abbreviations
                return f"{option} has a key of its own: engine.{key}"
        if any(known.startswith(option) for known in _LAUNCHER_SETS):
            return f"{option} is set by the launcher"
    return None
