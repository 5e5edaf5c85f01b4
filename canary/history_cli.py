"""`canary list`, `events`, `explain`: what has been. Read from disk; no controller is needed."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from appliance.arguments import add_common, set_epilog
from appliance.log import ExitCode, emit_json, printable
from appliance.paths import Paths
from appliance.terminal import table, width_of
from canary.arguments import run_id
from canary.asking import NoRun, read_document
from canary.run import to_state
from canary.store import EVENT_PREFIX, Store
from canary.view import explanation, list_rows, short_digests

_FOLLOW_SECONDS = 0.25
EPILOG = """\
JSON: `list` one document; `events` one object a line (JSON Lines), also with -f. Text shows 12 digits of a digest.
"""
_SHOWN_FIRST = ("ts", "event", "pid", "run", "seq")


def configure(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    add_common(parser)
    set_epilog(parser, EPILOG)
    verb = parser.prog.rpartition(" ")[2]
    if verb in ("list", "events"):
        parser.add_argument("-n", type=int, default=20, metavar="N", help="the last N (20)")
    if verb in ("events", "explain"):
        parser.add_argument("run", metavar="RUN", nargs="?", type=run_id, help="only this run")
    if verb == "events":
        parser.add_argument("-f", "--follow", action="store_true", help="go on with what comes")


def run(args: argparse.Namespace) -> int:
    paths = Paths.default()
    if args.command == "list":
        return _list(paths, args)
    if args.command == "events":
        return _events(paths, args)
    document = read_document(paths, args.run)
    if args.json:
        emit_json(document["run"])
    else:
        print("\n".join(printable(line) for line in explanation(document["run"], sys.stdout)))
    return ExitCode.DONE


def _list(paths: Paths, args: argparse.Namespace) -> int:
    skipped: list[str] = []
    runs = [to_state(run) for run in Store(paths).history(skipped)][-args.n :]
    for problem in skipped:
        print(printable(f"left out: {problem}"), file=sys.stderr)
    if args.json:
        emit_json({"schema": 1, "runs": runs, "skipped": skipped})
    elif not runs:
        text, hint = Store(paths).no_run()
        raise NoRun(text, hint=hint)
    else:
        print("\n".join(table(list_rows(runs, time.time()), width_of(sys.stdout))))
    return ExitCode.DONE


def _events(paths: Paths, args: argparse.Namespace) -> int:
    follower = Follower(paths.events)  # begins at the end before the past is read: nothing falls between
    for event in list(Store(paths).events(args.run))[-args.n :]:
        _print(event, as_json=args.json)
    try:
        while args.follow:
            for event in follower.new():
                if str(event.get("event", "")).startswith(EVENT_PREFIX) and args.run in (None, event.get("run")):
                    _print(event, as_json=args.json)
            time.sleep(_FOLLOW_SECONDS)
    except KeyboardInterrupt:
        pass
    return ExitCode.DONE


def _print(event: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(event), flush=True)
        return
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.get("ts", 0)))
    rest = "  ".join(f"{key}={value}" for key, value in event.items() if key not in _SHOWN_FIRST)
    name = str(event["event"]).removeprefix(EVENT_PREFIX)
    print(printable(f"{at}  run {event.get('run')}  {name:<22} {short_digests(rest)}"), flush=True)


class Follower:
    """New whole lines of the event log, also over a rotation."""

    def __init__(self, path: Path) -> None:
        self._path, self._rest = path, b""
        self._file = path.open("rb") if path.exists() else None
        if self._file is not None:
            self._file.seek(0, os.SEEK_END)

    def new(self) -> Iterator[dict[str, Any]]:
        if self._file is None:
            if not self._path.exists():
                return
            self._file = self._path.open("rb")
        yield from self._lines(self._file.read())
        try:
            moved = os.stat(self._path).st_ino != os.fstat(self._file.fileno()).st_ino
        except FileNotFoundError:
            return
        if moved:
            yield from self._lines(self._file.read())
            self._file.close()
            self._file = self._path.open("rb")
            yield from self._lines(self._file.read())

    def _lines(self, data: bytes) -> Iterator[dict[str, Any]]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict) and "event" in event:
                yield event
