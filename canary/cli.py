"""The `canary` command: runs of releases against real traffic. Errors, exit codes, --json, --debug as `appliance`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from appliance.cli import Command, Program
from appliance.cli import main as run

PROGRAM = Program(
    "canary", "Gives a new release a share of the connections, judges it, and promotes it or rolls it back."
)

COMMANDS = (
    Command("start", "start a run of a release", "canary.start_cli"),
    Command("check", "would a run of a release start? every check, one line each", "canary.start_cli"),
    Command("status", "show the present or last run", "canary.status_cli"),
    Command("list", "list runs, a line each", "canary.history_cli"),
    Command("events", "show what happened in runs", "canary.history_cli"),
    Command("explain", "show the numbers behind the verdicts of a run", "canary.history_cli"),
    Command("pause", "stay at the present weight; the canary is still watched", "canary.control_cli"),
    Command("resume", "go on after a pause, a set weight, or an inconclusive step", "canary.control_cli"),
    Command("promote", "go to the next step now, or with --full into service", "canary.control_cli"),
    Command("rollback", "end the run: weight 0 at once, also while the controller is down", "canary.rollback_cli"),
    Command("abort", "the same as rollback", "canary.rollback_cli"),
    Command("weight", "set the weight by hand and pause", "canary.control_cli"),
    Command("drain", "show, or wait for, what is still in work on the canary", "canary.control_cli"),
    Command("retry", "start the last failed or aborted run again", "canary.start_cli"),
    Command("undo", "put back what served before the last settled run, without analysis", "canary.start_cli"),
    Command("rules", "show the netfilter rules' weight, counters and drift", "canary.rules_cli"),
    Command("cleanup", "remove what runs have left behind; no run may be on", "canary.rules_cli"),
)


def main(argv: Sequence[str] | None = None) -> int:
    return run(argv, COMMANDS, PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
