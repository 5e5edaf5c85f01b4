"""`canary rules`: what netfilter has; `canary cleanup`: what runs have left behind."""

from __future__ import annotations

import argparse
from typing import Any

from appliance.arguments import add_common
from appliance.log import ApplianceError, ExitCode, emit_json, printable
from appliance.paths import Paths
from canary.asking import ask
from canary.client import NoController
from canary.commands import clean_up, rules_answer
from canary.placement import Placement
from canary.service import roll_back_here
from canary.store import Damaged, Store
from canary.wiring import real_parts

_ROLL_BACK_SECONDS = 600.0


def configure(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    add_common(parser)
    if parser.prog.endswith(" rules"):
        parser.add_argument("--diff", action="store_true", help="only what is not as it should be; exit code 1 if any")
    else:
        parser.add_argument("--forget", action="store_true", help=argparse.SUPPRESS)  # is done without it by now


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
        done = ask(paths, "cleanup")["done"]
    except NoController:
        done = _here(paths)
    if args.json:
        emit_json({"schema": 1, "done": done})
    else:
        print("\n".join(map(printable, done)) or "nothing was left behind")
    return ExitCode.DONE


def _here(paths: Paths) -> list[str]:
    """No controller runs. What a run has left whose file cannot be read is rolled back first."""
    store, done = Store(paths), []
    try:
        store.load()
    except Damaged as error:
        done.append(error.message)
        controller = roll_back_here(paths, real_parts, _ROLL_BACK_SECONDS)
        if controller.unsaved is not None:
            raise ApplianceError(f"the rule is at 0; {controller.unsaved}", hint="free some space: `df -h`") from None
        done.append("the rule is at 0, and the file was moved aside (canary.json.damaged-TIME)")
    with store.controlling():
        return [*done, *clean_up(store, Placement(paths), real_parts(paths).rules, store.load())]
