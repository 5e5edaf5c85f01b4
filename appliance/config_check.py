"""Whether this host's units would start with a configuration: what `appliance config check` looks at, and what
`appliance start` and `restart` look at before they touch anything. Errors name file and key (exit code 4)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from appliance.gpus import read_slots
from appliance.hostconfig import HostConfig, HostConfigError, load_config
from appliance.paths import Paths


def check_config(path: Path, paths: Paths, *, gpus: Iterable[int] = ()) -> HostConfig:
    """The configuration in `path`, which launchers (of `gpus`, else of all bound slots) would start with."""
    config = load_config(path)
    _check_engine_arguments(config, path)
    slots, wanted = read_slots(paths.gpus), set(gpus)
    for number, entry in slots.items():
        if not wanted or number in wanted:
            check_backend(config, number, str(entry["uuid"]), path)
    return config


def check_backend(config: HostConfig, number: int, uuid: str, path: Path) -> None:
    """Refused: a slot without a GPU, where engines are to run on GPUs."""
    if config.gpus.backend == "cuda" and not uuid.startswith("GPU-"):
        raise HostConfigError(
            f"slot {number} is {uuid}, but gpus.backend is cuda",
            hint=f'without a GPU it is backend = "cpu" below [gpus] in {path}; `appliance gpus list` shows the slots',
        )


def used_slots(config: HostConfig, paths: Paths) -> list[int]:
    """Bound slots that the configuration gives to the appliance: the launchers of the others refuse to start."""
    from appliance.fleet import Fleet  # launchers, which import this module, have no use for it

    return list(Fleet(paths, config).gpus())


def check_units(paths: Paths, gpus: Iterable[int] = ()) -> HostConfig:
    """Refused: what the launchers of `gpus` would refuse at their start; without numbers, what any of our units would.
    Credentials are root's to read: others leave them to the gateways."""
    wanted = list(gpus)
    config = check_config(paths.config, paths, gpus=wanted)
    if not wanted:
        _check_gateways(config, paths)
        from healthcheck.policy import load_policy  # the watchdog's; for this alone

        load_policy(paths.healthcheck_config)
    return config


def _check_engine_arguments(config: HostConfig, path: Path) -> None:
    from appliance.engine_options import problem_of_host_arguments  # loads the engine's code, which launchers need not

    if found := problem_of_host_arguments(config):
        key, problem = found
        hint = "options of `python -m engine`, see its --help; most have a key of their own in [engine]"
        raise HostConfigError(f"{path}: {key}: no engine would start with that: {problem}", hint=hint)


def _check_gateways(config: HostConfig, paths: Paths) -> None:
    """A certificate that has expired is no reason not to start: a gateway serves with it, and says so."""
    from appliance.gateway.settings import check_ports, check_startable

    check_ports(config)
    if os.geteuid() == 0:
        check_startable(config, paths, paths.etc / "credentials")
