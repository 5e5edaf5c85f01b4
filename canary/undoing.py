"""Which release `canary undo` puts back: pure, over the runs that have been.

Undo goes without analysis, so it must never bring back what a later run, or a person, has found to be bad.
"""

from __future__ import annotations

from canary.happenings import Refused
from canary.run import Phase, Run

_REBOOT = "reboot"  # machine.py's reason; it says nothing of the release


def former(history: list[Run], serving: str | None, to: str | None, *, force: bool) -> Run:
    """The settled run to undo: the last one, or run `to`. `history`: oldest first; `serving`: what stable names.

    Refused: there is none; stable is not what it put there; or its former release failed, or was rolled back by hand,
    in a later run (`force` overrides both)."""
    settled = [run for run in history if run.phase is Phase.SETTLED and to in (None, run.id)]
    if not settled:
        what = "no settled run to undo" if to is None else f"run {to} is no settled run"
        raise Refused(what, hint="`canary list`; `appliance release use NAME` puts any release in")
    last = settled[-1]
    if force:
        return last
    anyhow = f"`canary start {last.stable}` judges it; or undo --force, or `appliance release use {last.stable}`"
    for run in reversed(history[history.index(last) + 1 :]):
        if run.release == last.stable and _found_bad(run):
            how = "failed" if run.phase is Phase.FAILED else "was rolled back"
            raise Refused(
                f"undo of run {last.id} would put {last.stable} into service without analysis, and it {how} after that"
                f" in run {run.id}: {run.reason}",
                hint=f"stable stays {serving}. {anyhow}",
            )
    if to is None and serving != last.release:
        raise Refused(
            f"the last settled run is {last.id} ({last.release} over {last.stable}), and stable is {serving} by now:"
            f" something else has put it there",
            hint=anyhow,
        )
    return last


def _found_bad(run: Run) -> bool:
    by_hand = run.phase is Phase.ABORTED and not run.dry_run and run.reason != _REBOOT
    return run.phase is Phase.FAILED or by_hand
