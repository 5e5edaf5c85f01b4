"""Would the engine take these options? Asked with its own parser, before anything is started."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from appliance.log import UsageError
from engine.errors import EngineError

if TYPE_CHECKING:
    from appliance.hostconfig import HostConfig
    from engine.core_config import CoreConfig

_THREADS_PER_CPU = 4
_MIN_TOKEN_BYTES = 64  # of keys and values, in any model there is
_ANY_CONTEXT = 2048
PRINTS = "one of them prints a text and ends"  # --help, --version


def parse_engine_options(arguments: Sequence[str]) -> argparse.Namespace:
    """What the engine makes of its command line. UsageError in its words, PRINTS where it would not even start."""
    from engine.options import parse_arguments

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            return parse_arguments(list(arguments))
    except SystemExit:
        _, error, words = said.getvalue().rpartition("error: ")
        message = (words.strip().splitlines() or ["refused"])[0] if error else PRINTS
        raise UsageError(message, hint="see `python -m engine --help`") from None


def problem_of_host_arguments(config: HostConfig) -> tuple[str, str] | None:
    """(key, why no engine of this host would start with it); None if one would. What depends on the model is left to
    `release add` and to the engine."""
    from engine.serve import core_config

    fixed = ["--model-dir", "-", "--backend", config.gpus.backend, "--uds", "-"]
    try:
        options = parse_engine_options([*fixed, *config.engine.arguments])
        core = core_config(options)
        if problem := _beyond_this_host(core):
            return "engine.arguments", problem
    except (UsageError, EngineError) as error:
        return "engine.arguments", error.message
    return _sizes_apart(config, core)


def _beyond_this_host(core: CoreConfig) -> str | None:
    from kernels.cpu_ops import MAX_THREADS

    cpus = os.cpu_count() or 1
    threads = core.num_threads or 1
    if threads > min(MAX_THREADS, _THREADS_PER_CPU * cpus):
        return f"--threads {threads}: this host has {cpus} CPUs, and an engine takes at most {MAX_THREADS} threads"
    if core.backend == "cpu" and core.kv_tokens is not None:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if core.kv_tokens * _MIN_TOKEN_BYTES > total:
            return f"--kv-tokens {core.kv_tokens}: this host has {total} bytes of memory, which no model fits that into"
    return None


def _sizes_apart(config: HostConfig, core: CoreConfig) -> tuple[str, str] | None:
    """Sizes that do not go together, in the engine's words."""
    import msgspec

    from engine.core_config import scheduler_config

    given = config.engine.max_batch_seqs
    if given is not None:
        core = msgspec.structs.replace(core, max_batch_seqs=given)
    try:
        scheduler_config(core, config.engine.max_model_len or core.max_model_len or _ANY_CONTEXT)
    except EngineError as error:
        return "engine.arguments" if given is None else "engine.max_batch_seqs", error.message
    return None
