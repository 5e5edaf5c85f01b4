"""`appliance start|restart` look before they stop anything; `appliance config check` looks at the same."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from host_trees import UUIDS, Commands, make_dirs, show

from appliance import service_cli
from appliance.cli import main
from appliance.command import Result
from appliance.config_check import used_slots
from appliance.fleet import Fleet
from appliance.gpus import bind_slots
from appliance.hostconfig import load_config
from appliance.launcher.__main__ import slot_uuid
from appliance.log import ApplianceError
from appliance.paths import Paths
from tests.certificates import make_certificate

CPU = 'schema = 1\n[gpus]\nbackend = "cpu"\n'


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    paths = Paths.under(tmp_path)
    make_dirs(paths)
    monkeypatch.setenv("APPLIANCE_ROOT", str(tmp_path))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    paths.config.write_text(CPU)
    return paths


def service(verb: str, gpus: list[int], commands: Commands, **given: Any) -> int:
    args = {"command": verb, "gpus": gpus, "no_block": False, "timeout": 900.0, "json": False} | given
    return service_cli.run(argparse.Namespace(**args), commands)


@pytest.mark.parametrize("verb", ["start", "restart"])
@pytest.mark.parametrize("gpus", [[], [0]])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("garbage[", "not TOML: line 1"),
        ("", "no key at all"),
        ("[gpus]\nbackend = 'tpu'", "gpus.backend: 'tpu'"),
        ("[gpus]\nbackend = 'cpu'\n[engine]\narguments = ['--bogus']", "no engine would start with that"),
        ("[gpus]\nbackend = 'cuda'", "slot 0 is CPU-0, but gpus.backend is cuda"),
    ],
)
def test_with_a_configuration_that_units_refuse_nothing_is_stopped(
    paths: Paths, capsys: pytest.CaptureFixture[str], verb: str, gpus: list[int], text: str, says: str
) -> None:
    bind_slots(paths.gpus, ["CPU-0"])
    paths.config.write_text(text)
    commands = Commands({"systemctl": ""})
    with pytest.raises(ApplianceError, match=says.replace("(", "[(]")) as caught:
        service(verb, gpus, commands)
    assert caught.value.exit_code == 4 and commands.calls == [] and caught.value.hint
    assert main(["config", "check"]) == 4  # the same words
    err = capsys.readouterr().err
    assert caught.value.message in err and caught.value.hint in err
    assert service("stop", gpus, commands) == 0, "to stop, nobody needs a configuration"


def test_what_gateways_and_watchdog_refuse_concerns_the_whole_only(paths: Paths) -> None:
    bind_slots(paths.gpus, ["CPU-0"])
    for bad, text, says in (
        (paths.config, f"{CPU}[gateway]\nhost = '0.0.0.0'\n", "key"),
        (paths.healthcheck_config, "schema = 1\n[[rule]]\nkeys = ['xid:31']\naction = 'explode'\n", "explode"),
    ):
        before = bad.read_text() if bad.exists() else ""
        bad.write_text(text)
        commands = Commands({"systemctl": ""})
        with pytest.raises(ApplianceError, match=says) as caught:
            service("restart", [], commands)
        assert caught.value.exit_code == 4 and commands.calls == []
        assert service("restart", [0], commands) == 0
        bad.write_text(before)
    assert service("restart", [], Commands({"systemctl": ""}), no_block=True) == 0


PARTS = ("appliance-gpu@0.service", "appliance-gateway@stable.service", "appliance-gateway@canary.service",
         "appliance-watchdog.service")  # fmt: skip


def systemd(states: dict[str, dict[str, str]], **answers: Any) -> Commands:
    """Whose target wants the canary's controller; all parts run, but for `states`."""
    running = {"ActiveState": "active", "UnitFileState": "enabled", "Result": "success"}
    units = {name: running | states.get(name, {}) for name in (*PARTS, "appliance-canary.service")}
    wants = "systemctl show --property=Wants --value -- appliance.target"
    return Commands({wants: "appliance-canary.service\n", "systemctl show": show(units), **answers, "systemctl": ""})


@pytest.mark.parametrize("verb", ["start", "restart"])
def test_bound_slots_gateways_and_watchdog_run_afterwards_also_where_they_are_not_enabled(
    paths: Paths, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    """A target only wants what is enabled, so they are named. A restart by name would restart them twice."""
    bind_slots(paths.gpus, ["CPU-0"])
    commands = systemd({"appliance-gpu@0.service": {"UnitFileState": "disabled"}})
    assert service(verb, [], commands) == 0
    changes = [call for call in commands.calls if call[1] in ("start", "restart")]
    assert changes == [["systemctl", verb, "--", "appliance.target"], ["systemctl", "start", "--", *PARTS]]
    assert "systemctl enable appliance-gpu@0.service`" in capsys.readouterr().err
    assert service(verb, [], systemd({}), json=True) == 0
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert document["units"] == ["appliance.target", *PARTS] and document["not_enabled"] == [] and not shown.err


@pytest.mark.parametrize("verb", ["start", "restart"])
@pytest.mark.parametrize("unit", [*PARTS, "appliance-canary.service"])
@pytest.mark.parametrize("state", ["failed", "activating", "inactive"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_target_that_is_reached_without_its_parts_is_a_failure(
    paths: Paths, verb: str, unit: str, state: str, fails: bool
) -> None:
    """systemd reaches a target whatever becomes of what it Wants=, and systemctl says 0."""
    bind_slots(paths.gpus, ["CPU-0"])
    job = Result(("systemctl",), 1, b"", b'Job for it failed.\nSee "systemctl status it" for details.\n')
    commands = systemd(
        {unit: {"ActiveState": state, "Result": "start-limit-hit"}},
        **({"systemctl start -- appliance-gpu": job} if fails else {}),
    )
    with pytest.raises(ApplianceError, match=f"{verb} appliance.target: {unit} is {state} .start-limit-hit") as caught:
        service(verb, [], commands)
    assert caught.value.exit_code == 1 and f"systemctl status {unit}`" in str(caught.value.hint)
    assert service(verb, [], systemd({unit: {"ActiveState": state}}), no_block=True) == 0


def test_a_masked_part_says_so(paths: Paths) -> None:
    words = b"Failed to start appliance-watchdog.service: Unit appliance-watchdog.service is masked.\n"
    commands = systemd({}, **{"systemctl start -- appliance-g": Result(("systemctl",), 1, b"", words)})
    with pytest.raises(ApplianceError, match="is masked") as caught:
        service("start", [], commands)
    assert "systemctl unmask" in str(caught.value.hint)


def test_a_slot_that_the_configuration_does_not_use_is_left_alone(paths: Paths) -> None:
    """Its launcher would refuse to start."""
    bind_slots(paths.gpus, UUIDS)
    paths.config.write_text(f"[gpus]\ndevices = ['{UUIDS[1]}']\n")
    commands = Commands({"systemctl": ""})
    assert service("start", [], commands, no_block=True) == 0
    assert "appliance-gpu@1.service" in commands.calls[-1] and "appliance-gpu@0.service" not in commands.calls[-1]


@pytest.mark.parametrize(("backend", "bound", "used"), [("cpu", ["CPU-0", "CPU-1"], [0, 1]), ("cuda", UUIDS, [1])])
def test_who_starts_a_slot_and_who_commands_it_know_the_same_slots(
    paths: Paths, backend: str, bound: list[str], used: list[int]
) -> None:
    """gpus.devices is of GPUs: with backend cpu a list that somebody has left there hides no slot from anybody."""
    bind_slots(paths.gpus, bound)
    paths.config.write_text(f"[gpus]\nbackend = '{backend}'\ndevices = ['{UUIDS[1]}']\n")
    config = load_config(paths.config)
    assert used_slots(config, paths) == used == list(Fleet(paths, config).gpus())
    for number, uuid in enumerate(bound):
        if number in used:
            assert slot_uuid(paths, config, number) == uuid
        else:
            with pytest.raises(ApplianceError, match=r"is not in gpus\.devices"):
                slot_uuid(paths, config, number)


def test_an_expired_certificate_keeps_nothing_from_starting(paths: Paths, tmp_path: Path) -> None:
    """The gateways serve with it and say so; a start that is refused would be worse."""
    certificate, key = make_certificate(tmp_path, days=(-30, -2))
    (paths.etc / "credentials").mkdir()
    certificate.rename(paths.etc / "credentials/tls-cert")
    key.rename(paths.etc / "credentials/tls-key")
    paths.config.write_text(f"{CPU}[gateway]\ntls = true\n")
    assert main(["config", "check"]) == 4
    assert service("start", [], Commands({"systemctl": ""}), no_block=True) == 0


@pytest.mark.parametrize("text", ["", "# nothing\n", "\n\n", "\ufeff"])
def test_a_file_without_a_key_was_cut_off(paths: Paths, capsys: pytest.CaptureFixture[str], text: str) -> None:
    paths.config.write_text(text)
    assert main(["config", "check"]) == 4
    err = capsys.readouterr().err
    assert f"{paths.config}: schema: there is no key at all" in err and "write schema = 1" in err
    paths.config.write_text(f"{text}\nschema = 1\n")
    assert main(["config", "check"]) == 0


def test_config_check_compares_the_backend_with_the_slots(paths: Paths, capsys: pytest.CaptureFixture[str]) -> None:
    bind_slots(paths.gpus, UUIDS)
    paths.config.write_text("schema = 1\n")
    assert main(["config", "check"]) == 0
    bind_slots(paths.gpus, ["CPU-0"])
    assert main(["config", "check"]) == 4
    err = capsys.readouterr().err
    assert f"slot {len(UUIDS)} is CPU-0, but gpus.backend is cuda" in err and 'backend = "cpu" below [gpus]' in err
