"""`appliance release`: the command line of releases, their golden answers and the slots that serve them."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from appliance.canary_guard import refuse_during_run
from appliance.events import append_event
from appliance.fleet import Fleet, engine_of
from appliance.hostconfig import load_config
from appliance.leases import Leases
from appliance.log import ApplianceError, ExitCode, Progress, emit_json, format_bytes, paint, printable
from appliance.models import ModelStore
from appliance.paths import SLOT_NAMES, Paths
from appliance.releases import ReleaseError, ReleaseInfo, ReleaseStore, parse_options
from appliance.slots import pointer
from appliance.terminal import UNCUT, table

if TYPE_CHECKING:
    from appliance.golden import Golden

EPILOG = """\
examples:
  appliance release add v2 --model smollm2           a release of a stored model, and its golden answers
  appliance release add v2 --model llama --link      the model's files stay in the store and must not change
  appliance release use v2                           put it into service; no request is lost
  appliance release check v2                         do the running engines still give their golden answers?
  appliance release use v1                           and back

A release never changes. What differs in one option is another release.
"""


def configure(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    """Adds the verbs of `appliance release`; `common` carries the options that every command takes."""
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    verbs = parser.add_subparsers(title="verbs", dest="verb", metavar="VERB", required=True)

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", parents=[common])
        sub.add_argument("-q", "--quiet", action="store_true", help="no progress")
        sub.set_defaults(handler=_HANDLERS[name])
        return sub

    add = verb("add", "make a release of a stored model and record its golden answers")
    add.add_argument("name", metavar="NAME")
    add.add_argument("--model", required=True, metavar="MODEL", help="a name of `appliance model list`")
    add.add_argument("--model-name", metavar="NAME", help="what clients call it (default: MODEL)")
    add.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE",
        help="max_model_len, max_batch_seqs or max_queued_requests; repeatable",
    )  # fmt: skip
    add.add_argument(
        "--argument", action="append", default=[], metavar="ARG",
        help="a further argument of the engine, as --argument=--no-prefix-cache; repeatable, in order",
    )  # fmt: skip
    add.add_argument("--link", action="store_true", default=False, help="link to the stored model instead of a copy")
    add.add_argument("--note", default="", help="a line for people")
    add.add_argument(
        "--golden", choices=["auto", "displace", "skip"], default="auto",
        help="auto: record golden answers through the launchers; displace: where no GPU has room, take serving ones "
        "out of service for it, one at a time; skip: none, and nobody can judge its answers",
    )  # fmt: skip
    verb("list", "show the releases and the slots that serve them")
    show = verb("show", "show one release in full")
    show.add_argument("name", metavar="NAME")
    verify = verb("verify", "recompute the digests; reports every bad, missing or extra file")
    verify.add_argument("names", metavar="NAME", nargs="*", help="default: all releases")
    use = verb("use", "put a release into service: start, compare, swap the slot, drain the old one")
    use.add_argument("name", metavar="NAME")
    use.add_argument("--slot", choices=SLOT_NAMES, default="stable", help="default: stable")
    wait = use.add_mutually_exclusive_group()
    wait.add_argument("--wait", dest="wait", action="store_true", default=True, help="until the old is gone (default)")
    wait.add_argument("--no-wait", dest="wait", action="store_false", help="do not wait for the old one to drain")
    use.add_argument("--offline", action="store_true", help="no launcher runs: set the slot only")
    check = verb("check", "compare running engines with the golden answers: 0 the same, 1 different, 3 no telling")
    check.add_argument("name", metavar="NAME")
    check.add_argument("--gpu", type=int, metavar="N", help="default: every GPU that runs it")
    remove = verb("remove", "remove a release that no slot points at and no GPU runs")
    remove.add_argument("name", metavar="NAME")


def run(args: argparse.Namespace) -> int:
    progress = Progress(quiet=args.quiet)
    store = ReleaseStore(Paths.default(), progress)
    try:
        with _undone_when_ended():
            code: int = args.handler(store, args)
        return code
    finally:
        progress.finish()


@contextlib.contextmanager
def _undone_when_ended() -> Iterator[None]:
    """SIGTERM and SIGHUP (a lost ssh connection) end a command as Ctrl-C does: it undoes what it has begun."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _fleet(store: ReleaseStore) -> Fleet:
    return Fleet(store.paths, load_config(store.paths.config), store.progress)


def _models(paths: Paths) -> ModelStore:
    chosen = os.environ.get("APPLIANCE_MODELS")
    return ModelStore(Path(chosen).absolute() if chosen else paths.models)


# -- changing ----------------------------------------------------------------------------------------------------------


def _add(store: ReleaseStore, args: argparse.Namespace) -> int:
    options = parse_options(args.option, args.argument)
    fleet = _fleet(store)
    leases, recorded = Leases(fleet), []
    with store.changing():
        _recover(leases)
        release, changed = store.add_locked(
            args.name, _models(store.paths), args.model, fleet.config,
            model_name=args.model_name, options=options, link=args.link, note=args.note,
        )  # fmt: skip
        if changed:
            append_event(store.paths.events, "release_added", release=release.name, model=release.model)
        if args.golden != "skip":
            recorded = _record(store, leases, release.name, new=changed, displace=args.golden == "displace")
    if args.json:
        golden = store.golden_devices(release.name)
        emit_json(_json(ReleaseInfo(release.name, release, (), golden)) | {"changed": changed or bool(recorded)})
    else:
        devices = ", ".join(f"{item.device} ({item.agreed})" for item in recorded)
        said = f"; golden answers recorded on {devices}" if devices else ""
        print(f"{release.name}: {'added' if changed else 'already there'}, {format_bytes(release.model_bytes)}{said}")
    if not store.golden_devices(release.name):
        _warn(f"{release.name} has no golden answers: nobody can judge what it computes")
    return ExitCode.DONE


def _record(store: ReleaseStore, leases: Leases, name: str, *, new: bool, displace: bool) -> list[Golden]:
    """Golden answers of the release `name`. If they cannot be had a `new` release is removed again, and so is any that
    gave two different answers."""
    from appliance.golden_record import GoldenMismatch, Recorder

    try:
        try:
            return Recorder(leases.fleet, leases, store.get(name), displace).record()
        finally:
            leases.drop_all()
    except BaseException as error:
        append_event(store.paths.events, "release_golden_failed", release=name, error=str(error))
        fate = _discard(store, name) if new or isinstance(error, GoldenMismatch) else "is kept"
        if isinstance(error, ApplianceError):
            error.message += f" (the release {name!r} {fate})"
        raise


def _discard(store: ReleaseStore, name: str) -> str:
    """Removes the release, if that can be; what became of it."""
    try:
        store.remove_locked(name)
    except ApplianceError as error:
        return f"is kept: {error.message}"
    append_event(store.paths.events, "release_removed", release=name)
    return "was not kept"


def _recover(leases: Leases, *, keep: str | None = None) -> None:
    """Ends what a killed command left behind. What cannot be ended now is in the way of nothing: it is said."""
    for problem in leases.recover(keep=keep):
        _warn(problem)


def _use(store: ReleaseStore, args: argparse.Namespace) -> int:
    from appliance.rollout import Rollout

    fleet = _fleet(store)
    leases = Leases(fleet)
    with store.changing():
        release = store.get(args.name)
        if pointer(store.paths, args.slot) != release.name:  # else nothing changes, and what was left is finished
            refuse_during_run(store.paths, "`release use`")
        _recover(leases, keep=release.name)
        rollout = Rollout(store, fleet, leases, release, args.slot, args.wait, args.offline)
        outcome = rollout.run()
    for gpu, reason in outcome.away.items():
        outcome.warnings.append(f"GPU {gpu} follows later: {reason}")
    if args.json:
        emit_json(
            {
                "release": outcome.release, "slot": outcome.slot, "previous": outcome.previous,
                "changed": outcome.changed, "gpus": outcome.gpus, "warnings": outcome.warnings,
            }
        )  # fmt: skip
    else:
        done = "is in service" if outcome.changed else "was in service already"
        where = f" on GPU {', '.join(map(str, outcome.gpus))}" if outcome.gpus else ""
        print(f"{outcome.slot}: {outcome.release} {done}{where}")
    for warning in outcome.warnings:
        _warn(warning)
    return ExitCode.DONE


def _remove(store: ReleaseStore, args: argparse.Namespace) -> int:
    with store.changing():
        if store.paths.config.exists():
            _recover(Leases(_fleet(store)))
        store.remove_locked(args.name)
    append_event(store.paths.events, "release_removed", release=args.name)
    if args.json:
        emit_json({"name": args.name, "removed": True})
    else:
        print(f"{args.name}: removed")
    return ExitCode.DONE


# -- reading -----------------------------------------------------------------------------------------------------------


def _list(store: ReleaseStore, args: argparse.Namespace) -> int:
    infos = store.list()
    if args.json:
        emit_json({"releases": [_json(info) for info in infos]})
        return ExitCode.DONE
    if not infos:
        print("no releases; make one: appliance release add NAME --model MODEL")
        return ExitCode.DONE
    rows = [["NAME", "SLOT", "MODEL", "SIZE", "ENGINE", "CREATED", "GOLDEN"], *(_row(info) for info in infos)]
    print("\n".join(table(rows, UNCUT)))
    return ExitCode.DONE


def _row(info: ReleaseInfo) -> list[str]:
    if info.release is None:
        return [printable(info.name), "-", "-", "-", "-", "-", f"unusable: {printable(info.problem or '')}"]
    release = info.release
    cells = [release.name, ",".join(info.slots) or "-", release.model_name, format_bytes(release.model_bytes)]
    return [*map(printable, cells), release.engine_version, release.created, ",".join(info.golden) or "none"]


def _show(store: ReleaseStore, args: argparse.Namespace) -> int:
    release = store.get(args.name)
    info = next(info for info in store.list() if info.name == release.name)
    value = _json(info)
    if args.json:
        emit_json(value)
        return ExitCode.DONE
    for key, item in value.items():
        if item not in (None, "", [], {}):
            text = item if isinstance(item, str) else msgspec.json.encode(item).decode()
            print(f"{key:<15} {printable(text)}")
    return ExitCode.DONE


def _verify(store: ReleaseStore, args: argparse.Namespace) -> int:
    """Goes on after a bad release, so that one run shows everything that is wrong."""
    results = []
    for name in args.names or [info.name for info in store.list()]:
        result = _verify_one(store, name, everything=not args.names)
        results.append(result)
        if not args.json:
            for file, problem in result["problems"].items():
                print(f"{printable(name)}: {printable(file)}: {printable(problem)}")
            if result["ok"]:
                files = f"{result['files']} files, {format_bytes(result['bytes'])}"
                print(f"{name}: {paint('ok', '32', sys.stdout)}, {files}")
    good = all(result["ok"] for result in results)
    if args.json:
        emit_json({"ok": good, "releases": results})
    return ExitCode.DONE if good else ExitCode.FAILED


def _verify_one(store: ReleaseStore, name: str, *, everything: bool) -> dict[str, Any]:
    try:
        result = store.verify(name)
    except ApplianceError as error:
        if not everything:
            raise
        return {"name": name, "ok": False, "files": 0, "bytes": 0, "problems": {"release.json": error.message}}
    return {
        "name": name,
        "ok": result.ok,
        "files": result.files_checked,
        "bytes": result.bytes_checked,
        "problems": dict(result.problems),
    }


def _check(store: ReleaseStore, args: argparse.Namespace) -> int:
    from appliance.golden import Verdict, compare

    release, fleet = store.get(args.name), _fleet(store)
    results = []
    for gpu in _running(fleet, release.name, args.gpu):
        found = compare(store.paths, release.name, store.paths.engine_socket(gpu, release.name))
        results.append((gpu, found))
        if not args.json:
            colour = {Verdict.SAME: "32", Verdict.DIFFERENT: "31", Verdict.INCONCLUSIVE: "33"}[found.verdict]
            why = "; ".join(found.differences) or found.reason or f"{found.prompts} prompts and the weights"
            print(f"GPU {gpu}: {paint(found.verdict.value, colour, sys.stdout)}: {printable(why)}")
    verdicts = {found.verdict for _, found in results}
    worst = next(v for v in (Verdict.DIFFERENT, Verdict.INCONCLUSIVE, Verdict.SAME) if v in verdicts)
    if args.json:
        gpus = [
            {
                "gpu": gpu, "verdict": found.verdict.value, "device": found.device,
                "differences": list(found.differences), "reason": found.reason,
            }
            for gpu, found in results
        ]  # fmt: skip
        emit_json({"release": release.name, "verdict": worst.value, "gpus": gpus})
    return worst.exit_code


def _running(fleet: Fleet, release: str, wanted: int | None) -> list[int]:
    """GPUs on which `release` is ready (or just `wanted`). ReleaseError, exit 3, if there is none."""
    found = []
    for gpu in fleet.gpus() if wanted is None else [wanted]:
        try:
            if engine_of(fleet.state(gpu), release).get("state") == "ready":
                found.append(gpu)
        except ApplianceError as error:
            _warn(f"GPU {gpu}: {error.message}")
    if not found:
        where = "no GPU" if wanted is None else f"GPU {wanted}: it is not ready there"
        failed = ReleaseError(f"{release} runs on {where}", hint="see `appliance status`")
        failed.exit_code = ExitCode.INCONCLUSIVE
        raise failed
    return found


def _json(info: ReleaseInfo) -> dict[str, Any]:
    value: dict[str, Any] = {"name": info.name, "slots": list(info.slots), "golden": list(info.golden)}
    value["problem"] = info.problem
    return value | msgspec.to_builtins(info.release) if info.release else value


def _warn(message: str) -> None:
    print(f"{paint('warning:', '33', sys.stderr)} {printable(message)}", file=sys.stderr)


_HANDLERS = {
    "add": _add,
    "list": _list,
    "show": _show,
    "verify": _verify,
    "use": _use,
    "check": _check,
    "remove": _remove,
}
