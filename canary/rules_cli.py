"""`canary rules`: what netfilter has; `canary cleanup`: what runs have left behind."""

from __future__ import annotations

import argparse
import time
from typing import Any

from appliance.arguments import add_common
from appliance.log import ApplianceError, ExitCode, emit_json, printable
from appliance.paths import Paths
from canary.asking import ask
from canary.client import NoController
from canary.commands import clean_up, rules_answer
from canary.placement import Placement
from canary.store import Store
from canary.wiring import real_parts


def configure(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    add_common(parser)
    if parser.prog.endswith(" rules"):
        parser.add_argument("--diff", action="store_true", help="only what is not as it should be; exit code 1 if any")
    else:
        parser.add_argument(
            "--forget", action="store_true",
            help="controller stopped: move a canary.json that cannot be read out of the way",
        )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    paths = Paths.default()
    return _rules(paths, args) if args.command == "rules" else _cleanup(paths, args)


def _rules(paths: Paths, args: argparse.Namespace) -> int:
    try:
        document = ask(paths, "rules")
    except NoController:
        document = rules_answer(real_parts(paths).rules)
    if args.json:
        emit_json(document)
    elif args.diff:
        print(document["diff"] or "nothing differs")
    else:
        for key, value in document.items():
            if key not in ("ok", "diff"):
                print(f"{key:<18} {printable(_shown(value))}")
    return ExitCode.FAILED if args.diff and document["diff"] else ExitCode.DONE


def _shown(value: Any) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, dict):
        return "  ".join(f"{name} {count}" for name, count in value.items())
    return "; ".join(value) or "none" if isinstance(value, list) else str(value)


def _cleanup(paths: Paths, args: argparse.Namespace) -> int:
    try:
        if args.forget:
            raise NoController("--forget: the controller must be stopped")
        done = ask(paths, "cleanup")["done"]
    except NoController:
        done = _here(paths, forget=args.forget)
    if args.json:
        emit_json({"schema": 1, "done": done})
    else:
        print("\n".join(map(printable, done)) or "nothing was left behind")
    return ExitCode.DONE


def _here(paths: Paths, *, forget: bool) -> list[str]:
    store, done = Store(paths), []
    with store.controlling():
        try:
            present = store.load()
        except ApplianceError:
            if not forget:
                raise
            aside = paths.canary_run.with_name(f"canary.json.{int(time.time())}")
            paths.canary_run.rename(aside)
            done.append(f"{paths.canary_run} was moved to {aside}")
            present = None
        return [*done, *clean_up(store, Placement(paths), real_parts(paths).rules, present)]
