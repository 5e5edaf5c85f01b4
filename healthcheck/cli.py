"""The `healthcheck` command: what the watchdog knows and does. Errors, exit codes, --json, --debug as `appliance`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from appliance.cli import Command, Program
from appliance.cli import main as run

PROGRAM = Program("healthcheck", "Shows what the watchdog of this host knows of its GPUs, and tells it what to do.")

COMMANDS = (
    Command("status", "show each GPU's state, and what the watchdog is doing", "healthcheck.status_cli"),
    Command("check", "look at the GPUs now: every check, one line each", "healthcheck.check_cli"),
    Command("history", "show what happened to the GPUs", "healthcheck.history_cli"),
    Command("explain", "what would happen on a signal, and why", "healthcheck.explain_cli"),
    Command("policy", "check the policy file", "healthcheck.policy_cli"),
    Command("set-healthy", "a human has repaired a GPU: take it back into service", "healthcheck.control_cli"),
    Command("maintenance", "let the watchdog look, but not act", "healthcheck.control_cli"),
    Command("inject-fault", "tests only: pretend that a GPU has a fault", "healthcheck.control_cli"),
)


def main(argv: Sequence[str] | None = None) -> int:
    return run(argv, COMMANDS, PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
