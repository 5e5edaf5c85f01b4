"""Our safetensors writer against the library's reader and the engine's."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from appliance.safetensors_writer import TensorSource, write_safetensors
from engine.safetensors import SafetensorsFile

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=5)


@settings(max_examples=25, deadline=None)
@given(shapes=SHAPES, chunk=st.integers(1, 40), metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=9)))
def test_the_library_reads_what_we_write(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, ...]], chunk: int, metadata: dict[str, str]
) -> None:
    path = tmp_path_factory.mktemp("st") / "x.safetensors"
    arrays = {
        f"t{i}.é": np.random.default_rng(i).standard_normal(shape).astype("<f4") for i, shape in enumerate(shapes)
    }
    sources = []
    for name, array in arrays.items():
        raw = array.tobytes()
        chunks = [raw[at : at + chunk] for at in range(0, len(raw), chunk)]
        sources.append(TensorSource(name, "F32", array.shape, chunks))
    sizes = list(write_safetensors(path, sources, metadata=metadata))
    assert sizes == sorted(sizes) and sizes[-1] == path.stat().st_size
    with safe_open(path, "np") as file:
        assert file.metadata() == (metadata or None)
        assert set(file.keys()) == arrays.keys()
        for name, array in arrays.items():
            assert np.array_equal(file.get_tensor(name), array) and file.get_tensor(name).shape == array.shape
    length = struct.unpack("<Q", path.read_bytes()[:8])[0]
    assert (8 + length) % 64 == 0
    with SafetensorsFile(path) as engine:
        assert {name: info.shape for name, info in engine.tensors.items()} == {
            name: array.shape for name, array in arrays.items()
        }


def test_wrong_amount_of_data_is_an_error(tmp_path: Path) -> None:
    for count in (0, 12, 20):
        source = TensorSource("a", "F32", (2, 2), [bytes(count)])
        with pytest.raises(ValueError, match="announced"):
            list(write_safetensors(tmp_path / f"{count}.safetensors", [source]))
