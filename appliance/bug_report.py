"""`appliance bug-report`: one .tar.gz with what a maintainer needs to see. Changes nothing else on the host.

Bounded in size and time; a part that fails is noted in report.json and the others go on. Secrets stay here: credentials
are never read into it, whatever looks like one is blotted out of every part, and so is every secret of
/etc/appliance/credentials, wherever it appears.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from appliance import command
from appliance.arguments import add_common, set_epilog
from appliance.doctor.command import GROUPS, default_host
from appliance.doctor.report import run_checks
from appliance.events import last_events
from appliance.log import ApplianceError, ExitCode, Progress, emit_json, format_bytes
from appliance.paths import Paths
from appliance.redact import Redactor
from appliance.statefile import read_bounded
from appliance.status import read_status
from appliance.version_cli import versions

DIRECTORY = "var/tmp"  # as sos report: on a disk, there after a reboot, and not where the operator happens to stand
MAX_PART_BYTES = 4 << 20
MAX_TOTAL_BYTES = 48 << 20
_MAX_STATE_FILES = 200
_EVENTS = 2000
_JOURNAL_LINES = 5000
_COMMAND_SECONDS = 20.0
EPILOG = """\
examples:
  appliance bug-report                         /var/tmp/appliance-bug-report-TIME.tar.gz
  appliance bug-report --output /srv/reports   a directory that is there: a file of that name in it
  appliance bug-report --output case7.tar.gz   this file
Look into it before you send it: secrets are blotted out, but names of hosts, releases and users are not.
exit codes: 0 written (report.json says which parts could not be had), 1 not written
"""
_CHOOSE = "choose another place with --output"
Part = tuple[str, Callable[[], bytes]]


class PartError(ApplianceError):
    """A part that cannot be had here."""


def configure(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    add_common(parser)
    set_epilog(parser, EPILOG)
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE|DIR",
        help="this file, or a directory to put it into (default: /var/tmp/appliance-bug-report-TIME.tar.gz)",
    )


def run(args: argparse.Namespace, root: Path = Path("/"), run_command: command.Runner = command.run) -> int:
    paths = Paths.default()
    output: Path = args.output or root / DIRECTORY
    if output.is_dir():
        output /= time.strftime("appliance-bug-report-%Y%m%dT%H%M%SZ.tar.gz", time.gmtime())
    progress = Progress(quiet=args.json)
    try:
        summary = write_report(
            output, parts(paths, root, run_command), Redactor.of(paths.etc / "credentials"), progress
        )
    finally:
        progress.finish()
    failed = [str(part["name"]) for part in summary if part["error"]]
    if args.json:
        emit_json({"schema": 1, "file": str(output), "bytes": output.stat().st_size, "parts": summary})
    else:
        print(f"{output}: {format_bytes(output.stat().st_size)}, {len(summary) - len(failed)} parts")
        if failed:
            print(f"not to be had here: {', '.join(failed)}")
    return ExitCode.DONE


def write_report(
    output: Path, wanted: Iterator[Part], redactor: Redactor, progress: Progress
) -> list[dict[str, object]]:
    """Writes the archive (mode 0600, never over another file); what became of each part."""
    summary: list[dict[str, object]] = []
    total = 0
    fd = _create(output)
    try:
        with open(fd, "wb") as file, gzip.GzipFile(fileobj=file, mode="wb", filename="") as packed:
            with tarfile.open(fileobj=packed, mode="w") as archive:
                for name, make in wanted:
                    progress.stage(name)
                    data, error = _part(make, redactor)
                    cut = len(data) > MAX_PART_BYTES or total + len(data) > MAX_TOTAL_BYTES
                    data = data[-min(MAX_PART_BYTES, MAX_TOTAL_BYTES - total) :] if total < MAX_TOTAL_BYTES else b""
                    total += len(data)
                    summary.append({"name": name, "bytes": len(data), "cut": cut, "error": error})
                    if error is None:
                        _add(archive, name, data)
                _add(archive, "report.json", json.dumps({"schema": 1, "parts": summary}, indent=1).encode())
    except BaseException:
        output.unlink(missing_ok=True)
        raise
    return summary


def _create(output: Path) -> int:
    try:
        return os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:
        parent = output.parent
        raise ApplianceError(
            f"cannot write {output}: there is no directory {parent}", hint=f"make it (mkdir -p {parent}), or {_CHOOSE}"
        ) from None
    except FileExistsError:
        raise ApplianceError(f"{output} is there already", hint=f"remove it, or {_CHOOSE}") from None
    except NotADirectoryError:
        raise ApplianceError(f"cannot write {output}: {output.parent} is no directory", hint=_CHOOSE) from None
    except PermissionError:
        hint = f"run it as root, or {_CHOOSE}"
        raise ApplianceError(f"cannot write {output}: permission denied", hint=hint) from None


def _part(make: Callable[[], bytes], redactor: Redactor) -> tuple[bytes, str | None]:
    """(redacted data, None), or (empty, why it failed)."""
    try:
        return redactor.clean(make()), None
    except ApplianceError as error:
        return b"", redactor.clean(error.message.encode()).decode(errors="replace")
    except Exception as error:
        return b"", redactor.clean(f"{type(error).__name__}: {error}".encode()).decode(errors="replace")


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(f"appliance-bug-report/{name}")
    entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
    archive.addfile(entry, io.BytesIO(data))


def parts(paths: Paths, root: Path, run_command: command.Runner) -> Iterator[Part]:
    """Everything that goes in, cheap and sure things first."""

    def output_of(*argv: str) -> Callable[[], bytes]:
        return lambda: _output(run_command, argv)

    def json_of(make: Callable[[], object]) -> Callable[[], bytes]:
        return lambda: json.dumps(make(), indent=1, default=str).encode()

    def file(path: Path) -> Callable[[], bytes]:
        return lambda: read_bounded(path, MAX_PART_BYTES)

    yield "versions.json", json_of(lambda: versions(paths, root))
    yield "status.json", json_of(lambda: read_status(paths, root))
    yield "config.toml", file(paths.config)
    yield "events.jsonl", lambda: b"".join(json.dumps(e).encode() + b"\n" for e in last_events(paths.events, _EVENTS))
    yield "doctor.json", json_of(lambda: [line.as_json() for line in run_checks(GROUPS, default_host())])
    for path in _state_files(paths):
        yield f"state{path}", file(path)
    for name in ("proc/driver/nvidia/version", "proc/devices", "proc/cmdline", "proc/meminfo", "etc/os-release"):
        yield name, file(root / name)
    for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        yield str(path.relative_to(root)), file(path)
    yield "units.txt", output_of("systemctl", "status", "--no-pager", "--full", "--lines=0", "appliance*")
    yield "unit-files.txt", output_of("systemctl", "cat", "--no-pager", "appliance*")
    yield "cgroups.txt", output_of("systemd-cgls", "--no-pager", "--full", "--unit", "appliance.slice")
    yield "journal.txt", _journal(run_command, "--unit=appliance-*", "--unit=appliance.*")
    yield "kernel.txt", _journal(run_command, "--dmesg", "--boot")
    yield "iptables.txt", lambda: _ours(_output(run_command, ("iptables-save",)))
    yield "nft.txt", output_of("nft", "list", "table", "inet", "appliance_anchor")
    yield "disk.txt", output_of("df", "-h", "--", *(str(path) for path in (paths.state, paths.models) if path.exists()))
    yield "nvidia-smi.txt", output_of("nvidia-smi", "-q")


def _state_files(paths: Paths) -> list[Path]:
    found = [*paths.state.glob("*.json"), *(paths.state / "holds").glob("*.json")]
    found += [*paths.releases.glob("*/release.json"), *paths.run.glob("gpu*/state.json")]
    return sorted(path for path in found if not path.name.startswith("."))[:_MAX_STATE_FILES]


def _journal(run_command: command.Runner, *options: str) -> Callable[[], bytes]:
    argv = ("journalctl", "--no-pager", "--quiet", "--output=short-iso-precise", f"--lines={_JOURNAL_LINES}", *options)
    return lambda: _output(run_command, argv)


def _output(run_command: command.Runner, argv: tuple[str, ...]) -> bytes:
    """What the command printed. `systemctl status` ends with 3 where a unit is down: output counts, not the code."""
    result = run_command(argv, timeout=_COMMAND_SECONDS, limit=MAX_PART_BYTES)
    if not result.stdout and not result.ok:
        raise PartError(result.why())
    note = b"" if result.ok else f"\n[{result.why()}]\n".encode()
    return result.stdout + note


def _ours(rules: bytes) -> bytes:
    """Tables, and lines that name our chains: other people's rules are none of a maintainer's business."""
    return b"".join(line for line in rules.splitlines(keepends=True) if line.startswith(b"*") or b"APPLIANCE" in line)
