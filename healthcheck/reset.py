"""Resets one GPU: `python -P -m healthcheck.reset --uuid UUID`, the oneshot appliance-gpu-reset@UUID.service.

read (reset_host) -> plan (reset_plan, pure) -> apply, here. Order: wait until engines and holders are gone, stop DCGM
and its like, persistence off, wait again, nvidia-smi --gpu-reset, read the effect, and in every case put back what was
changed. The caller has closed its own NVML before.

Before each change the intent is on disk (resets/UUID.intent.json: what to put back). Killed anywhere, `--recover` puts
it back: ExecStopPost= of the unit, ExecStartPre= of the watchdog (after a power cut), and the next reset. What a reboot
did by itself (services, persistence) is left alone. The result is resets/UUID.json: it is removed when a reset begins
and written when all is over. One reset at a time on a host, by a lock.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from appliance.command import CommandError, CommandTimeout, check
from appliance.events import append_event
from appliance.log import ApplianceError, BusyError, ExitCode, UsageError, emit_json, report_error
from appliance.paths import Paths
from appliance.statefile import StateError, read_state, remove_state, state_lock, write_state
from healthcheck.reset_host import ResetHost
from healthcheck.reset_plan import (
    CLIENT_UNITS,
    UUID,
    Facts,
    Limits,
    Plan,
    Refusal,
    Verdict,
    blockers,
    judge_after,
    judge_command,
    plan,
    still_holding,
)

SCHEMA = 1
T = TypeVar("T")
_POLL_SECONDS = 0.2
_UNIT = re.compile(r"(?!appliance)[A-Za-z0-9:_.@\\-]{1,240}\.service")


@dataclass(slots=True)
class Intent:
    """What has to be put back, on disk before it is changed. `outcome`: the verdict, once there is one."""

    path: Path
    uuid: str
    boot_id: str
    started: float  # UTC seconds
    phase: str = "free"
    units: list[str] = field(default_factory=list)  # to start
    persistence: bool = False  # to turn on
    phases: dict[str, float] = field(default_factory=dict)  # seconds
    outcome: dict[str, Any] | None = None

    def write(self) -> None:
        kept = ("uuid", "boot_id", "started", "phase", "units", "persistence", "phases", "outcome")
        write_state(self.path, {name: getattr(self, name) for name in kept}, schema=SCHEMA)

    @classmethod
    def read(cls, path: Path) -> Intent | None:
        """StateError where the file is not ours: somebody has to look which services were stopped."""
        state = read_state(path, schema=SCHEMA)
        try:
            return None if state is None else cls(path, **state)
        except TypeError:
            hint = "look which services of the GPU were stopped, start them, then remove it"
            raise StateError(f"{path} is not what this version writes", hint=hint) from None


class Reset:
    """One reset, or what is left of one. `clock`: monotonic seconds; `sleep` is the only waiting that is not a
    command's."""

    def __init__(
        self,
        host: ResetHost,
        uuid: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.host, self.uuid = host, uuid
        self.limits, self.paths = host.limits, host.paths
        self._clock, self._sleep = clock, sleep

    # -- the parts, in call order

    def start(self) -> dict[str, Any]:
        """All of it, under the lock; the result. A reset that failed is a result, not an exception."""
        remove_state(self.paths.gpu_reset(self.uuid))
        path = self.paths.gpu_reset_intent(self.uuid)
        intent = Intent(path, self.uuid, self.host.boot_id(), round(time.time(), 3))
        intent.write()
        append_event(self.paths.events, "gpu-reset-started", uuid=self.uuid)
        try:
            verdict = self._attempt(intent)
        except ApplianceError as error:  # a command of the host failed; what was changed is put back below
            hint = f"; {error.hint}" if error.hint else ""
            verdict = Verdict(False, f"{error.message}{hint}", timed_out=isinstance(error, CommandTimeout))
        except OSError as error:
            verdict = Verdict(False, f"{error.strerror}: {error.filename or 'no file'}")
        self._decide(intent, verdict)
        return self.finish(intent)

    def _attempt(self, intent: Intent) -> Verdict:
        facts = self._phase(intent, "free", self._wait_free)
        wanted = plan(facts)
        if isinstance(wanted, Refusal):
            hint = f"; {wanted.hint}" if wanted.hint else ""
            return Verdict(False, f"refused: {wanted.message}{hint}", wanted.needs, fields={"refused": True})
        if left := blockers(facts):
            fields = {"refused": True, "holders": left}
            return Verdict(
                False, f"refused: still in use after {self.limits.free:g} s: {', '.join(left)}", fields=fields
            )
        intent.units, intent.persistence = list(wanted.stop_units), wanted.persistence_off
        self._phase(intent, "stop_clients", lambda: self._stop_clients(wanted))
        self._phase(intent, "persistence_off", lambda: self._persistence_off(wanted))
        if left := self._phase(intent, "released", lambda: self._wait_released(facts)):
            return Verdict(
                False, f"still held after {self.limits.free:g} s: {', '.join(left)}", fields={"holders": left}
            )
        verdict = self._phase(intent, "reset", lambda: self._nvidia_smi_reset(wanted, facts))
        if verdict is None:
            after = self._phase(intent, "check", lambda: self.host.after(self.uuid))
            verdict = judge_after(self.uuid, after)
        return verdict

    def _phase(self, intent: Intent, name: str, work: Callable[[], T]) -> T:
        """The intent is on disk before the work begins; its duration is kept however it ends."""
        intent.phase = name
        intent.write()
        started = self._clock()
        try:
            return work()
        finally:
            intent.phases[name] = round(self._clock() - started, 3)

    def _wait_free(self) -> Facts:
        """Nothing is touched yet. Engines have been told to stop and our NVML to close: both take a moment."""
        deadline = self._clock() + self.limits.free
        facts = self.host.read(self.uuid)
        while blockers(facts) and not isinstance(plan(facts), Refusal) and self._clock() < deadline:
            self._sleep(_POLL_SECONDS)
            facts = self.host.look_again(facts)
        return facts

    def _stop_clients(self, wanted: Plan) -> None:
        for unit in wanted.stop_units:
            result = self.host.run(["systemctl", "stop", unit], timeout=self.limits.unit)
            check(result, f"cannot stop {unit}", hint=f"it keeps the GPU open: `systemctl status {unit}`")

    def _persistence_off(self, wanted: Plan) -> None:
        """Where that fails, the reset itself says whether it mattered."""
        if wanted.persistence_off:
            result = self.host.run([wanted.nvidia_smi, "-pm", "0", "-i", self.uuid], timeout=self.limits.query)
            if not result.ok:
                print(f"warning: persistence mode stays on: {result.why()}", file=sys.stderr)

    def _wait_released(self, facts: Facts) -> list[str]:
        deadline = self._clock() + self.limits.free
        while (left := still_holding(self.host.holders(facts.gpu))) and self._clock() < deadline:
            self._sleep(_POLL_SECONDS)
        return left

    def _nvidia_smi_reset(self, wanted: Plan, facts: Facts) -> Verdict | None:
        argv = [wanted.nvidia_smi, "--gpu-reset", "-i", self.uuid]
        result = self.host.run(argv, timeout=self.limits.reset)
        sys.stdout.write(result.text)
        sys.stderr.write(result.stderr.decode(errors="replace"))
        return judge_command(result, facts, self.limits.reset)

    # -- the end, also of a reset that was killed

    def _decide(self, intent: Intent, verdict: Verdict) -> None:
        intent.outcome = {"ok": verdict.ok, "detail": verdict.detail, "needs": verdict.needs}
        intent.outcome |= {"timed_out": verdict.timed_out} | verdict.fields
        intent.phase = "restore"
        intent.write()

    def finish(self, intent: Intent) -> dict[str, Any]:
        """Puts back what is left to put back, writes the result, forgets the intent. What cannot be put back stays in
        the intent, and `--recover` tries again."""
        if intent.outcome is None:
            self._decide(intent, Verdict(False, f"interrupted in phase {intent.phase}; what was changed is put back"))
        problems: list[str] = []
        if intent.boot_id != self.host.boot_id():
            print("the host was restarted meanwhile: services and persistence mode are as the boot left them")
            intent.units, intent.persistence = [], False
        else:
            started = self._clock()
            problems = self._restore(intent)
            intent.phases["restore"] = round(self._clock() - started, 3)
        result = self._write_result(intent, problems)
        if problems:
            intent.write()
        else:
            remove_state(intent.path)
        return result

    def _restore(self, intent: Intent) -> list[str]:
        """Each step is idempotent and is forgotten when it is done."""
        problems = []
        if intent.persistence and (problem := self._persistence_on()):
            problems.append(problem)
        intent.persistence = bool(problems)
        for unit in list(intent.units):
            result = self.host.run(["systemctl", "start", unit], timeout=self.limits.unit)
            if result.ok:
                intent.units.remove(unit)
                intent.write()
            else:
                problems.append(f"{unit} is not started again: {result.why()}")
        return problems

    def _persistence_on(self) -> str | None:
        if self.host.smi is None:
            return "persistence mode is not on again: nvidia-smi is gone"
        result = self.host.run([self.host.smi, "-pm", "1", "-i", self.uuid], timeout=self.limits.query)
        return None if result.ok else f"persistence mode is not on again: {result.why()}"

    def _write_result(self, intent: Intent, problems: list[str]) -> dict[str, Any]:
        assert intent.outcome is not None
        result = {"uuid": self.uuid} | intent.outcome
        result |= {"phases": intent.phases, "started": intent.started, "finished": round(time.time(), 3)}
        result |= {"not_restored": problems}
        write_state(self.paths.gpu_reset(self.uuid), result, schema=SCHEMA)
        append_event(
            self.paths.events, "gpu-reset", uuid=self.uuid, ok=result["ok"], detail=result["detail"],
            needs=result["needs"], phases=intent.phases, not_restored=problems or None,
        )  # fmt: skip
        return {"schema": SCHEMA} | result


def reset(host: ResetHost, uuid: str) -> dict[str, Any]:
    """Resets one GPU, after what earlier ones left behind is put back. BusyError: another reset is running."""
    with _lock(host.paths):
        _recover_all(host, None)
        return Reset(host, uuid).start()


def recover(host: ResetHost, uuid: str | None = None) -> list[dict[str, Any]]:
    """Puts back what killed resets (of one GPU, or all) have left; the results. BusyError: one is running, which will
    have done so."""
    if not _intents(host.paths, uuid):
        return []
    with _lock(host.paths):
        return _recover_all(host, uuid)


def _recover_all(host: ResetHost, uuid: str | None) -> list[dict[str, Any]]:
    found = []
    for path in _intents(host.paths, uuid):
        if (intent := Intent.read(path)) is not None:
            found.append(Reset(host, intent.uuid).finish(intent))
    return found


def _intents(paths: Paths, uuid: str | None) -> list[Path]:
    folder = paths.gpu_reset_intent("x").parent
    return sorted(folder.glob("*.intent.json")) if uuid is None else [paths.gpu_reset_intent(uuid)]


@contextlib.contextmanager
def _lock(paths: Paths) -> Iterator[None]:
    folder = paths.gpu_reset("x").parent
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(state_lock(folder / "host", wait_seconds=0))
        except BusyError:
            hint = "`systemctl list-units appliance-gpu-reset@*` shows it; one at a time"
            raise BusyError("another reset is running on this host", hint=hint) from None
        yield


# -- the command


def exit_code(result: dict[str, Any]) -> ExitCode:
    if result["ok"]:
        return ExitCode.FAILED if result["not_restored"] else ExitCode.DONE
    if result.get("refused"):
        return ExitCode.REFUSED
    return ExitCode.INCONCLUSIVE if result.get("timed_out") else ExitCode.FAILED


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m healthcheck.reset", description=__doc__.partition("\n")[0])
    parser.add_argument("--uuid", help="of the GPU; with / for - as systemd's %%I gives it")
    parser.add_argument("--recover", action="store_true", help="only put back what a killed reset has left")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done, change nothing")
    parser.add_argument("--json", action="store_true", help="the result as JSON")
    own = "another one than the driver's, for tests and drills (default: $APPLIANCE_NVIDIA_SMI)"
    parser.add_argument("--nvidia-smi", metavar="PATH", default=os.environ.get("APPLIANCE_NVIDIA_SMI"), help=own)
    further = "a further service to stop for the reset and to start after it"
    parser.add_argument("--client-unit", metavar="UNIT", action="append", default=[], help=further)
    parser.add_argument("--free-seconds", type=float, default=Limits().free, help="how long holders may take to leave")
    parser.add_argument("--reset-seconds", type=float, default=Limits().reset, help="how long nvidia-smi may take")
    args = parser.parse_args(argv)
    try:
        return _main(args)
    except ApplianceError as error:
        report_error(error.message, hint=error.hint, code=error.exit_code, as_json=args.json)
        return error.exit_code


def _main(args: argparse.Namespace) -> int:
    uuid = None if args.uuid is None else args.uuid.replace("/", "-")
    if uuid is not None and not UUID.fullmatch(uuid):
        raise UsageError(f"{args.uuid!r} is no UUID of a GPU", hint="GPU-..., see `appliance gpus list`")
    for unit in args.client_unit:
        if not _UNIT.fullmatch(unit):
            raise UsageError(f"{unit!r} is no service that a reset may stop", hint="NAME.service, not one of ours")
    limits = Limits(free=args.free_seconds, reset=args.reset_seconds)
    units = tuple(dict.fromkeys((*CLIENT_UNITS, *args.client_unit)))
    host = ResetHost(Paths.default(), nvidia_smi=args.nvidia_smi or None, client_units=units, limits=limits)
    if args.recover:
        return _run_recover(host, uuid, as_json=args.json)
    if uuid is None:
        raise UsageError("which GPU?", hint="--uuid UUID, see `appliance gpus list`")
    if args.dry_run:
        return _dry_run(host, uuid)
    result = reset(host, uuid)
    if args.json:
        emit_json(result)
    else:
        _report(result)
    return exit_code(result)


def _run_recover(host: ResetHost, uuid: str | None, *, as_json: bool) -> int:
    try:
        results = recover(host, uuid)
    except BusyError:
        print("a reset is running: it has put back what others left", file=sys.stderr)
        results = []
    if as_json:
        emit_json(results)
    for result in () if as_json else results:
        _report(result)
    return ExitCode.FAILED if any(result["not_restored"] for result in results) else ExitCode.DONE


def _dry_run(host: ResetHost, uuid: str) -> int:
    facts = host.read(uuid)
    wanted = plan(facts)
    if isinstance(wanted, Refusal):
        raise _refused(wanted)
    if left := blockers(facts):
        raise _refused(Refusal(f"in use by {', '.join(left)}", "a reset waits for them, then gives up"))
    print("\n".join(wanted.lines()))
    return ExitCode.DONE


def _refused(refusal: Refusal) -> ApplianceError:
    error = CommandError(refusal.message, hint=refusal.hint or None)
    error.exit_code = ExitCode.REFUSED
    return error


def _report(result: dict[str, Any]) -> None:
    """For the journal."""
    spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in result["phases"].items())
    print(f"{result['uuid']}: {'ok' if result['ok'] else 'FAILED'}: {result['detail']} ({spent})", flush=True)
    for problem in result["not_restored"]:
        print(f"{result['uuid']}: NOT RESTORED: {problem}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
