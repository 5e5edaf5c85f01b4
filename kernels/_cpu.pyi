"""Types of the compiled module; kernels/cpu_ops.py has the documentation."""

from typing import Any

import numpy as np
import numpy.typing as npt

_F32 = npt.NDArray[np.float32]
_I32 = npt.NDArray[np.int32]

def rmsnorm(out: _F32, x: _F32, weight: _F32, residual: _F32 | None, eps: float, num_threads: int, /) -> None: ...
def add(x: _F32, residual: _F32, num_threads: int, /) -> None: ...
def matmul(out: _F32, x: _F32, w: npt.NDArray[Any], num_threads: int, /) -> None: ...
def swiglu(out: _F32, gate_up: _F32, num_threads: int, /) -> None: ...
def embed(out: _F32, table: npt.NDArray[Any], ids: _I32, num_threads: int, /) -> None: ...
def exp(out: _F32, x: _F32, /) -> None: ...
def qkv_rope_append(
    q_out: _F32,
    qkv: _F32,
    bias: _F32 | None,
    q_norm: _F32 | None,
    k_norm: _F32 | None,
    cos: _F32,
    sin: _F32,
    k_pages: _F32,
    v_pages: _F32,
    positions: _I32,
    seq_index: _I32,
    block_tables: _I32,
    eps: float,
    num_threads: int,
    /,
) -> None: ...
def paged_attention(
    out: _F32,
    q: _F32,
    k_pages: _F32,
    v_pages: _F32,
    positions: _I32,
    seq_index: _I32,
    block_tables: _I32,
    window: int,
    scale: float,
    num_threads: int,
    /,
) -> None: ...
def check_tokens(
    k_pages: _F32,
    v_pages: _F32,
    positions: _I32,
    seq_index: _I32,
    block_tables: _I32,
    window: int,
    max_position: int,
    /,
) -> None: ...
def isa() -> str: ...
def set_isa(name: str, /) -> None: ...
def shutdown() -> None: ...
