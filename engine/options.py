"""The command line of `python -m engine`. Imports next to nothing: `appliance serve` and `appliance config check` ask
here whether an engine would take its options, before anything is started."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from engine import __version__
from engine.api.config import Timeouts

N = TypeVar("N", int, float)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    count, seconds = _number(int, 1, 2**40), _number(float, 1e-3, 1e6)
    parser = argparse.ArgumentParser(prog="python -m engine", description="Serve one model over HTTP.")
    parser.add_argument("--version", action="version", version=__version__, help="of the engine")
    parser.add_argument("--model-dir", required=True, type=Path, help="config.json, safetensors, tokenizer.json ...")
    parser.add_argument("--model-name", help="what clients call it (default: the directory's name)")
    parser.add_argument("--backend", default="cpu", choices=["cpu", "cuda"], help="never chosen silently")

    where = parser.add_argument_group("where it listens")
    where.add_argument("--host", help="default 127.0.0.1, unless --uds is given")
    where.add_argument("--port", type=_number(int, 0, 65535), default=8000, help="0 = any free one, see the log")
    where.add_argument("--uds", type=Path, help="Unix socket; it may also use /admin")

    access = parser.add_argument_group("who may use it")
    access.add_argument("--auth", default="auto", choices=["auto", "keys", "none"])
    access.add_argument("--key-file", type=Path, help="lines: SHA-256 hex of a key, then a label; reloaded on SIGHUP")
    access.add_argument("--admin-key-file", type=Path, help="keys for /admin over TCP")
    access.add_argument("--tls-cert", type=Path)
    access.add_argument("--tls-key", type=Path)

    size = parser.add_argument_group("how much it takes")
    size.add_argument("--max-model-len", type=count, help="tokens of prompt + output (default: the model's)")
    size.add_argument("--kv-tokens", type=count, help="size of the KV pool (default: from free memory)")
    size.add_argument("--max-batch-tokens", type=count, help="of one step (default: cpu 256, cuda 8192)")
    size.add_argument("--max-batch-seqs", type=count, default=64, help="sequences that run at once (cuda: up to 256)")
    size.add_argument("--prefill-chunk", type=count, help="prefill tokens beside decodes (default: cpu 128, cuda 512)")
    size.add_argument("--plans-in-flight", type=int, choices=[1, 2], help="steps queued ahead (default: cpu 1, cuda 2)")
    size.add_argument("--no-prefix-cache", action="store_true")
    size.add_argument("--max-queued-requests", type=count, default=256, help="more are answered 429")
    size.add_argument("--max-queued-prompt-tokens", type=count, default=262_144, help="more are answered 429")

    cpu = parser.add_argument_group("--backend cpu")
    fraction = _number(float, 1e-6, 0.95)
    cpu.add_argument("--memory-fraction", type=fraction, help="of free memory, for the KV pool (default 0.4)")
    cpu.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="of the weights")
    cpu.add_argument("--threads", type=count, help="default: all CPUs this process may use")

    cuda = parser.add_argument_group("--backend cuda")
    cuda.add_argument("--device", help="index among the visible GPUs, or a UUID as GPU-5fd4f087 (default 0)")
    cuda.add_argument("--gpu-memory-fraction", type=fraction, help="of the GPU's memory, for all we take (default 0.9)")
    cuda.add_argument("--no-cuda-graphs", action="store_true", help="launch kernel by kernel: slower, the same bits")
    cuda.add_argument("--profile-kernels", action="store_true", help="every kernel's start time into the step ring")
    cuda.add_argument("--step-ring", type=Path, help="file of step times, best in /dev/shm (default: none on disk)")

    times = parser.add_argument_group("how long (seconds)")
    times.add_argument("--request-timeout", type=seconds, default=Timeouts().request)
    times.add_argument("--drain-timeout", type=seconds, default=Timeouts().drain, help="after SIGTERM")

    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    drill = "POST /admin/flip may damage the weights; never where clients are served"
    parser.add_argument("--allow-fault-injection", action="store_true", help=drill)
    parser.add_argument("--log-prompts", action="store_true", help="write prompts and answers to the log")
    return parser.parse_args(argv)


def _number(kind: type[N], low: float, high: float) -> Callable[[str], N]:
    """An argparse type: a number of `kind` from low to high, refused in words."""

    def parse(text: str) -> N:
        try:
            value = kind(text)
        except ValueError:
            value = kind(low) - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low:g} to {high:g}")
        return value

    return parse
