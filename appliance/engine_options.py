"""Would the engine take these options? Asked with its own parser, before anything is started."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from appliance.log import UsageError
from engine.errors import EngineError

if TYPE_CHECKING:
    from appliance.hostconfig import HostConfig

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


def problem_of_host_arguments(config: HostConfig) -> str | None:
    """Why no engine of this host would start with engine.arguments of appliance.toml; None if one would. What depends
    on the model is left to `release add` and to the engine."""
    if not config.engine.arguments:
        return None
    from engine.serve import core_config

    fixed = ["--model-dir", "-", "--backend", config.gpus.backend, "--uds", "-"]
    try:
        core_config(parse_engine_options([*fixed, *config.engine.arguments]))
    except (UsageError, EngineError) as error:
        return error.message
    return None
