"""A host below a short directory (Unix sockets have at most 107 characters), with one tiny model in its store."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.cli import main
from appliance.hostconfig import HostConfig, parse_config
from appliance.models import ModelStore
from appliance.paths import Paths
from appliance.releases import Release, ReleaseStore
from tests.tiny import make_tiny_model

LIGHT = ("--argument=--kv-tokens=4096", "--argument=--threads=1")  # of an engine in a test
CPU_CONFIG: HostConfig = parse_config(b'[gpus]\nbackend = "cpu"\n', where="test")


@pytest.fixture(name="paths")
def paths_fixture(monkeypatch: pytest.MonkeyPatch) -> Iterator[Paths]:
    """In memory where there is such a place: the fsyncs of a sweep are slow on a shared disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as directory:
        root = Path(directory)
        monkeypatch.setenv("APPLIANCE_ROOT", directory)
        monkeypatch.delenv("APPLIANCE_MODELS", raising=False)
        paths = Paths.under(root)
        ModelStore(paths.models).add(make_tiny_model(root / "source"), "tiny")
        yield paths


@pytest.fixture(name="store")
def store_fixture(paths: Paths) -> ReleaseStore:
    return ReleaseStore(paths)


def add(store: ReleaseStore, name: str = "v1", model: str = "tiny", **changes: object) -> Release:
    return store.add(name, ModelStore(store.paths.models), model, CPU_CONFIG, **changes)[0]  # type: ignore[arg-type]


def release_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, object]]:
    """(exit code, the JSON document) of `appliance release ... --json`."""
    capsys.readouterr()
    try:
        code = main(["release", *arguments, "--json", "-q"])
    except SystemExit as error:
        code = int(error.code or 0)
    return code, json.loads(capsys.readouterr().out)
