"""`python -P -m canary.netfilter up|down|show`: what appliance-netfilter.service runs; also for an operator's eyes.

up    the anchor, the guard and the jumps, for the ports of appliance.toml; a weight that is there stays
down  takes all of it away; the anchor stays while connections to the canary are open (exit code 3), unless --force,
      which also removes the tables of iptables that nobody uses (an uninstall leaves a host as it was)
show  what is there, what differs, what the canary cannot do justice to
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from appliance.arguments import add_common
from appliance.hostconfig import load_config
from appliance.log import ApplianceError, ExitCode, emit_json, printable, report_error
from appliance.paths import Paths
from canary.netfilter.apply import Netfilter


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 failed, 2 usage, 3 the anchor stays, 4 refused (backend, configuration), 5 busy."""
    args = _parser().parse_args(arguments)
    try:
        return _ACTIONS[args.action](for_host(Paths.default()), args)
    except ApplianceError as error:
        if args.debug:
            raise
        report_error(error.message, hint=error.hint, code=error.exit_code, as_json=args.json)
        return int(error.exit_code)


def for_host(paths: Paths) -> Netfilter:
    """With the ports of appliance.toml. HostConfigError where it cannot be used."""
    gateway = load_config(paths.config).gateway
    return Netfilter(port=gateway.port, canary_port=gateway.canary_port, lock=paths.run / "netfilter")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m canary.netfilter", description="The netfilter rules of the canary on this host."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="up|down|show")
    up = actions.add_parser("up", help="put the rules there; a weight that is there stays")
    down = actions.add_parser("down", help="take them away")
    down.add_argument(
        "--force",
        action="store_true",
        help="also end open connections to the canary; remove empty tables",
    )
    show = actions.add_parser("show", help="what is there and what differs")
    for each in (up, down, show):
        add_common(each, default=False)
    return parser


def _up(netfilter: Netfilter, args: argparse.Namespace) -> int:
    changed = netfilter.up()
    if args.json:
        emit_json({"changed": changed})
    for line in [] if args.json else changed or ["nothing to do"]:
        print(printable(line))
    return ExitCode.DONE


def _down(netfilter: Netfilter, args: argparse.Namespace) -> int:
    left = netfilter.remove(force=args.force)
    if args.json:
        emit_json({"open_connections": left, "anchor": left > 0})
    elif left:
        print(
            f"the rules are gone; the anchor of conntrack stays: {left} connections to the canary may be open"
            " (they would end with it; --force)",
            file=sys.stderr,
        )
    return ExitCode.INCONCLUSIVE if left else ExitCode.DONE


def _show(netfilter: Netfilter, args: argparse.Namespace) -> int:
    reading, notes, draining = netfilter.read(), netfilter.notes(), netfilter.draining()
    shown: dict[str, Any] = {
        "schema": 1,
        "port": netfilter.desired.port,
        "canary_port": netfilter.desired.canary_port,
        "families": [family.value for family in netfilter.desired.families],
        "weight": reading.weight,
        "run": reading.run,
        "connections": {"canary": reading.canary, "stable": reading.stable},
        "draining": draining,
        "anchor": reading.anchor,
        "conntrack_percent": reading.conntrack_percent,
        "drift": list(reading.drift),
        "notes": notes,
    }
    if args.json:
        emit_json(shown)
        return ExitCode.DONE
    for key, value in shown.items():
        for line in (value or ["none"]) if isinstance(value, list) else [value]:
            absent = "none" if key in ("weight", "run") else "unknown"
            print(f"{key + ':':<19}{absent if line is None else printable(_in_words(line))}")
    return ExitCode.DONE


def _in_words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{number} {name}" for name, number in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


_ACTIONS = {"up": _up, "down": _down, "show": _show}

if __name__ == "__main__":
    raise SystemExit(main())
