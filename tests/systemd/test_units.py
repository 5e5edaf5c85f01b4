"""The units by systemd's own judgement, and the rules that it does not know."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from unit_files import FOLDER, INSTANCES, SERVICES, UNITS, make_root, run, settings, tool, values

# systemd-analyze security of systemd 252; also in systemd/README.md. The gateway's limit is 2.0.
SCORES = {
    "appliance-gpu@.service": 2.0,
    "appliance-gateway@.service": 1.3,
    "appliance-gpu-nodes.service": 2.4,
    "appliance-canary.service": 2.1,
    "appliance-netfilter.service": 1.6,
    "appliance-report@.service": 0.9,
    "appliance-watchdog.service": 1.7,
    "appliance-gpu-reset@.service": 2.2,
}
# What a unit without a special job has. A unit that differs must say so, in a line of its own with the reason above it.
HARDENED = {
    "NoNewPrivileges": "yes", "ProtectSystem": "strict", "ProtectHome": "yes", "PrivateTmp": "yes",
    "PrivateMounts": "yes", "ProtectKernelTunables": "yes", "ProtectKernelModules": "yes", "ProtectKernelLogs": "yes",
    "ProtectControlGroups": "yes", "ProtectHostname": "yes", "ProtectClock": "yes", "ProtectProc": "invisible",
    "ProcSubset": "pid", "DevicePolicy": "closed", "PrivateNetwork": "yes", "MemoryDenyWriteExecute": "yes",
    "PrivateUsers": "yes", "RestrictNamespaces": "yes", "RestrictSUIDSGID": "yes", "RestrictRealtime": "yes",
    "LockPersonality": "yes", "SystemCallArchitectures": "native", "SystemCallErrorNumber": "EPERM",
    "CapabilityBoundingSet": "", "RestrictAddressFamilies": "AF_UNIX",
}  # fmt: skip
NVIDIA = ("nvidia-persistenced.service", "nvidia-fabricmanager.service")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tool("systemd-analyze")
    return make_root(tmp_path_factory.mktemp("root"))


def verify(root: Path, unit: str) -> subprocess.CompletedProcess[str]:
    path = root / "usr/lib/systemd/system" / INSTANCES.get(unit, unit)
    return run(tool("systemd-analyze"), "verify", f"--root={root}", "--recursive-errors=no", "--man=no", path)


@pytest.mark.parametrize("unit", UNITS)
def test_systemd_finds_nothing_wrong(root: Path, unit: str) -> None:
    result = verify(root, unit)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("ProtectSystem=strict", "ProtectSytem=strict"),  # an unknown key
        ("StartLimitBurst=5\n\n[Service]", "\n[Service]\nStartLimitIntervalSec=300"),  # in the wrong section
        ("Restart=on-failure", "Restart=on-falure"),
        ("/usr/lib/appliance/current/venv/bin/python -P -m appliance.launcher --gpu %i\n", "/usr/bin/no-such\n"),
    ],
)
def test_what_systemd_would_ignore_is_found(tmp_path: Path, right: str, wrong: str) -> None:
    """verify returns 0 for unknown keys unless it is asked the right way; this holds the way we ask."""
    root = make_root(tmp_path / "root")
    unit = root / "usr/lib/systemd/system/appliance-gpu@.service"
    assert right in unit.read_text()
    unit.write_text(unit.read_text().replace(right, wrong, 1))
    assert verify(root, "appliance-gpu@.service").returncode != 0


@pytest.mark.parametrize("unit", SERVICES)
def test_security_score(unit: str) -> None:
    command = (tool("systemd-analyze"), "security", "--offline=true", f"--threshold={SCORES[unit] * 10:.0f}")
    result = run(*command, FOLDER / unit)
    assert result.returncode == 0, result.stdout
    measured = re.search(r"exposure level for \S+: (\d+\.\d)", result.stdout)
    assert measured and float(measured[1]) == SCORES[unit], "better than before: write the new figure down"
    assert re.search(rf"^\| `{re.escape(unit.split('@')[0])}[^|]*\|[^|]*\|[^|]*\| {SCORES[unit]} \|", readme(), re.M)


def test_scores_stay_below_what_was_promised() -> None:
    assert set(SCORES) == set(SERVICES)
    assert SCORES["appliance-gateway@.service"] <= 2.0


def readme() -> str:
    return (FOLDER / "README.md").read_text()


@pytest.mark.parametrize("unit", SERVICES)
def test_private_devices_is_on_nowhere(unit: str) -> None:
    """nixpkgs#331069 and others: a hardening sweep hid /dev/nvidia* from the service."""
    assert not {value.lower() for value in values(unit, "PrivateDevices")} & {"yes", "true", "on", "1"}


@pytest.mark.parametrize("unit", SERVICES)
@pytest.mark.parametrize("key", HARDENED)
def test_each_exception_is_written_with_its_reason(unit: str, key: str) -> None:
    found = [setting for setting in settings(unit) if setting.key == key]
    if unit == "appliance-gateway@.service" and key == "RestrictAddressFamilies":
        assert [setting.value for setting in found] == ["AF_UNIX AF_INET AF_INET6"]
        return
    assert found, f"{key}= is not written in {unit}"
    for setting in found:
        assert setting.value == HARDENED[key] or setting.commented, f"{key}={setting.value}: the reason above it"


@pytest.mark.parametrize("unit", SERVICES)
def test_remove_ipc_is_off(unit: str) -> None:
    """Engines and gateways have the same user: what one leaves behind may be in use by the other."""
    assert values(unit, "RemoveIPC") == []


@pytest.mark.parametrize("unit", SERVICES)
def test_the_engine_can_have_what_cuda_needs(unit: str) -> None:
    if unit != "appliance-gpu@.service":
        return
    assert values(unit, "ProcSubset") == ["all"], "/proc/driver/nvidia and /proc/devices"
    assert values(unit, "ProtectProc") == ["default"]
    assert values(unit, "LimitMEMLOCK") == ["infinity"]
    assert "DeviceAllow" not in {setting.key for setting in settings(unit)}, "devices belong to the scopes, by path"
    filters = values(unit, "SystemCallFilter")
    assert not any(group in line for line in filters if line.startswith("~") for group in ("@resources", "@setuid"))


@pytest.mark.parametrize("unit", ["appliance-gpu@.service", "appliance-gateway@.service", "appliance-watchdog.service"])
def test_restart_policy(unit: str) -> None:
    assert values(unit, "Restart") == ["on-failure"]
    assert values(unit, "RestartPreventExitStatus") == ["2 4"]
    assert values(unit, "Type") == ["notify"]
    assert values(unit, "NotifyAccess") == ["main"]
    burst, window = int(values(unit, "StartLimitBurst")[0]), int(values(unit, "StartLimitIntervalSec")[0])
    assert burst * int(values(unit, "RestartSec")[0]) < window, "otherwise a loop of restarts would never end"
    assert int(values(unit, "WatchdogSec")[0]) >= 10
    assert values(unit, "PartOf") == ["appliance.target"]
    assert values(unit, "WantedBy") == ["appliance.target"]
    assert values(unit, "OnFailure") == ["appliance-report@%n.service"]


def test_stop_timeouts_are_above_the_default_drains() -> None:
    from appliance.hostconfig import Engine, Gateway

    assert int(values("appliance-gpu@.service", "TimeoutStopSec")[0]) >= 2 * Engine().drain_timeout
    assert int(values("appliance-gateway@.service", "TimeoutStopSec")[0]) > Gateway().drain_timeout


def test_a_reset_is_never_cut_off_and_always_put_back() -> None:
    """Its limits are above the sum of its parts'; whatever ends it, ExecStopPost puts back; the watchdog does so after
    a power cut; a stop of the target is no reason to end it."""
    from healthcheck.reset_plan import CLIENT_UNITS, Limits

    unit, limits = "appliance-gpu-reset@.service", Limits()
    clients = len(CLIENT_UNITS) * limits.unit
    assert int(values(unit, "TimeoutStartSec")[0]) > 2 * limits.free + clients + limits.reset + 4 * limits.query
    assert int(values(unit, "TimeoutStopSec")[0]) > clients + limits.query
    assert [command.partition(" -m ")[2] for command in values(unit, "ExecStopPost")] == [
        "healthcheck.reset --recover --uuid %I"
    ]
    (before,) = values("appliance-watchdog.service", "ExecStartPre")
    assert before.startswith("-/") and before.endswith(" -m healthcheck.reset --recover")
    assert values(unit, "PartOf") == values(unit, "WantedBy") == []
    assert values(unit, "Restart") == [], "one try is one attempt of the policy"


def test_nvidia_services_are_wanted_and_followed_never_bound() -> None:
    for unit in ("appliance-gpu@.service", "appliance-gpu-nodes.service", "appliance-watchdog.service"):
        for other in NVIDIA:
            assert other in " ".join(values(unit, "Wants")).split()
            assert other in " ".join(values(unit, "After")).split()
    for unit in UNITS:
        for key in ("BindsTo", "Requires", "Requisite"):
            assert values(unit, key) == [], f"{unit}: {key}= would take down what works"


def test_launchers_are_outside_of_the_slices_they_sweep() -> None:
    """A launcher stops all it finds in appliance-gpuN.slice, so it must not be there itself."""
    assert values("appliance-gpu@.service", "Slice") == ["appliance.slice"]


def test_wants_and_after_have_no_cycle() -> None:
    edges: dict[str, set[str]] = {}
    for unit in UNITS:
        name = INSTANCES.get(unit, unit)
        wanted = [*values(unit, "Wants"), *values(unit, "After"), *values(unit, "Requires")]
        edges.setdefault(name, set()).update(" ".join(wanted).split())
        for target in " ".join(values(unit, "WantedBy")).split():
            edges.setdefault(target, set()).add(name)  # a target follows what it wants (systemd.target(5))
        for later in " ".join(values(unit, "Before")).split():
            edges.setdefault(later, set()).add(name)

    def visit(unit: str, path: tuple[str, ...]) -> None:
        assert unit not in path, " -> ".join([*path, unit])
        for following in edges.get(unit, ()):
            visit(following, (*path, unit))

    for unit in list(edges):
        visit(unit, ())
    assert "appliance-gpu-nodes.service" in edges["appliance-gpu@0.service"]


def test_programs_of_the_units_exist() -> None:
    """`python -P -m MODULE` of the installed venv only; -P keeps the working directory out of sys.path."""
    repository = FOLDER.parent
    for unit in SERVICES:
        for key in ("ExecStart", "ExecStartPre", "ExecStop", "ExecStopPost", "ExecReload"):
            for command in values(unit, key):
                if command.startswith("/bin/kill -HUP"):
                    continue
                python = "/usr/lib/appliance/current/venv/bin/python -P -m"
                matched = re.fullmatch(rf"[+-]?{python} ((?:appliance|canary|healthcheck)[.\w]*)\b.*", command)
                assert matched, command
                module = repository / matched[1].replace(".", "/")
                assert module.is_dir() or module.with_suffix(".py").is_file(), command


def test_the_rules_of_the_canary_are_there_before_the_gateways() -> None:
    unit = "appliance-netfilter.service"
    assert set(" ".join(values(unit, "Before")).split()) == {
        "appliance-gateway@stable.service",
        "appliance-gateway@canary.service",
    }
    assert values("appliance-gateway@.service", "Wants")[-1] == unit
    assert values(unit, "CapabilityBoundingSet") == ["CAP_NET_ADMIN"]
    assert values(unit, "RestrictAddressFamilies") == ["AF_UNIX AF_NETLINK"]
    assert values(unit, "RemainAfterExit") == ["yes"] and values(unit, "PartOf") == ["appliance.target"]


def test_every_service_has_a_name_in_the_journal_and_takes_the_admins_environment() -> None:
    for unit in SERVICES:
        assert values(unit, "SyslogIdentifier"), "python would be its name"
        assert values(unit, "EnvironmentFile") == ["-/etc/default/appliance"]


def test_json_of_the_security_report_names_no_surprise() -> None:
    """What is open in the gateway, by systemd's names: exactly these."""
    unit = FOLDER / "appliance-gateway@.service"
    result = run(tool("systemd-analyze"), "security", "--offline=true", "--json=short", unit)
    open_ = {entry["json_field"] for entry in json.loads(result.stdout) if entry["set"] is False and entry["exposure"]}
    assert open_ == {
        "RemoveIPC", "RootDirectoryOrRootImage", "PrivateDevices", "RestrictAddressFamilies_AF_UNIX",
        "RestrictAddressFamilies_AF_INET_INET6", "PrivateNetwork", "DeviceAllow", "IPAddressDeny",
    }  # fmt: skip
