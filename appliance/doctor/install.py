"""The installation: user, units, configuration, state files, ports."""

from __future__ import annotations

import ipaddress
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from appliance.certificate import ends_soon
from appliance.doctor.report import Check, Finding, Host, degraded, failed, ok, unknown
from appliance.gpus import read_slots
from appliance.hostconfig import HostConfig, load_config
from appliance.log import ApplianceError
from appliance.paths import SLOT_NAMES
from appliance.statefile import read_state

USER = "appliance"
_PROPERTIES = ["LoadState", "ActiveState", "SubState", "UnitFileState", "NeedDaemonReload", "Result"]
_PROPERTIES += ["ExecMainStatus", "NRestarts", "ActiveEnterTimestampMonotonic"]
_SETTLED_SECONDS = 300.0  # StartLimitIntervalSec= of our units: a restart before that is forgotten
_LISTEN = "0A"  # TCP_LISTEN, include/net/tcp_states.h
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def user(host: Host) -> Finding:
    fix = "systemd-sysusers /usr/lib/sysusers.d/appliance.conf"
    for file, what in (("/etc/passwd", "user"), ("/etc/group", "group")):
        lines = (host.read(file) or "").splitlines()
        if not any(line.startswith(f"{USER}:") for line in lines):
            return failed(f"there is no {what} {USER}", fix)
    return ok(f"user and group {USER} exist")


def units(host: Host) -> list[Finding]:
    """Installed, enabled (else they are gone after a reboot), neither failed nor ending again and again, not older than
    their files."""
    numbers = read_slots(host.paths.gpus)
    names = ["appliance.target", *(f"appliance-gateway@{slot}.service" for slot in SLOT_NAMES)]
    names += ["appliance-netfilter.service", "appliance-canary.service", "appliance-watchdog.service"]
    names += [f"appliance-gpu@{number}.service" for number in numbers]
    show = host.units(names, _PROPERTIES)
    if show is None:
        return [unknown("systemctl does not answer", "is systemd PID 1 here?")]
    now = _uptime(host)
    found = [finding for name, state in show.items() if (finding := _unit(name, state, now))]
    return found or [ok(f"{len(names)} units installed, enabled, none failed")]


def _uptime(host: Host) -> float:
    """CLOCK_MONOTONIC of the host, which systemd's timestamps are in (but for time asleep: servers do not)."""
    words = (host.read("/proc/uptime") or "").split()
    return float(words[0]) if words else 0.0


def _unit(name: str, state: dict[str, str], now: float) -> Finding | None:
    if state.get("LoadState") != "loaded":
        return failed(f"{name} is {state.get('LoadState')}", "run the install playbook again")
    if state.get("ActiveState") == "failed":
        # Without reset-failed a start is refused where the limit of starts was hit.
        again = f"systemctl reset-failed {name}; systemctl restart {name}"
        return failed(f"{name} has failed ({state.get('Result')})", f"`systemctl status {name}`, then `{again}`")
    if found := _ends_again(name, state, now):
        return found
    if state.get("UnitFileState") not in ("enabled", "enabled-runtime", "static", "generated", "alias", "indirect"):
        return degraded(f"{name} is not enabled: gone after a reboot", f"systemctl enable {name}")
    if state.get("NeedDaemonReload") == "yes":
        return degraded(f"{name}: its file changed on disk", "systemctl daemon-reload")
    return None


def _ends_again(name: str, state: dict[str, str], now: float) -> Finding | None:
    """A unit that crashes and is started again is active or activating whenever one looks."""
    restarts = int(state.get("NRestarts") or 0)
    look = f"`journalctl -u {name}` has the reason of each end"
    if state.get("SubState") == "auto-restart":
        why = f"{state.get('Result')}, exit status {state.get('ExecMainStatus')}"
        return failed(f"{name} has ended ({why}) and is started again, {restarts} times so far", look)
    since = int(state.get("ActiveEnterTimestampMonotonic") or 0) / 1e6
    settled = state.get("ActiveState") == "active" and now - since > _SETTLED_SECONDS
    if restarts and not settled:
        return degraded(f"{name} has ended {restarts} times by itself, the last time just now", look)
    return None


def config(host: Host) -> Finding:
    from appliance.gateway.settings import check_ports  # for this check alone

    found = load_config(host.paths.config)  # its error is the finding
    check_ports(found, host.run, host.root / "proc")  # and its
    gateway = found.gateway
    for address, port in ((gateway.host, gateway.port), (gateway.canary_host, gateway.canary_port)):
        if gateway.auth == "none" and not ipaddress.ip_address(address).is_loopback:
            return degraded(
                f"{address}:{port} answers everybody (auth = none)",
                "keys in the credentials and auth = keys, unless a proxy in front checks them",
            )
    return ok(f"{host.paths.config} is valid")


def canary_settings(host: Host) -> Finding:
    """What `canary start` would read; `undo` and `rollback` do without it."""
    from canary.settings import load_settings  # for this check alone

    load_settings(host.paths.canary_config)  # its error is the finding
    return ok(
        f"{host.paths.canary_config} is valid" if host.paths.canary_config.exists() else "no canary.toml: defaults"
    )


def credentials(host: Host) -> Finding:
    """API keys and certificate, as the gateways would take them at their next start, and as clients see them now."""
    from appliance.gateway.settings import check_servable  # for this check alone

    if host.config is None:
        return unknown("appliance.toml cannot be used, so what it needs is not known")
    directory = host.paths.etc / "credentials"
    if directory.exists() and not os.access(directory, os.R_OK | os.X_OK):
        return unknown(f"{directory} cannot be read", "run it as root")
    certificates = check_servable(host.config, host.paths, directory)  # its error is the finding
    soon = ends_soon(certificates, time.time()) if certificates else None
    if soon:
        return degraded(f"TLS certificate: {soon}", "renew it, then `systemctl reload 'appliance-gateway@*'`")
    return ok("gateways can start with the keys and the certificate there")


def state_files(host: Host) -> list[Finding]:
    """Every file that has to survive a reboot can be read by this version."""
    files = [host.paths.gpus, host.paths.host_drain, host.paths.state / "canary.json"]
    files += sorted((host.paths.state / "holds").glob("gpu*.json"))
    found = []
    for file in files:
        try:
            read_state(file, schema=1)
        except ApplianceError as error:
            found.append(failed(error.message, error.hint or "restore it"))
        except PermissionError:
            found.append(unknown(f"{file} cannot be read", "run it as root"))
    return found or [ok(f"{sum(file.exists() for file in files)} state files can be read")]


# -- ports


def listening(text: str) -> Iterator[tuple[Address, int, int]]:
    """(address, port, inode) of the listening sockets in /proc/net/tcp or tcp6. Addresses are 32-bit words in the
    byte order of the machine (little-endian on all of ours), proc(5)."""
    for line in text.splitlines()[1:]:
        words = line.split()
        if len(words) < 10 or words[3] != _LISTEN:
            continue
        words_hex, _, port = words[1].partition(":")
        raw = b"".join(bytes.fromhex(words_hex[i : i + 8])[::-1] for i in range(0, len(words_hex), 8))
        address: Address = ipaddress.IPv6Address(raw) if len(raw) == 16 else ipaddress.IPv4Address(raw)
        yield address, int(port, 16), int(words[9])


def wanted_ports(config: HostConfig) -> list[tuple[str, str, int]]:
    """(key, address, port) that the gateways listen on: the metrics listener only beside a public one."""
    gateway = config.gateway
    wanted = [
        ("gateway.port", gateway.host, gateway.port),
        ("gateway.canary_port", gateway.canary_host, gateway.canary_port),
    ]
    if not ipaddress.ip_address(gateway.host).is_loopback:
        wanted.append(("gateway.admin_port", gateway.admin_host, gateway.admin_port))
    if not ipaddress.ip_address(gateway.canary_host).is_loopback:
        wanted.append(("gateway.admin_port + 1", gateway.admin_host, gateway.admin_port + 1))
    return wanted


def ports(host: Host) -> list[Finding]:
    """Free, or ours."""
    if host.config is None:
        return [unknown("appliance.toml cannot be used, so the ports are not known")]
    texts = [host.read("/proc/net/tcp"), host.read("/proc/net/tcp6")]
    if texts[0] is None:
        return [unknown("/proc/net/tcp cannot be read")]
    sockets = [entry for text in texts if text for entry in listening(text)]
    found = []
    for key, where, port in wanted_ports(host.config):
        ours = ipaddress.ip_address(where)
        inodes = {inode for address, number, inode in sockets if number == port and _overlap(ours, address)}
        if inodes:
            found.append(_taken(host, f"{key} {where}:{port}", inodes))
    return [finding for finding in found if finding.fix] or [ok("the ports are free or ours")]


def _overlap(one: Address, other: Address) -> bool:
    """May both listen at the same time? Not if they are equal or one is the wildcard (:: takes IPv4 as well)."""
    if one == other or (other.version == 6 and other.is_unspecified) or (one.version == 6 and one.is_unspecified):
        return True
    return one.version == other.version and (one.is_unspecified or other.is_unspecified)


def _taken(host: Host, what: str, inodes: set[int]) -> Finding:
    owners = dict(_owners(host, inodes))
    if not owners:
        return unknown(f"{what} is taken; by whom can only root see", "run it as root")
    strangers = {pid: name for pid, name in owners.items() if not _is_gateway(host, pid)}
    if strangers:
        names = ", ".join(f"{name} (PID {pid})" for pid, name in strangers.items())
        return failed(f"{what} is taken by {names}", "stop that program, or choose another port in appliance.toml")
    return ok(f"{what} is ours")


def _owners(host: Host, inodes: set[int]) -> Iterator[tuple[int, str]]:
    targets = {f"socket:[{inode}]" for inode in inodes}
    for process in (host.root / "proc").glob("[0-9]*"):
        try:
            if any(str(fd.readlink()) in targets for fd in (process / "fd").iterdir()):
                yield int(process.name), (process / "comm").read_text().strip()
        except OSError:
            continue  # ended meanwhile, or not ours to see


def _is_gateway(host: Host, pid: int) -> bool:
    return re.search(r"/appliance-gateway(@|\\x40)", host.read(f"/proc/{pid}/cgroup") or "") is not None


def code(host: Host) -> Finding:
    """/usr/lib/appliance/current and the command."""
    current, link = host.paths.lib / "current", host.root / "usr/bin/appliance"
    if not current.is_dir():
        return failed(f"{current} does not lead to an installed version", "run the install playbook again")
    if not link.exists():
        return degraded(f"{link} does not lead to the command", "run the install playbook again")
    return ok(f"version {Path(current).resolve().name}")


CHECKS: dict[str, Check] = {
    "code": code,
    "user": user,
    "config": config,
    "canary": canary_settings,
    "credentials": credentials,
    "units": units,
    "state": state_files,
    "ports": ports,
}
