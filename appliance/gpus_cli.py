"""`appliance gpus list|bind`: slot numbers and UUIDs. bind is done at install; what is bound is never renumbered."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from appliance.arguments import add_common, set_epilog
from appliance.events import append_event
from appliance.gpus import Gpu, bind_slots, mig_gpus, read_slots, unready_gpus, visible_gpus
from appliance.hostconfig import HostConfig, load_config
from appliance.log import ApplianceError, ExitCode, emit_json
from appliance.paths import Paths
from appliance.terminal import table, width_of

EPILOG = """\
exit codes: 0 done, 1 a bound GPU is not there (list), 4 refused: MIG, no GPU, a configured UUID is missing (bind)
"""


class BindRefused(ApplianceError):
    """Binding would promise a GPU that cannot serve."""

    exit_code = ExitCode.REFUSED


def configure(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    set_epilog(parser, EPILOG)
    verbs = parser.add_subparsers(title="verbs", dest="verb", metavar="VERB", required=True)
    texts = {
        "list": "show slots, the GPUs in them, and GPUs without a slot",
        "bind": "give every GPU that may be used and has no slot yet the next number",
    }
    for name, text in texts.items():
        sub = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        add_common(sub)
        if name == "bind":
            sub.add_argument("--dry-run", action="store_true", help="show what would be bound")


def run(args: argparse.Namespace, root: Path = Path("/")) -> int:
    return _VERBS[args.verb](args, Paths.default(), root)


def _gpus(root: Path) -> list[Gpu]:
    return visible_gpus(root / "proc/driver/nvidia/gpus", root / "sys/bus/pci/devices")


def wanted_uuids(config: HostConfig, root: Path) -> list[str]:
    """The UUIDs that this configuration gives to the appliance, in the order of device minors. Refuses what cannot
    serve: MIG, a GPU that has not come up, a configured GPU that is not there, none at all."""
    if config.gpus.backend == "cpu":
        return [f"CPU-{number}" for number in range(config.gpus.cpu_slots)]
    nvidia = root / "proc/driver/nvidia"
    gpus, devices = _gpus(root), config.gpus.devices
    wanted = [gpu for gpu in gpus if config.gpus.includes(gpu.uuid)]
    if divided := [gpu.uuid for gpu in wanted if gpu.minor in mig_gpus(nvidia)]:
        raise BindRefused(
            f"MIG is on: {', '.join(divided)}; MIG is not supported",
            hint="switch it off (nvidia-smi -i UUID -mig 0, then a GPU reset), or leave the GPU out of gpus.devices",
        )
    if devices == "all" and (unready := unready_gpus(nvidia / "gpus")):
        raise BindRefused(
            f"the driver has no UUID yet for {', '.join(unready)}",
            hint="start nvidia-persistenced (or run nvidia-smi once), then bind again; if it stays so, see dmesg",
        )
    seen = {gpu.uuid for gpu in gpus}
    if devices != "all" and (missing := [uuid for uuid in devices if uuid not in seen]):
        raise BindRefused(
            f"gpus.devices names {', '.join(missing)}; the driver shows: {', '.join(sorted(seen)) or 'none'}",
            hint="correct appliance.toml, or see `appliance doctor --only nvidia`",
        )
    if not wanted:
        raise BindRefused(
            "no GPU is there",
            hint='see `appliance doctor --only nvidia`; for a host without one, write backend = "cpu" in [gpus]',
        )
    return [gpu.uuid for gpu in wanted]


def _bind(args: argparse.Namespace, paths: Paths, root: Path) -> int:
    uuids = wanted_uuids(load_config(paths.config), root)
    known = {entry["uuid"] for entry in read_slots(paths.gpus).values()}
    new = [uuid for uuid in uuids if uuid not in known]
    numbers: list[int] = []
    if not args.dry_run:
        numbers = bind_slots(paths.gpus, uuids)
        for number in numbers:
            append_event(paths.events, "gpu-bound", gpu=number, uuid=read_slots(paths.gpus)[number]["uuid"])
    slots = {number: entry["uuid"] for number, entry in read_slots(paths.gpus).items()}
    if args.json:
        emit_json({"schema": 1, "changed": bool(numbers), "new": new, "slots": slots, "dry_run": args.dry_run})
    elif args.dry_run:
        print("\n".join(f"would bind {uuid}" for uuid in new) or "nothing to bind")
    else:
        print("\n".join(f"gpu {number}: {slots[number]}" for number in numbers) or "nothing to bind")
    return ExitCode.DONE


def _list(args: argparse.Namespace, paths: Paths, root: Path) -> int:
    slots, visible = read_slots(paths.gpus), {gpu.uuid: gpu for gpu in _gpus(root)}
    rows: list[dict[str, Any]] = []
    for number, entry in slots.items():
        gpu = visible.pop(entry["uuid"], None)
        present = gpu is not None or entry["uuid"].startswith("CPU-")
        rows.append({"slot": number, "uuid": entry["uuid"], "present": present, "now": gpu and asdict(gpu)})
    rows += [{"slot": None, "uuid": gpu.uuid, "present": True, "now": asdict(gpu)} for gpu in visible.values()]
    missing = [row for row in rows if not row["present"]]
    unready = unready_gpus(root / "proc/driver/nvidia/gpus")
    if args.json:
        emit_json({"schema": 1, "ok": not missing, "gpus": rows, "unready": unready})
    elif not rows and not unready:
        print("no slots and no GPUs; bind them: appliance gpus bind")
    else:
        lines = [["SLOT", "UUID", "MINOR", "PCI", "NUMA", "MODEL"], *(_row(row) for row in rows)]
        print("\n".join(table(lines, width_of(sys.stdout))))
        for address in unready:
            print(f"{address}: not up yet, the driver has no UUID for it")
    return ExitCode.FAILED if missing else ExitCode.DONE


def _row(row: dict[str, Any]) -> list[str]:
    slot = "-" if row["slot"] is None else str(row["slot"])
    if row["now"] is None:
        return [slot, row["uuid"], "-", "-", "-", "-" if row["present"] else "NOT THERE"]
    gpu = row["now"]
    numa = "-" if gpu["numa_node"] is None else str(gpu["numa_node"])
    return [slot, row["uuid"], str(gpu["minor"]), gpu["pci"], numa, gpu["model"]]


_VERBS: dict[str, Callable[[argparse.Namespace, Paths, Path], int]] = {"list": _list, "bind": _bind}
