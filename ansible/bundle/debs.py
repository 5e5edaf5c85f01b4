"""The Debian packages of the bundle: python3-gi, python3-pydbus, D-Bus, and iptables, nftables and conntrack for the
canary; with what they need beyond a bare server.

apt works in a directory of its own, on Debian 12's signed indexes, whatever runs on the controller: nothing is
installed here, and the machine's own lists are not touched. apt checks the signature of the index and the hash of each
package.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

from command import BundleError, run

SUITES = ("bookworm", "bookworm-updates", "bookworm-security")
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
WANTED = ("python3-gi", "python3-pydbus", "dbus", "iptables", "nftables", "conntrack")
# What every host has that systemd runs and Ansible can talk to; the rest of what WANTED needs is fetched.
SERVER = ("?essential", "?priority(required)", "apt", "systemd", "systemd-sysv", "python3")


def download(target: Path, area: Path, sources: Path | None) -> list[dict[str, str]]:
    """Fills `target` with .deb files; [{name, version, architecture, file}] by name."""
    target.mkdir(parents=True)
    if not KEYRING.is_file():
        raise BundleError(f"there is no {KEYRING}", hint="apt-get install debian-archive-keyring")
    options = _prepare(area, _sources(sources))
    run(["apt-get", *options, "update"], hint="are the Debian mirrors reachable?")
    server = _closure(options, SERVER)
    packages = {name: version for name, version in _closure(options, (*SERVER, *WANTED)).items() if name not in server}
    missing = {"python3-gi", "python3-pydbus"} - packages.keys()
    if missing:
        raise BundleError(f"apt did not resolve {', '.join(sorted(missing))}", hint="look at the sources of Debian 12")
    archives = area / "archives"
    archives.mkdir(exist_ok=True)
    exact = [f"{name}={version}" for name, version in sorted(packages.items())]
    run(["apt-get", *options, "download", *exact], cwd=archives)
    return [_take(archives, target, name, version) for name, version in sorted(packages.items())]


def _take(archives: Path, target: Path, name: str, version: str) -> dict[str, str]:
    found = [archives / f"{name}_{version.replace(':', '%3a')}_{architecture}.deb" for architecture in ("amd64", "all")]
    (deb,) = (path for path in found if path.is_file())
    file = deb.name.replace("%3a", "-")  # a plain name in the bundle
    shutil.copyfile(deb, target / file)
    return {"name": name, "version": version, "architecture": deb.stem.rpartition("_")[2], "file": f"debs/{file}"}


def _sources(chosen: Path | None) -> str:
    """sources.list of Debian 12, signed by Debian's own key whatever the machine trusts otherwise."""
    if chosen is not None:
        text = "".join(line + "\n" for line in chosen.read_text().splitlines() if re.match(r"deb\s", line))
        if not text:
            raise BundleError(f"{chosen} has no `deb` line", hint="like: deb http://MIRROR/debian bookworm main")
        return re.sub(r"^deb\s+(\[[^]]*\]\s+)?", f"deb [signed-by={KEYRING}] ", text, flags=re.M)
    columns = "$(SITE) $(CODENAME) $(ORIGIN) $(COMPONENT)"
    shown = run(["apt-get", "indextargets", "--format", columns, "Created-By: Packages"], hint="the bundle needs apt")
    rows = {tuple(line.split()) for line in shown.splitlines()}
    usable = sorted(row for row in rows if len(row) == 4 and row[1] in SUITES and row[2:] == ("Debian", "main"))
    if not any(row[1] == "bookworm" for row in usable):
        raise BundleError(
            "this machine's apt knows no Debian 12 (bookworm)",
            hint="make bundle DEBIAN_SOURCES=FILE with lines like: deb http://MIRROR/debian bookworm main",
        )
    return "".join(f"deb [signed-by={KEYRING}] {site} {suite} main\n" for site, suite, *_ in usable)


def _prepare(area: Path, sources: str) -> list[str]:
    """apt's own directory; the options that make it work there. Proxies and certificates stay the machine's."""
    area = (area / hashlib.sha256(sources.encode()).hexdigest()[:12]).absolute()
    for name in ("lists/partial", "cache/archives/partial"):
        (area / name).mkdir(parents=True, exist_ok=True)
    (area / "status").write_text("")  # nothing is installed
    (area / "sources.list").write_text(sources)
    settings = {
        "Dir::State": area, "Dir::State::status": area / "status", "Dir::Cache": area / "cache",
        "Dir::Etc::sourcelist": area / "sources.list", "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::preferences": "/dev/null", "Dir::Etc::preferencesparts": "/dev/null",
        "APT::Architecture": "amd64", "APT::Architectures": "amd64", "APT::Install-Recommends": "false",
        "Acquire::Languages": "none", "APT::Sandbox::User": "", "APT::Get::List-Cleanup": "true",
    }  # fmt: skip
    return ["--quiet=2", *(f"--option={key}={value}" for key, value in settings.items())]


def _closure(options: list[str], wanted: tuple[str, ...]) -> dict[str, str]:
    """What apt would install on an empty machine: name -> version."""
    shown = run(["apt-get", *options, "--simulate", "--no-install-recommends", "install", *wanted])
    return dict(re.findall(r"^Inst ([^ :]+)(?::\w+)? \((\S+) ", shown, re.M))
