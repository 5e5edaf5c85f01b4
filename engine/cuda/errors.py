"""What can go wrong on the device, and who pays for it: a request, a plan or the process.

- A kernel saw something wrong (page out of range, NaN ...): it sets a bit in slot_errors, which fails that request, and
  leaves an entry in the error ring, which says where (kernels/common.cuh). `DeviceErrors` reads the ring.
- A driver call was refused (bad argument, out of memory): CudaCallError.
- A sticky error (illegal address, ECC ...): nothing on the device can be used any more: engine.errors.DeviceLost.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.cuda.driver import load_driver
from engine.errors import DeviceLost, EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

RING_ENTRIES = 256  # kernels/common.cuh:ERROR_RING_ENTRIES
_ENTRY = np.dtype(
    [
        ("code", "<u4"), ("op", "<u4"), ("layer", "<i4"), ("head", "<i4"), ("slot", "<i4"), ("position", "<i4"),
        ("value", "<i4"), ("sm", "<u4"),
    ]
)  # fmt: skip
_HEADER_BYTES = 32
RING_BYTES = _HEADER_BYTES + RING_ENTRIES * _ENTRY.itemsize

CODES = ("none", "page_range", "position_range", "token_range", "nonfinite", "logits")  # common.cuh:ErrorCode
OPS = (
    "prepare", "embed", "rmsnorm", "qkv", "rope", "attention", "o", "gate_up", "down", "lm_head", "sampler",
)  # fmt: skip  # common.cuh:OpId

STICKY = frozenset(
    {
        4,  # DEINITIALIZED
        46,  # DEVICE_UNAVAILABLE
        214,  # ECC_UNCORRECTABLE
        220,  # NVLINK_UNCORRECTABLE
        226,  # CONTAINED
        700,  # ILLEGAL_ADDRESS
        702,  # LAUNCH_TIMEOUT
        709,  # CONTEXT_IS_DESTROYED
        710,  # ASSERT
        714,  # HARDWARE_STACK_ERROR
        715,  # ILLEGAL_INSTRUCTION
        716,  # MISALIGNED_ADDRESS
        717,  # INVALID_ADDRESS_SPACE
        718,  # INVALID_PC
        719,  # LAUNCH_FAILED
        721,  # TENSOR_MEMORY_LEAK
        810,  # MPS_CLIENT_TERMINATED
        911,  # EXTERNAL_DEVICE
        999,  # UNKNOWN
    }
)
"""CUresult values after which the context is dead (CUDA driver API, "Data types used by CUDA driver": "the context
cannot be used, the process must be terminated and relaunched")."""


class CudaCallError(EngineError):
    """A driver call failed and the context lives on. `code`: CUresult."""

    def __init__(self, message: str, *, code: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code


def check(result: tuple[Any, ...], what: str) -> Any:
    """Unpack what a cuda-bindings call returned: (CUresult, values ...). `what` names the call in the error.

    Raises DeviceLost for a sticky error, else CudaCallError. Returns None, the value, or a tuple of them.
    """
    if int(result[0]) != 0:
        raise failure(int(result[0]), what)
    return None if len(result) == 1 else result[1] if len(result) == 2 else result[1:]


def failure(code: int, what: str) -> EngineError:
    """The error to raise for a CUresult."""
    name, text = _describe(code)
    message = f"{what} failed: {name} ({text})"
    if code in STICKY:
        return DeviceLost(message, where={"op": what, "error": name}, hint="The process has to be started again.")
    return CudaCallError(message, code=code)


@contextmanager
def pycuda_calls(what: str) -> Iterator[None]:
    """PyCUDA's exceptions become ours; `what` says what was being done."""
    driver = load_driver()
    try:
        yield
    except driver.cuda.Error as error:
        code = _code_of_text(str(error).rpartition("failed: ")[2])
        if code is None:
            raise CudaCallError(f"{what}: {error}", code=-1) from error
        raise failure(code, what) from error


def _describe(code: int) -> tuple[str, str]:
    api = load_driver().api
    try:
        status = api.CUresult(code)
        name, text = api.cuGetErrorName(status)[1], api.cuGetErrorString(status)[1]
    except ValueError:  # newer than these bindings
        return f"CUDA_ERROR_{code}", "unknown to cuda-bindings"
    return _text(name), _text(text)


def _text(value: bytes | str | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or "?"


@cache
def _codes_by_text() -> dict[str, int]:
    api = load_driver().api
    return {_text(api.cuGetErrorString(status)[1]): int(status) for status in api.CUresult}


def _code_of_text(text: str) -> int | None:
    """PyCUDA keeps the CUresult to itself; its message is "<function> failed: <cuGetErrorString>[ - detail]"."""
    return _codes_by_text().get(text.partition(" - ")[0].strip())


@dataclass(frozen=True, slots=True)
class DeviceFault:
    """One entry of the error ring. Which of layer, head, position and value mean something depends on `error`."""

    error: str
    op: str
    layer: int
    head: int
    slot: int
    position: int
    value: int
    sm: int

    def where(self) -> dict[str, Any]:
        """For the client and the log: names as in Failure.where, without `slot`, which means nothing outside."""
        fields = asdict(self)
        del fields["slot"]
        return {key: value for key, value in fields.items() if not (key in ("layer", "head") and value < 0)}


class DeviceErrors:
    """Reads the error ring in mapped host memory: `ring` is a uint8 array of RING_BYTES that kernels write.

    `take` may be called while a later step runs: an entry whose code is still 0 is being written and is left for the
    next call.
    """

    def __init__(self, ring: npt.NDArray[np.uint8]) -> None:
        if ring.nbytes != RING_BYTES:
            raise ValueError(f"the error ring has {RING_BYTES} bytes, not {ring.nbytes}")
        self._written = ring[:4].view(np.uint32)
        self._entries = ring[_HEADER_BYTES:].view(_ENTRY)
        self._seen = 0
        self.lost = 0  # entries overwritten before they were read

    def take(self) -> list[DeviceFault]:
        """Faults reported since the last call, oldest first; at most RING_ENTRIES, the rest is counted in `lost`."""
        new = (int(self._written[0]) - self._seen) % (1 << 32)
        if new > RING_ENTRIES:
            self.lost += new - RING_ENTRIES
            self._seen += new - RING_ENTRIES
            new = RING_ENTRIES
        faults = []
        for _ in range(new):
            entry = self._entries[self._seen % RING_ENTRIES]
            if entry["code"] == 0:
                break
            faults.append(self._fault(entry))
            self._entries["code"][self._seen % RING_ENTRIES] = 0
            self._seen += 1
        self._seen %= 1 << 32
        return faults

    @staticmethod
    def _fault(entry: Any) -> DeviceFault:
        code, op = int(entry["code"]), int(entry["op"])
        return DeviceFault(
            error=CODES[code] if code < len(CODES) else f"code {code}",
            op=OPS[op] if op < len(OPS) else f"op {op}",
            **{name: int(entry[name]) for name in ("layer", "head", "slot", "position", "value", "sm")},
        )
