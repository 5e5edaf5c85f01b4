"""`appliance config check|show|defaults`: appliance.toml for people and for Ansible's `validate:`."""

from __future__ import annotations

import argparse
import json
import os
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from appliance.arguments import add_common, set_epilog
from appliance.config_check import check_config
from appliance.hostconfig import SECTIONS, HostConfig, allowed_values, description, load_config
from appliance.log import ExitCode, UsageError, emit_json
from appliance.paths import Paths
from appliance.statefile import read_bounded

EPILOG = """\
The check also asks this host: the engine's own parser, whether its slots go with gpus.backend, whether a port
below 1024 may be bound (that needs /usr/share/doc/appliance/examples/low-port.conf), and with credentials whether keys
and certificate can be used. `appliance start` and `restart` look at the same first, and stop nothing if it is wrong.
A certificate that has expired, or is not valid yet, is refused here (4), since clients refuse it; a gateway that is
started with it serves nevertheless and warns, so that no restart makes things worse. An address of [gateway] that
this host does not have is no error: it may come later, and the gateway waits for it.

exit codes: 0 the file can be used; 4 it cannot (the message names file, key and what is allowed)
"""


def configure(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    set_epilog(parser, EPILOG)
    verbs = parser.add_subparsers(title="verbs", dest="verb", metavar="VERB", required=True)
    for name, text in _TEXTS.items():
        sub = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        add_common(sub)
        if name != "defaults":
            sub.add_argument(
                "file", metavar="FILE", nargs="?", type=Path, help="default: /etc/appliance/appliance.toml"
            )
        if name == "check":
            sub.add_argument(
                "--credentials",
                metavar="DIR",
                type=Path,
                help="also whether gateways can serve it with the API keys and the certificate there (default without "
                "FILE, as root: /etc/appliance/credentials)",
            )


def run(args: argparse.Namespace) -> int:
    return _VERBS[args.verb](args)


def _check(args: argparse.Namespace) -> int:
    paths = Paths.default()
    path = args.file or paths.config
    config = check_config(path, paths)
    from appliance.gateway.settings import check_ports, check_servable

    check_ports(config)
    credentials = args.credentials
    if credentials is not None and not credentials.is_dir():
        raise UsageError(f"{credentials} is no directory", hint="name the one with api-keys and tls-cert")
    if credentials is None and args.file is None and os.geteuid() == 0:
        credentials = paths.etc / "credentials"
    if credentials is not None:
        check_servable(config, paths, credentials)
    if args.json:
        emit_json({"schema": 1, "ok": True, "file": str(path), "credentials": credentials and str(credentials)})
    else:
        print(f"{path}: ok" + ("" if credentials else " (keys and certificate not looked at)"))
    return ExitCode.DONE


def _show(args: argparse.Namespace) -> int:
    path = args.file or Paths.default().config
    config = load_config(path)
    written = {name: set(table) for name, table in tomllib.loads(_text(path)).items() if isinstance(table, dict)}
    if args.json:
        keys = sorted(f"{section}.{key}" for section, names in written.items() for key in names)
        emit_json({"schema": 1, "file": str(path), "config": msgspec.to_builtins(config), "set": keys})
    else:
        print("\n".join(toml_lines(config, written=written)))
    return ExitCode.DONE


def _text(path: Path) -> str:
    return read_bounded(path).decode("utf-8-sig")


def _defaults(args: argparse.Namespace) -> int:
    if args.json:
        emit_json({"schema": 1, "config": msgspec.to_builtins(HostConfig())})
    else:
        print("\n".join(toml_lines(HostConfig())))
    return ExitCode.DONE


def toml_lines(config: HostConfig, *, written: dict[str, set[str]] | None = None) -> Iterator[str]:
    """`config` as TOML. With `written` (section -> keys in the file) it says what is a default, without it what each
    key means; keys without a value are commented out, since TOML has no null."""
    yield f"schema = {config.schema}"
    for section, table in SECTIONS.items():
        if written is None:
            yield from ("", f"# {' '.join((table.__doc__ or '').split())}", f"[{section}]")
        else:
            yield from ("", f"[{section}]")
        for key in table.__struct_fields__:
            value = getattr(getattr(config, section), key)
            if written is None:
                yield f"# {description(table, key)} ({allowed_values(table, key)})"
            line = f"# {key} =" if value is None else f"{key} = {toml_value(value)}"
            yield line if written is None or key in written.get(section, ()) else f"{line}  # default"


def toml_value(value: Any) -> str:
    """One TOML value. Strings: JSON's escapes are TOML's, but DEL must be escaped too and pairs of surrogates must
    not be."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    return json.dumps(value)


_TEXTS = {
    "check": "check a configuration file; nothing is changed",
    "show": "show the configuration as it counts, defaults included",
    "defaults": "print a configuration with all keys, what they mean and their defaults",
}
_VERBS: dict[str, Callable[[argparse.Namespace], int]] = {"check": _check, "show": _show, "defaults": _defaults}
