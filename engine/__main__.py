"""`python -m engine`: engine-api in this process, engine-core as its child, one model, until SIGTERM or a death.

Phases in call order: options -> checks that need no model -> tokenizer -> start engine-core -> serve (503 on /readyz
until the model is loaded) -> drain -> stop engine-core -> exit status (0 stopped as asked, 1 the engine died or could
not start, 2 usage).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path
from typing import Any

import uvloop

from engine.api.config import ApiConfig, Timeouts, check_bind
from engine.api.server import run_server
from engine.client import EngineClient
from engine.config import ModelConfig
from engine.core_config import CoreConfig
from engine.errors import ConfigError, EngineError
from engine.log import log_event, setup_logging
from engine.tokenizer import Tokenizer

log = logging.getLogger("appliance.main")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m engine", description="Serve one model over HTTP.")
    parser.add_argument("--model-dir", required=True, type=Path, help="config.json, safetensors, tokenizer.json ...")
    parser.add_argument("--model-name", help="what clients call it (default: the directory's name)")
    parser.add_argument("--backend", default="cpu", choices=["cpu", "cuda"], help="never chosen silently")

    where = parser.add_argument_group("where it listens")
    where.add_argument("--host", help="default 127.0.0.1, unless --uds is given")
    where.add_argument("--port", type=_port, default=8000, help="0 = any free one, see the log")
    where.add_argument("--uds", type=Path, help="Unix socket; it may also use /admin")

    access = parser.add_argument_group("who may use it")
    access.add_argument("--auth", default="auto", choices=["auto", "keys", "none"])
    access.add_argument("--key-file", type=Path, help="lines: SHA-256 hex of a key, then a label; reloaded on SIGHUP")
    access.add_argument("--admin-key-file", type=Path, help="keys for /admin over TCP")
    access.add_argument("--tls-cert", type=Path)
    access.add_argument("--tls-key", type=Path)

    size = parser.add_argument_group("how much it takes")
    size.add_argument("--max-model-len", type=_positive, help="tokens of prompt + output (default: the model's)")
    size.add_argument("--kv-tokens", type=_positive, help="size of the KV pool (default: from free memory)")
    size.add_argument("--memory-fraction", type=_fraction, default=0.4, help="of free memory for KV (default 0.4)")
    size.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="of the weights")
    size.add_argument("--threads", type=_positive, help="CPU backend (default: all CPUs this process may use)")
    size.add_argument("--max-batch-tokens", type=_positive, default=256)
    size.add_argument("--max-batch-seqs", type=_positive, default=64)
    size.add_argument("--prefill-chunk", type=_positive, default=128)
    size.add_argument("--no-prefix-cache", action="store_true")
    size.add_argument("--max-queued-requests", type=_positive, default=256, help="more are answered 429")
    size.add_argument("--max-queued-prompt-tokens", type=_positive, default=262_144, help="more are answered 429")

    times = parser.add_argument_group("how long (seconds)")
    times.add_argument("--request-timeout", type=_seconds, default=Timeouts().request)
    times.add_argument("--drain-timeout", type=_seconds, default=Timeouts().drain, help="after SIGTERM")

    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    parser.add_argument("--log-prompts", action="store_true", help="write prompts and answers to the log")
    return parser.parse_args(argv)


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError("a port is 0 to 65535")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 < value <= 0.95:
        raise argparse.ArgumentTypeError("must be above 0 and at most 0.95")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def core_config(args: argparse.Namespace) -> CoreConfig:
    return CoreConfig(
        model_dir=str(args.model_dir),
        backend=args.backend,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        kv_tokens=args.kv_tokens,
        memory_fraction=args.memory_fraction,
        max_batch_tokens=args.max_batch_tokens,
        max_batch_seqs=args.max_batch_seqs,
        prefill_chunk=args.prefill_chunk,
        num_threads=args.threads,
        prefix_cache=not args.no_prefix_cache,
    )


def api_config(args: argparse.Namespace, model: ModelConfig, tokenizer: Tokenizer) -> ApiConfig:
    eos = dict.fromkeys(model.eos_token_ids)
    if tokenizer.eos_token_id is not None:
        eos[tokenizer.eos_token_id] = None
    return ApiConfig(
        model=args.model_name or args.model_dir.resolve().name,
        max_model_len=min(args.max_model_len or model.max_position, model.max_position),
        eos_token_ids=tuple(eos),
        auth=args.auth,
        key_file=args.key_file,
        admin_key_file=args.admin_key_file,
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
        log_prompts=args.log_prompts,
        timeouts=Timeouts(
            request=args.request_timeout,
            max_request=max(Timeouts().max_request, args.request_timeout),
            drain=args.drain_timeout,
        ),
    )


async def serve(args: argparse.Namespace) -> int:
    host = args.host or (None if args.uds else "127.0.0.1")
    model = ModelConfig.from_dir(args.model_dir)
    tokenizer = Tokenizer.from_dir(args.model_dir)
    config = api_config(args, model, tokenizer)
    if host is not None:
        check_bind(config, host)  # before the load, not after it
    client = EngineClient(
        core_config(args),
        max_queued_requests=args.max_queued_requests,
        max_queued_prompt_tokens=args.max_queued_prompt_tokens,
    )
    client.start()
    watching = asyncio.create_task(_announce(client))
    try:
        status = await run_server(client, tokenizer, config, host=host, port=args.port, unix_path=args.uds)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{args.port}: {error.strerror}", hint="choose another --port"
        ) from None
    finally:
        watching.cancel()
        await client.stop()
    if status and client.fatal is not None:
        raise EngineError(client.fatal.error, hint=client.fatal.hint)
    return status


async def _announce(client: EngineClient) -> None:
    ready = await client.wait_ready()
    fields: dict[str, Any] = {name: getattr(ready, name) for name in ready.__struct_fields__}
    log_event(log, logging.INFO, "ready", "the model is loaded", **fields)


def main() -> int:
    args = parse_arguments()
    setup_logging(args.log_level, identifier="engine-api")
    try:
        return uvloop.run(serve(args))
    except EngineError as error:
        log_event(log, logging.CRITICAL, "cannot_serve", error.message, hint=error.hint)
        return 1


if __name__ == "__main__":
    sys.exit(main())
