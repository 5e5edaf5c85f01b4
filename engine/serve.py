"""`python -m engine`: engine-api in this process, engine-core as its child, one model, until SIGTERM or a death.

Phases in call order: options -> checks that need no model -> tokenizer -> start engine-core -> serve (503 on /readyz
until the model is loaded) -> drain -> stop engine-core -> exit status (0 stopped as asked, 1 the engine died, 2 usage,
4 refused: configuration, model or sizes, 5 the port is taken; after 4 a restart does not help).
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import gc
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from engine import __version__
from engine.api.config import ApiConfig, Timeouts, check_bind
from engine.api.server import run_server
from engine.client import EngineClient
from engine.config import ModelConfig
from engine.core_config import CoreConfig, context_length, scheduler_config, with_defaults
from engine.errors import BusyError, ConfigError, EngineError, TemplateError
from engine.log import log_event, setup_logging
from engine.tokenizer import Tokenizer

log = logging.getLogger("appliance.main")
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


def core_config(args: argparse.Namespace) -> CoreConfig:
    """ConfigError for options that do not go with the backend."""
    return with_defaults(
        CoreConfig(
            model_dir=str(args.model_dir),
            backend=args.backend,
            dtype=args.dtype,
            max_model_len=args.max_model_len,
            kv_tokens=args.kv_tokens,
            max_batch_tokens=args.max_batch_tokens,
            max_batch_seqs=args.max_batch_seqs,
            prefill_chunk=args.prefill_chunk,
            prefix_cache=not args.no_prefix_cache,
            plans_in_flight=args.plans_in_flight,
            memory_fraction=args.memory_fraction,
            num_threads=args.threads,
            gpu_memory_fraction=args.gpu_memory_fraction,
            device=args.device,
            cuda_graphs=False if args.no_cuda_graphs else None,
            profile_kernels=True if args.profile_kernels else None,
            step_ring=str(args.step_ring) if args.step_ring else None,
            allow_fault_injection=args.allow_fault_injection,
        )
    )


def api_config(args: argparse.Namespace, model: ModelConfig, tokenizer: Tokenizer) -> ApiConfig:
    eos = dict.fromkeys(model.eos_token_ids)
    if tokenizer.eos_token_id is not None:
        eos[tokenizer.eos_token_id] = None
    return ApiConfig(
        model=args.model_name or args.model_dir.resolve().name,
        max_model_len=context_length(core_config(args), model.max_position),
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
    core = core_config(args)
    if host is not None:  # before the load, not after it
        check_bind(config, host)
    scheduler_config(core, config.max_model_len)
    client = EngineClient(
        core,
        max_queued_requests=args.max_queued_requests,
        max_queued_prompt_tokens=args.max_queued_prompt_tokens,
    )
    check_vocabulary(model, tokenizer)
    _warn(config, core, tokenizer)
    watching: list[asyncio.Task[None]] = []

    def begin(addresses: list[Any]) -> None:  # keys, certificate and port are fine: now the long part, the load
        client.start()
        watching.append(asyncio.create_task(_announce(client, f"{config.model} on {_urls(addresses, config)}")))

    gc.collect()
    gc.freeze()  # what start-up made lives for ever: no collection has to look at it again
    try:
        status = await run_server(
            client, tokenizer, config, host=host, port=args.port, unix_path=args.uds, on_listening=begin
        )
    except OSError as error:
        message = f"cannot listen on {host}:{args.port}: {error.strerror}"
        kind = BusyError if error.errno == errno.EADDRINUSE else ConfigError
        raise kind(message, hint="choose another --port") from None
    finally:
        for task in watching:
            task.cancel()
        await client.stop()
    if status and client.fatal is not None:
        died = EngineError(client.fatal.error, hint=client.fatal.hint)
        died.exit_code = client.fatal.exit_code
        raise died
    return status


def check_vocabulary(model: ModelConfig, tokenizer: Tokenizer) -> None:
    """Ids beyond the embedding can never be used; a special token among them means that these files do not belong
    together."""
    if tokenizer.vocab_size <= model.vocab_size:
        return
    special = {text: token_id for text, token_id in tokenizer.special_ids.items() if token_id >= model.vocab_size}
    text = f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, the embedding has {model.vocab_size} rows"
    if special:
        some = ", ".join(f"{name} = {token_id}" for name, token_id in list(special.items())[:5])
        raise ConfigError(f"{text}; among those beyond: {some}", hint="check that these files belong together")
    log_event(log, logging.WARNING, "vocabulary", f"{text}; text that needs those beyond is refused")


def _warn(config: ApiConfig, core: CoreConfig, tokenizer: Tokenizer) -> None:
    """What the operator should hear now, not from a client later."""
    if core.allow_fault_injection:
        log_event(log, logging.WARNING, "fault_injection", "/admin/flip may damage the weights of this engine")
    if not config.eos_token_ids:
        log_event(log, logging.WARNING, "no_eos", "no EOS token is known: answers end only by max_tokens or stop")
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    except TemplateError as error:
        log_event(log, logging.WARNING, "no_chat_template", f"chat requests will be refused: {error.message}")


def _urls(addresses: list[Any], config: ApiConfig) -> str:
    scheme = "https" if config.tls_cert else "http"
    names = [a if isinstance(a, str) else f"[{a[0]}]:{a[1]}" if ":" in a[0] else f"{a[0]}:{a[1]}" for a in addresses]
    return ", ".join(name if name.startswith("/") else f"{scheme}://{name}" for name in names)


async def _announce(client: EngineClient, where: str) -> None:
    ready = await client.wait_ready()
    fields: dict[str, Any] = {name: getattr(ready, name) for name in ready.__struct_fields__}
    log_event(log, logging.INFO, "ready", "the model is loaded", **fields)
    if sys.stdout.isatty():  # for a person in front of it; the log is for machines
        print(f"ready: {where} (Ctrl-C stops)", flush=True)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    setup_logging(args.log_level, identifier="engine-api")
    try:
        return uvloop.run(serve(args))
    except EngineError as error:
        log_event(log, logging.CRITICAL, "cannot_serve", error.message, hint=error.hint)
        return error.exit_code
