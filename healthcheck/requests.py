"""What may be asked of the watchdog over its control socket, paths.watchdog_control: root everything, others "status".

status                          -> {"state": the document}
check        {"golden"}         looks at everything now -> {"state"} when that is done
set-healthy  {"gpu", "reason"}   refused while the GPU is being repaired, or its reset unit has not ended
maintenance  {"on", "reason"}    off: refused while a reset runs
inject       {"gpu", "key", "detail"}      refused unless the watchdog was started for tests

set-healthy and maintenance fail, and say so, where they are in force but the ledger could not be written.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from appliance.launcher.control_server import Client, failure
from appliance.launcher.operations import Arguments, Refused, RequestError
from appliance.log import ApplianceError, BusyError, ExitCode
from healthcheck.machine_types import SERVING, MaintenanceOff, MaintenanceOn, SetHealthy, State
from healthcheck.policy import normalise_key
from healthcheck.resetter import unit_name
from healthcheck.types import Signal

if TYPE_CHECKING:
    from healthcheck.service import Service

_MAX_REASON = 500
_CHECK_POLL = 0.1

Reply = Callable[[dict[str, Any]], None]


def handle(service: Service, request: dict[str, Any], client: Client) -> None:
    """Answers now, or when it is done, or never where the client has left."""
    op = request.pop("op")
    try:
        if op not in _OPS:
            raise RequestError(f"unknown op {op!r}", hint=f"known: {', '.join(_OPS)}")
        arguments = Arguments(request)
        timeout = arguments.seconds("timeout", 60.0)
        _OPS[op](service, arguments, client, timeout)
    except ApplianceError as error:
        client.reply(failure(error.message, hint=error.hint, code=error.exit_code))


def _status(service: Service, arguments: Arguments, client: Client, timeout: float) -> None:
    arguments.finish()
    client.reply({"ok": True, "state": service.publisher.document()})


def _check(service: Service, arguments: Arguments, client: Client, timeout: float) -> None:
    """All GPUs are read anew; with "golden" their engines are compared as well."""
    golden = arguments.flag("golden")
    arguments.finish()
    left = {gpu.uuid for gpu in service.host.gpus.values()}
    until = service.loop.time() + timeout
    for uuid in list(left):
        service.probes.reread(uuid, partial(_done, left, uuid))
    for probe in service.engines.values() if golden else ():
        probe.compare_all()

    def look() -> None:
        comparing = golden and any(probe.comparing for probe in service.engines.values())
        if not left and not comparing:
            client.reply({"ok": True, "state": service.publisher.document()})
        elif service.loop.time() >= until:
            what = "golden answers" if not left else "NVML"
            hint = "what it saw last: healthcheck check --cached"
            text = f"no answer within {timeout:g} s from {what}"
            client.reply(failure(text, hint=hint, code=ExitCode.INCONCLUSIVE))
        elif not client.closed:
            service.loop.later(_CHECK_POLL, look)

    look()


def _done(left: set[str], uuid: str, _: int | None) -> None:
    left.discard(uuid)


def _acknowledge(service: Service, client: Client, reply: dict[str, Any]) -> None:
    """What was told is done; where the ledger could not be written that is a failure: it ends with this process."""
    if service.unsaved is not None:
        raise ApplianceError(
            f"{reply['note']}; in force, but only until the watchdog ends, because {service.paths.gpus} could not be "
            f"written ({service.unsaved})",
            hint="where the disk is full free some space (`df -h`): the watchdog tries again every second, and "
            "`healthcheck status` names it until it is saved",
        )
    client.reply(reply)


def _set_healthy(service: Service, arguments: Arguments, client: Client, timeout: float) -> None:
    gpu, reason = _gpu(service, arguments), arguments.text("reason", limit=_MAX_REASON)
    arguments.finish()

    def do() -> None:
        _refuse_repaired(service, gpu)
        service.event("watchdog_set_healthy", gpu=gpu, reason=reason)
        service.post(SetHealthy(gpu, reason))
        service.publisher.now()  # the state file says so before the reply does
        state = service.host.gpus[gpu]
        why = f": {state.reason}" if state.reason else ""
        note = f"gpu {gpu} is {state.state}{why}"
        _acknowledge(service, client, {"ok": True, "state": str(state.state), "note": note})

    _refuse_repaired(service, gpu)
    if service.host.gpus[gpu].state is State.QUARANTINED:  # the only one of these that starts an engine
        _without_resets(service, [gpu], client, timeout, do)
    else:
        do()


def _refuse_repaired(service: Service, gpu: int) -> None:
    entry = service.host.gpus[gpu]
    if service.host.resetting == gpu:
        raise _reset_runs(gpu, entry.uuid)
    if entry.state is State.MAINTENANCE:
        raise BusyError(f"gpu {gpu} is in maintenance", hint="`healthcheck maintenance off --reason TEXT` first")
    if entry.state not in SERVING and entry.state is not State.QUARANTINED:
        hint = "wait until it is HEALTHY or QUARANTINED: `healthcheck status`, and `healthcheck history` for the steps"
        raise BusyError(f"gpu {gpu} is {entry.state}: the watchdog is at work on it", hint=hint)


def _reset_runs(gpu: int, uuid: str) -> BusyError:
    unit = unit_name(uuid)
    hint = f"`systemctl status '{unit}'` shows how far it is. Where it hangs `systemctl stop` it, else reboot"
    return BusyError(f"the reset of gpu {gpu} has not ended", hint=hint)


def _without_resets(service: Service, gpus: list[int], client: Client, timeout: float, do: Callable[[], None]) -> None:
    """`do`, unless a reset unit of these GPUs runs, by whomever it was started. Not known is no yes."""
    units = {unit_name(service.host.gpus[gpu].uuid): gpu for gpu in gpus}

    def answered(answer: dict[str, Any]) -> None:
        try:
            if not answer["ok"]:
                client.reply(
                    failure(
                        f"whether a reset runs is not known: {answer.get('error')}",
                        hint="try again; `systemctl list-units 'appliance-gpu-reset@*'` says the same",
                        code=ExitCode.INCONCLUSIVE,
                    )
                )
            elif running := [units[name] for name in answer["running"]]:
                raise _reset_runs(running[0], service.host.gpus[running[0]].uuid)
            elif not client.closed:  # who has left does not learn that it was done
                do()
        except ApplianceError as error:
            client.reply(failure(error.message, hint=error.hint, code=error.exit_code))

    service.errands.run(f"running {id(client)}", {"op": "running", "units": list(units)}, timeout, answered)


def _maintenance(service: Service, arguments: Arguments, client: Client, timeout: float) -> None:
    on, reason = arguments.flag("on"), arguments.text("reason", limit=_MAX_REASON)
    arguments.finish()

    def do() -> None:
        service.event("watchdog_maintenance", on=on, reason=reason)
        service.post(MaintenanceOn(reason) if on else MaintenanceOff(reason))
        service.publisher.now()
        note = "maintenance: the watchdog looks and does not act" if on else "the watchdog acts again"
        _acknowledge(service, client, {"ok": True, "on": on, "changed": True, "note": note})

    resetting = service.host.resetting
    if on:
        do()
    elif resetting is not None:
        raise _reset_runs(resetting, service.host.gpus[resetting].uuid)
    elif service.host.maintenance is None and service.host.halt is None:
        note = "there is no maintenance: nothing has changed"
        _acknowledge(service, client, {"ok": True, "on": False, "changed": False, "note": note})
    else:
        _without_resets(service, sorted(service.host.gpus), client, timeout, do)


def _inject(service: Service, arguments: Arguments, client: Client, timeout: float) -> None:
    gpu, key = _gpu(service, arguments), arguments.text("key")
    detail = arguments.text("detail", limit=_MAX_REASON)
    arguments.finish()
    if not service.test:
        hint = "only a watchdog that was started with --test or --scripted-nvml takes faults"
        raise Refused("this watchdog is not for tests", hint=hint)
    key = normalise_key(key)
    uuid = service.host.gpus[gpu].uuid
    service.event("watchdog_injected", gpu=gpu, key=key, detail=detail)
    scripted = service.probes.inject(uuid, key)
    if not scripted:
        service.signal(Signal(key, uuid, detail, time.time(), "injected"))
    client.reply({"ok": True, "note": f"gpu {gpu}: {key}{' in the script of NVML' if scripted else ''}"})


def _gpu(service: Service, arguments: Arguments) -> int:
    number = arguments.request.pop("gpu", None)
    if type(number) is not int or number not in service.host.gpus:
        there = ", ".join(map(str, sorted(service.host.gpus))) or "none"
        raise RequestError(f"no GPU slot {str(number)[:20]}; bound: {there}", hint="see `healthcheck status`")
    return number


_OPS: dict[str, Callable[[Service, Arguments, Client, float], None]] = {
    "status": _status,
    "check": _check,
    "set-healthy": _set_healthy,
    "maintenance": _maintenance,
    "inject": _inject,
}
