"""`appliance serve`: the server in the foreground. Resolves the model in the store, then becomes the engine process."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from appliance.arguments import port_number
from appliance.engine_options import PRINTS, parse_engine_options
from appliance.log import Progress, UsageError
from appliance.models import ModelStore
from engine.spawn import python_env, python_module


def configure(parser: argparse.ArgumentParser, _common: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", help="a model of the store, or a directory")
    parser.add_argument("--backend", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=port_number, default=8000, help="0 to 65535; 0: any free one, see the log")
    parser.add_argument("engine_options", nargs="*", help="after --: options of `python -m engine`, see its --help")


def run(args: argparse.Namespace) -> int:
    _check_options(args.engine_options)  # before a model is fetched for them
    command = engine_command(
        args.model, backend=args.backend, host=args.host, port=args.port, extra=tuple(args.engine_options)
    )
    sys.stdout.flush()
    os.execve(command[0], command, python_env())  # one process less between the operator's signals and the engine


def _check_options(options: list[str]) -> None:
    """UsageError for options after -- that the engine does not take. --help and --version are its own to answer."""
    try:
        parse_engine_options(["--model-dir", "-", *options])
    except UsageError as error:
        if error.message != PRINTS:
            raise UsageError(
                f"the engine refuses the options after --: {error.message}",
                hint="`appliance serve -- --help` shows those of the engine, `appliance serve --help` its own",
            ) from None


def engine_command(model: str, *, backend: str, host: str, port: int, extra: tuple[str, ...] = ()) -> list[str]:
    """argv of the engine for a model name of the store (pulled when it is in the catalogue) or a directory."""
    if os.sep in model or model in (".", ".."):
        directory, name = Path(model), Path(model).resolve().name
    else:
        store = ModelStore(progress=Progress())
        if model in store.catalogue:
            store.pull(model)  # does nothing when it is complete; waits while another process pulls it
        directory, name = store.path(model), model
    return [
        *python_module("engine"),
        "--model-dir", str(directory),
        "--model-name", name,
        "--backend", backend,
        "--host", host,
        "--port", str(port),
        *extra,
    ]  # fmt: skip
