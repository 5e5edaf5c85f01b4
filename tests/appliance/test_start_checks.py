"""`appliance start|restart` look before they stop anything; `appliance config check` looks at the same."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from host_trees import UUIDS, Commands, make_dirs

from appliance import service_cli
from appliance.cli import main
from appliance.gpus import bind_slots
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
