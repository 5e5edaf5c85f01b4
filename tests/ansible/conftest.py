"""Fixtures: the controller's Ansible and a bundle of this checkout, each made once for a run of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ansible.modules import ROOT
from tests.host.plugin import require

SETUP_SECONDS = 900


@pytest.fixture(scope="session")
def ansible_bin() -> Path:
    """.venv-ansible/bin with ansible-core, ansible-lint and our collection (`make lint-ansible` makes the same)."""
    binaries = ROOT / ".venv-ansible" / "bin"
    if os.environ.get("APPLIANCE_OFFLINE") and not (binaries / "ansible-lint").exists():
        pytest.skip("APPLIANCE_OFFLINE is set and .venv-ansible is not there")
    setup = [str(ROOT / ".ci" / "setup-ansible"), "lint"]
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(setup, env=environment, capture_output=True, text=True, timeout=SETUP_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return binaries


def why_no_bundle() -> str | None:
    if sys.version_info[:2] != (3, 11):
        return "a bundle is built with Python 3.11, for Debian 12"
    if not Path("/usr/share/keyrings/debian-archive-keyring.gpg").exists():
        return "no Debian archive keyring here, which a bundle's packages are checked with"
    return None


def build_bundle(output: Path, *options: str, **environment: str) -> Path:
    """`python ansible/bundle`; downloads are kept in build/, as `make bundle` keeps them."""
    command = [sys.executable, str(ROOT / "ansible" / "bundle"), "--output", str(output), *options]
    done = subprocess.run(
        command, cwd=output.parent, env=os.environ | environment, capture_output=True, text=True, timeout=SETUP_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Path(done.stdout.strip())


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of this checkout."""
    if os.environ.get("APPLIANCE_OFFLINE"):
        pytest.skip("APPLIANCE_OFFLINE is set; a bundle needs the package mirrors")
    require(why_no_bundle())
    return build_bundle(tmp_path_factory.mktemp("bundle") / "dist")
