"""sysusers.d, tmpfiles.d, preset, udev rule and the examples."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import stat
from pathlib import Path

import pytest
from unit_files import FOLDER, INSTANCES, UNITS, make_root, run, settings, tool

USER = ("appliance", 870)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: files get other owners")


def test_sysusers_makes_the_user(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    result = run(tool("systemd-sysusers"), f"--root={tmp_path}", FOLDER / "sysusers.d/appliance.conf")
    assert result.returncode == 0, result.stderr
    passwd = (tmp_path / "etc/passwd").read_text().splitlines()
    assert passwd == ["appliance:x:870:870:LLM appliance:/var/lib/appliance:/usr/sbin/nologin"]
    assert (tmp_path / "etc/group").read_text() == "appliance:x:870:\n"


def test_sysusers_takes_another_number_where_that_one_is_taken(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text("other:x:870:870::/:/bin/sh\n")
    (tmp_path / "etc/group").write_text("other:x:870:\n")
    result = run(tool("systemd-sysusers"), f"--root={tmp_path}", FOLDER / "sysusers.d/appliance.conf")
    assert result.returncode == 0, result.stderr
    entry = re.search(r"^appliance:x:(\d+):(\d+):", (tmp_path / "etc/passwd").read_text(), re.M)
    assert entry and "870" not in entry.groups()


@needs_root
def test_tmpfiles_makes_the_directories(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    run(tool("systemd-sysusers"), f"--root={tmp_path}", FOLDER / "sysusers.d/appliance.conf")
    command = (tool("systemd-tmpfiles"), "--create", f"--root={tmp_path}", FOLDER / "tmpfiles.d/appliance.conf")
    for _ in range(2):  # the second run finds all of it there
        result = run(*command)
        assert (result.returncode, result.stderr) == (0, "")
    found = {
        str(path.relative_to(tmp_path)): (f"{stat.S_IMODE(path.stat().st_mode):04o}", path.stat().st_uid)
        for top in ("etc/appliance", "run/appliance", "srv/appliance", "var/cache/appliance", "var/lib/appliance")
        for path in [tmp_path / top, *(tmp_path / top).rglob("*")]
    }
    ours = {name for name, (_, owner) in found.items() if owner == USER[1]}
    assert ours == {"run/appliance/gateway", "var/cache/appliance/nv"}, "all else is root's"
    assert found["etc/appliance/credentials"] == ("0700", 0)
    assert found["var/cache/appliance/nv"] == ("0700", 870)
    assert {"var/lib/appliance/releases", "var/lib/appliance/slots", "var/lib/appliance/holds"} <= found.keys()


@needs_root
def test_tmpfiles_leaves_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    run(tool("systemd-sysusers"), f"--root={tmp_path}", FOLDER / "sysusers.d/appliance.conf")
    model = tmp_path / "srv/appliance/models/m/model.safetensors"
    model.parent.mkdir(parents=True)
    model.write_text("weights")
    command = (tool("systemd-tmpfiles"), "--create", "--remove", "--clean", f"--root={tmp_path}")
    assert run(*command, FOLDER / "tmpfiles.d/appliance.conf").returncode == 0
    assert model.read_text() == "weights"


def test_directories_are_those_of_the_paths_module() -> None:
    from appliance.paths import Paths

    lines = (FOLDER / "tmpfiles.d/appliance.conf").read_text().splitlines()
    made = {Path(line.split()[1]) for line in lines if line.startswith("d")}
    paths = Paths()
    wanted = {
        paths.etc, paths.state, paths.run, paths.models, paths.releases, paths.gpu_reset("GPU-0").parent,
        paths.slot_pointer("stable").parent, paths.holds(0).parent, paths.gateway_socket("stable").parent,
    }  # fmt: skip
    assert wanted <= made
    runtime = {s.value.replace("%i", "0") for unit in UNITS for s in settings(unit) if s.key == "RuntimeDirectory"}
    gateways = str(paths.gateway_socket("stable").parent)
    assert {f"/run/{name}" for name in runtime} == {str(paths.run), str(paths.gpu_run(0)), gateways}


def test_fixed_uid_is_a_system_uid() -> None:
    line = next(x for x in (FOLDER / "sysusers.d/appliance.conf").read_text().splitlines() if x.startswith("u"))
    assert line.split()[1:3] == [USER[0], str(USER[1])]
    assert 100 < USER[1] < 1000, "logind removes the shared memory of users above (RemoveIPC=)"
    try:
        assert pwd.getpwuid(USER[1]).pw_name == USER[0]
    except KeyError:
        pass


def test_enabled_units_leave_nothing_when_disabled(tmp_path: Path) -> None:
    """Nothing is on by itself; what `enable` links, `disable` takes away (cloudflared#1209: links left in /etc)."""
    root = make_root(tmp_path / "root")
    (root / "usr/lib/systemd/system-preset").mkdir(parents=True)
    shutil.copy(FOLDER / "preset/90-appliance.preset", root / "usr/lib/systemd/system-preset")
    ours = ["appliance.target", "appliance-gpu@0.service", "appliance-gateway@stable.service"]

    def links() -> set[str]:
        return {str(path.relative_to(root)) for path in (root / "etc").rglob("*appliance*") if path.is_symlink()}

    (root / "etc").mkdir()
    result = run(tool("systemctl"), f"--root={root}", "preset", *ours)
    assert result.returncode == 0 and links() == set(), result.stderr
    result = run(tool("systemctl"), f"--root={root}", "enable", *ours)
    assert result.returncode == 0, result.stderr
    assert links() == {
        "etc/systemd/system/multi-user.target.wants/appliance.target",
        "etc/systemd/system/appliance.target.wants/appliance-gpu@0.service",
        "etc/systemd/system/appliance.target.wants/appliance-gateway@stable.service",
    }
    result = run(tool("systemctl"), f"--root={root}", "disable", *ours)
    assert result.returncode == 0 and links() == set(), result.stderr


def test_udev_rule_starts_what_exists() -> None:
    rules = [x for x in (FOLDER / "udev/70-appliance.rules").read_text().splitlines() if x and not x.startswith("#")]
    assert len(rules) == 1
    parts = [part.strip() for part in rules[0].split(",")]
    assert all(
        re.fullmatch(r'(ACTION|SUBSYSTEM|KERNEL)=="[^"]+"|(TAG|ENV\{SYSTEMD_WANTS\})\+="[^"]+"', p) for p in parts
    )
    wants = re.search(r'SYSTEMD_WANTS}\+="([^"]+)"', rules[0])
    assert wants and wants[1] in UNITS
    # systemd starts a unit that is wanted by a device only if it is not active already.
    assert not any(setting.key == "RemainAfterExit" for setting in settings(wants[1]))


@pytest.mark.parametrize("example", sorted(path.name for path in (FOLDER / "examples").glob("*.conf")))
def test_examples_are_good_drop_ins(tmp_path: Path, example: str) -> None:
    """Each names the file that it is for in its first line; there systemd accepts it."""
    root = make_root(tmp_path / "root")
    first = (FOLDER / "examples" / example).read_text().splitlines()[0]
    target = re.match(r"# (/etc/systemd/system/(\S+)\.d/\w[\w.-]*\.conf)", first)
    assert target, first
    path = root / target[1].lstrip("/")
    path.parent.mkdir(parents=True)
    shutil.copy(FOLDER / "examples" / example, path)
    unit = target[2]
    if unit.endswith(".slice"):
        (root / "usr/lib/systemd/system" / unit).write_text("[Unit]\nDescription=made by systemd when it is needed\n")
    file = root / "usr/lib/systemd/system" / INSTANCES.get(unit, unit)
    result = run(tool("systemd-analyze"), "verify", f"--root={root}", "--recursive-errors=no", "--man=no", file)
    assert (result.returncode, result.stderr) == (0, "")
