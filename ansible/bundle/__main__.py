"""Builds the bundle: one file with everything that a bare Debian 12 host needs, so that the host stays offline.

    python ansible/bundle [--gpu] [--version V] [--output DIR]      (`make bundle`, `make bundle GPU=1`)

Runs on the controller, from a checkout, with Python 3.11 (our compiled cores are built for the host's Python). A plain
program and no part of the product: nothing of it goes to a host. What it makes depends on its inputs only: the same
tree, lock files and Debian packages give the same bytes.

Call order: wheels.py:own_wheel, wheels.py:download -> debs.py:download -> host_tree.py:collect -> archive.py:write.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # for appliance.log, where the venv does not have it

import archive  # noqa: E402
import debs  # noqa: E402
import host_tree  # noqa: E402
import wheels  # noqa: E402
from appliance import __version__  # noqa: E402
from appliance.log import ApplianceError, Progress, UsageError, format_bytes, report_error  # noqa: E402

EPOCH = 1767225600  # 2026-01-01; fixed, so that equal trees of different commits make equal bundles
VERSION = re.compile(r"[0-9]+(\.[0-9]+)*((a|b|rc|\.post|\.dev)[0-9]+)?(\+[a-z0-9]+(\.[a-z0-9]+)*)?")


def main() -> int:
    parser = argparse.ArgumentParser(prog="bundle", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gpu", action="store_true", help="with PyCUDA, cuda-bindings and the compiled kernels")
    parser.add_argument("--version", default=__version__, help="default: the tree's (%(default)s)")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", metavar="DIR", help="default: dist")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "bundle", metavar="DIR", help="of downloads")
    parser.add_argument(
        "--debian-sources", type=Path, metavar="FILE",
        help="apt sources of Debian 12 (sources.list format); default: this machine's own, where it has them",
    )  # fmt: skip
    args = parser.parse_args()
    os.environ.setdefault("SOURCE_DATE_EPOCH", str(EPOCH))
    os.umask(0o022)  # modes are in the wheel
    try:
        args.cache.mkdir(parents=True, exist_ok=True)
        with (args.cache / "lock").open("w") as lock:  # apt and pip share the cache: one build of a checkout at a time
            fcntl.flock(lock, fcntl.LOCK_EX)
            print(build(args))
    except ApplianceError as error:
        report_error(error.message, hint=error.hint, code=error.exit_code)
        return error.exit_code
    return 0


def build(args: argparse.Namespace) -> Path:
    """Returns the bundle. Nothing of that name is there until it is complete."""
    if not VERSION.fullmatch(args.version):
        raise UsageError(f"{args.version!r} is no version", hint="like 1.2.3, 1.2.3rc1 or 1.2.3+site4 (PEP 440)")
    progress = Progress()
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bundle-") as name:
        work = Path(name)
        content = work / "content"
        content.mkdir()
        progress.stage("building our wheel")
        tree = wheels.copy_tree(ROOT, work / "tree", version=args.version, gpu=args.gpu)
        own = wheels.own_wheel(tree, content / "wheels", version=args.version)
        progress.stage("fetching the locked wheels")
        wheels.download(ROOT / ".ci", content / "wheels", cache=args.cache / "wheels", gpu=args.gpu)
        wheels.write_requirements(content)
        progress.stage("fetching the Debian packages")
        packages = debs.download(content / "debs", args.cache / "apt", args.debian_sources)
        progress.stage("collecting units, manual page and completion")
        host_tree.collect(ROOT, tree, content, wheels=content / "wheels", packages=packages)
        progress.stage("packing")
        manifest = archive.make_manifest(content, version=args.version, gpu=args.gpu, packages=packages)
        target = archive.write(content, manifest, args.output)
    progress.stage(f"{own.name}, {len(packages)} Debian packages, {format_bytes(target.stat().st_size)}")
    return target


if __name__ == "__main__":
    sys.exit(main())
