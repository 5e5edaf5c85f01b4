"""What the device layer decides without a device: which GPU, how its memory is divided, what errors mean."""

from __future__ import annotations

import dataclasses
import sys
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cuda import driver, errors
from engine.cuda.context import DeviceInfo, choose_device
from engine.cuda.memory import ALIGNMENT, RESERVE_BYTES, plan_memory
from engine.errors import ConfigError, DeviceLost

MIB = 1 << 20
H200 = DeviceInfo(
    ordinal=0, uuid="GPU-11111111-2222-3333-4444-555555555555", name="NVIDIA H200", pci_bus_id="0000:1a:00.0",
    compute_capability=(9, 0), num_multiprocessors=132, total_bytes=143771 * MIB, l2_bytes=60 * MIB,
    max_shared_bytes=232448,
)  # fmt: skip
A100 = dataclasses.replace(
    H200, ordinal=1, uuid="GPU-1111aaaa-2222-3333-4444-555555555555", name="NVIDIA A100", compute_capability=(8, 0)
)
TURING = dataclasses.replace(H200, ordinal=2, uuid="GPU-99", name="Tesla T4", compute_capability=(7, 5))
MIG = dataclasses.replace(H200, ordinal=3, uuid="MIG-77", name="NVIDIA H200 MIG 1g.18gb")
DEVICES = [H200, A100, TURING, MIG]


@pytest.mark.parametrize("wanted", [1, "1", "GPU-1111aaaa", "gpu-1111AAAA-2222-3333-4444-555555555555"])
def test_a_gpu_is_chosen_by_index_or_uuid(wanted):
    assert choose_device(DEVICES, wanted) is A100


@pytest.mark.parametrize(
    "devices,wanted,visible,message",
    [
        ([], 0, None, "no GPU"),
        ([], 0, "5", r"no GPU \(CUDA_VISIBLE_DEVICES=5\)"),
        (DEVICES, 4, None, "no GPU matches 4"),
        (DEVICES, "GPU-abc", None, "no GPU matches 'GPU-abc'"),
        (DEVICES, "GPU-1111", None, "more than one GPU matches"),
        (DEVICES, 2, None, r"compute capability 7\.5; 8\.0"),
        (DEVICES, 3, None, "is a MIG instance"),
        (DEVICES, "MIG-77", None, "is a MIG instance"),
        (DEVICES, 0, "GPU-1,MIG-GPU-2/1/0", "is a MIG instance"),
        ([], 0, "MIG-77", "is a MIG instance"),
    ],
)
def test_what_is_refused_says_why(devices, wanted, visible, message):
    with pytest.raises(ConfigError, match=message) as caught:
        choose_device(devices, wanted, visible)
    assert caught.value.hint and caught.value.exit_code == 4


def plan(**changes):
    options = {
        "total_bytes": 1000 * MIB + RESERVE_BYTES, "free_bytes": 1 << 60, "fraction": 1.0,
        "weights_bytes": 500 * MIB, "workspace": {"a": 90 * MIB, "b": 10 * MIB}, "page_bytes": 10 * MIB,
    }  # fmt: skip
    return plan_memory(**(options | changes))


def test_pages_get_what_weights_and_workspace_leave():
    assert plan().num_pages == 39  # 400 MiB are 40 pages, one of them the dummy page
    assert plan(max_pages=5).num_pages == 5
    assert plan(max_pages=5).pool_bytes == 60 * MIB
    assert plan(free_bytes=950 * MIB + RESERVE_BYTES).num_pages == 34  # somebody else has 50 MiB
    assert plan(max_pages=2, staging_bytes=100 * MIB).pool_bytes == 100 * MIB


@pytest.mark.parametrize(
    "changes",
    [{"weights_bytes": 881 * MIB}, {"min_pages": 40}, {"fraction": 0.3}, {"free_bytes": 600 * MIB},
     {"staging_bytes": 401 * MIB}],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_numbers(changes):
    with pytest.raises(ConfigError, match=r"are needed .* the share is [\d,]+ MiB") as caught:
        plan(**changes)
    assert "--gpu-memory-fraction" in (caught.value.hint or "")


@pytest.mark.parametrize("fraction", [0.0, -1.0, 1.01, float("nan")])
def test_the_fraction_is_one(fraction):
    with pytest.raises(ConfigError, match="gpu_memory_fraction"):
        plan(fraction=fraction)


@given(
    total=st.integers(1 << 30, 1 << 38), used=st.floats(0, 0.9), fraction=st.floats(0.01, 1),
    weights=st.integers(0, 1 << 35), sizes=st.lists(st.integers(0, 1 << 30), max_size=5),
    page=st.integers(1, 1 << 24), min_pages=st.integers(1, 50), staging=st.integers(0, 1 << 28),
)  # fmt: skip
def test_a_plan_never_exceeds_the_share(total, used, fraction, weights, sizes, page, min_pages, staging):
    free = int(total * (1 - used))
    workspace = {str(i): size for i, size in enumerate(sizes)}
    try:
        made = plan_memory(
            total_bytes=total, free_bytes=free, fraction=fraction, weights_bytes=weights, workspace=workspace,
            page_bytes=page, min_pages=min_pages, staging_bytes=staging,
        )  # fmt: skip
    except ConfigError:
        return
    assert made.taken_bytes + RESERVE_BYTES <= min(total * fraction, free) + ALIGNMENT
    assert made.pool_bytes >= max((made.num_pages + 1) * page, staging)
    assert made.num_pages >= min_pages
    assert all(size % ALIGNMENT == 0 for size in made.workspace.values())
    assert all(made.workspace[name] >= size for name, size in workspace.items())


def test_the_table_names_every_part():
    text = plan().table()
    for part in ("weight arena", "KV pool", "a ", "b ", "left over", "39 pages"):
        assert part in text
    assert "500.0 MiB" in text and "90.0 MiB" in text


# ---- errors ----------------------------------------------------------------------------------------------------------


def put_entry(ring: np.ndarray, index: int, **fields: int) -> None:
    """As kernels/common.cuh:report_error writes it: 32 bytes of code, op, layer, head, slot, position, value, sm."""
    names = ("code", "op", "layer", "head", "slot", "position", "value", "sm")
    words = ring[32:].view(np.int32).reshape(errors.RING_ENTRIES, 8)
    words[index % errors.RING_ENTRIES] = [fields.get(name, 0) for name in names]
    ring[:4].view(np.uint32)[0] = (index + 1) % (1 << 32)


def test_the_ring_is_read_once_and_in_order():
    ring = np.zeros(errors.RING_BYTES, np.uint8)
    reader = errors.DeviceErrors(ring)
    assert reader.take() == []
    put_entry(ring, 0, code=4, op=5, layer=3, head=7, slot=2, position=900, value=11, sm=131)
    put_entry(ring, 1, code=1, op=4, layer=-1, head=-1, slot=9, position=5, value=-3, sm=0)
    first, second = reader.take()
    assert first.where() == {
        "error": "nonfinite", "op": "attention", "layer": 3, "head": 7, "position": 900, "value": 11, "sm": 131,
    }  # fmt: skip
    assert (first.slot, second.slot) == (2, 9)
    assert second.where() == {"error": "page_range", "op": "rope", "position": 5, "value": -3, "sm": 0}
    assert reader.take() == [] and reader.lost == 0


def test_a_ring_that_overflowed_keeps_the_newest_and_counts_the_rest():
    ring = np.zeros(errors.RING_BYTES, np.uint8)
    reader = errors.DeviceErrors(ring)
    for i in range(700):
        put_entry(ring, i, code=4, value=i)
    assert [fault.value for fault in reader.take()] == list(range(700 - 256, 700))
    assert reader.lost == 700 - 256


def test_the_count_may_wrap():
    ring = np.zeros(errors.RING_BYTES, np.uint8)
    reader = errors.DeviceErrors(ring)
    for i in range(0xFFFFFFFF - errors.RING_ENTRIES, 0xFFFFFFFF):
        put_entry(ring, i, code=4)
    reader.take()
    put_entry(ring, 0xFFFFFFFF, code=4, value=1)
    put_entry(ring, 0x100000000, code=4, value=2)
    assert [fault.value for fault in reader.take()] == [1, 2]


def test_an_entry_that_is_being_written_is_left_for_the_next_call():
    """A later step may be reporting while an earlier one is collected: the count goes up first, the code comes last."""
    ring = np.zeros(errors.RING_BYTES, np.uint8)
    reader = errors.DeviceErrors(ring)
    put_entry(ring, 0, code=4, value=1)
    put_entry(ring, 1, code=0, value=2)
    assert [fault.value for fault in reader.take()] == [1]
    assert reader.take() == []
    put_entry(ring, 1, code=4, value=2)
    assert [fault.value for fault in reader.take()] == [2] and reader.lost == 0


def test_codes_of_a_newer_kernel_are_still_reported():
    ring = np.zeros(errors.RING_BYTES, np.uint8)
    put_entry(ring, 0, code=77, op=99)
    (fault,) = errors.DeviceErrors(ring).take()
    assert (fault.error, fault.op) == ("code 77", "op 99")


@pytest.fixture
def fake_driver(monkeypatch):
    """cuda-bindings and PyCUDA reduced to what errors.py asks of them."""
    texts = {1: ("CUDA_ERROR_INVALID_VALUE", "invalid argument"), 2: ("CUDA_ERROR_OUT_OF_MEMORY", "out of memory"),
             700: ("CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered")}  # fmt: skip

    class Status(int):
        def __new__(cls, value):
            if value not in texts:
                raise ValueError(value)
            return int.__new__(cls, value)

    class AllStatus(type):
        def __iter__(cls):
            return iter(map(Status, texts))

        def __call__(cls, value):
            return Status(value)

    class PycudaError(Exception):
        pass

    class CUresult(metaclass=AllStatus):
        pass

    api = types.SimpleNamespace(
        CUresult=CUresult,
        cuGetErrorName=lambda status: (0, texts[int(status)][0].encode()),
        cuGetErrorString=lambda status: (0, texts[int(status)][1].encode()),
    )
    fake = types.SimpleNamespace(api=api, cuda=types.SimpleNamespace(Error=PycudaError))
    monkeypatch.setattr(errors, "load_driver", lambda: fake)
    errors._codes_by_text.cache_clear()
    yield fake
    errors._codes_by_text.cache_clear()


def test_check_unpacks_and_raises(fake_driver):
    assert errors.check((0,), "x") is None
    assert errors.check((0, 5), "x") == 5
    assert errors.check((0, 5, 6), "x") == (5, 6)
    with pytest.raises(
        errors.CudaCallError, match=r"cuFoo failed: CUDA_ERROR_INVALID_VALUE \(invalid argument\)"
    ) as info:
        errors.check((1, None), "cuFoo")
    assert info.value.code == 1
    with pytest.raises(errors.CudaCallError, match="CUDA_ERROR_12345"):
        errors.check((12345,), "cuFoo")
    with pytest.raises(DeviceLost, match="cuFoo") as lost:
        errors.check((700,), "cuFoo")
    assert lost.value.where == {"op": "cuFoo", "error": "CUDA_ERROR_ILLEGAL_ADDRESS"}
    assert lost.value.exit_code == 1


def test_errors_of_pycuda_become_ours(fake_driver):
    def fail(text):
        with errors.pycuda_calls("allocating"):
            raise fake_driver.cuda.Error(text)

    with pytest.raises(errors.CudaCallError, match=r"allocating failed: CUDA_ERROR_OUT_OF_MEMORY"):
        fail("cuMemAlloc failed: out of memory")
    with pytest.raises(errors.CudaCallError, match="OUT_OF_MEMORY"):
        fail("cuMemHostAlloc failed: out of memory - with a detail")
    with pytest.raises(DeviceLost, match="ILLEGAL_ADDRESS"):
        fail("cuMemcpyDtoH failed: an illegal memory access was encountered")
    with pytest.raises(errors.CudaCallError, match="allocating: something else"):
        fail("something else")


def test_without_libraries_or_driver_the_backend_is_refused(monkeypatch):
    """No GPU is ever replaced by something slower: each missing piece is named."""
    load = driver.load_driver.__wrapped__
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(ConfigError, match="cuda-bindings") as caught:
        load()
    assert "make setup-gpu" in (caught.value.hint or "")
    bindings = types.ModuleType("cuda.bindings")
    bindings.driver = types.SimpleNamespace()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setitem(sys.modules, "pycuda", None)
    monkeypatch.setitem(sys.modules, "pycuda.driver", None)
    with pytest.raises(ConfigError, match="needs PyCUDA"):
        load()

    class Error(Exception):
        pass

    def init():
        raise Error("cuInit failed: no CUDA-capable device is detected")

    pycuda = types.ModuleType("pycuda.driver")
    pycuda.Error, pycuda.init, pycuda.get_driver_version = Error, init, lambda: 12080  # type: ignore[attr-defined]
    parent = types.ModuleType("pycuda")
    parent.driver = pycuda  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pycuda", parent)
    monkeypatch.setitem(sys.modules, "pycuda.driver", pycuda)
    with pytest.raises(ConfigError, match="no CUDA-capable device"):
        load()
    pycuda.init = lambda: None  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"supports CUDA 12\.8; 13\.0 is needed"):
        load()
