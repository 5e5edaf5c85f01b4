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
from typing import Any

import uvloop

from engine import last_words
from engine.api.config import ApiConfig, Timeouts, check_bind
from engine.api.server import run_server
from engine.client import EngineClient
from engine.config import ModelConfig
from engine.core_config import CoreConfig, context_length, scheduler_config, with_defaults
from engine.errors import BusyError, ConfigError, EngineError, TemplateError
from engine.log import log_event, setup_logging
from engine.options import parse_arguments
from engine.tokenizer import Tokenizer

log = logging.getLogger("appliance.main")


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
        where = f"{config.model} on {_urls(addresses, config)}"
        watching.append(asyncio.create_task(_announce(client, where, config.timeouts.drain)))

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


async def _announce(client: EngineClient, where: str, drain: float) -> None:
    ready = await client.wait_ready()
    fields: dict[str, Any] = {name: getattr(ready, name) for name in ready.__struct_fields__}
    log_event(log, logging.INFO, "ready", "the model is loaded", **fields)
    if sys.stdout.isatty():  # for a person in front of it; the log is for machines
        patience = f", after at most {drain:g} s for open requests; a second one at once"
        print(f"ready: {where} (Ctrl-C stops{patience if drain else ''})", flush=True)


def main(argv: list[str] | None = None) -> int:
    words = last_words.inherit()
    args = parse_arguments(argv)
    setup_logging(args.log_level, identifier="engine-api")
    try:
        return uvloop.run(serve(args))
    except EngineError as error:
        log_event(log, logging.CRITICAL, "cannot_serve", error.message, hint=error.hint)
        last_words.say(words, error.message, error.hint)
        return error.exit_code
