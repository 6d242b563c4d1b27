"""What lies between the matrix products of a decoder layer: norms, rotary embedding, gates.

Each in one pass over its rows, which torch's operations take three to eight for. Knows arrays only.
"""

from __future__ import annotations

import numpy as np
from numba import prange
from numpy.typing import NDArray

from model_worker.compiled.jit import kernel
from model_worker.compiled.lanes import gate_lanes
from model_worker.compiled.vectors import LANES

Floats = NDArray[np.float32]

# Fewer rows are done sooner than other threads would begin with them.
FEW_ROWS = 16


@kernel()
def rms_norm_row(x: Floats, weight: Floats, epsilon: np.float32, out: Floats) -> None:
    """``x`` (n,) over its root mean square, times ``weight`` (n,) (Zhang and Sennrich, 2019)."""
    total = np.float32(0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    factor = np.float32(1) / np.sqrt(total / np.float32(x.shape[0]) + epsilon)
    for i in range(x.shape[0]):
        out[i] = weight[i] * (x[i] * factor)


@kernel()
def rms_norm(x: Floats, weight: Floats, epsilon: np.float32, out: Floats) -> None:
    """Every row of ``x`` (rows, n) into ``out``."""
    if x.shape[0] < FEW_ROWS:
        for row in range(x.shape[0]):
            rms_norm_row(x[row], weight, epsilon, out[row])
    else:
        _rms_norm_many(x, weight, epsilon, out)


@kernel(is_parallel=True)
def _rms_norm_many(x: Floats, weight: Floats, epsilon: np.float32, out: Floats) -> None:
    for row in prange(x.shape[0]):
        rms_norm_row(x[row], weight, epsilon, out[row])


@kernel()
def rotate_row(
    projected: Floats,
    cosines: Floats,
    sines: Floats,
    heads: int,
    kv_heads: int,
    query_norm: Floats,
    key_norm: Floats,
    epsilon: np.float32,
) -> None:
    """Norm (where the norms have a size) and rotate the query's and the key's heads of one row.

    ``projected`` (heads + 2 kv_heads, head_dim): query, key, value. Pairs of a rotation are (i, i +
    head_dim / 2); ``cosines`` and ``sines`` (head_dim,). RoPE: Su et al., "RoFormer", 2021.
    """
    half = projected.shape[1] // 2
    for head in range(heads + kv_heads):
        x = projected[head]
        if query_norm.size:
            rms_norm_row(x, query_norm if head < heads else key_norm, epsilon, x)
        for i in range(half):
            low = x[i]
            high = x[half + i]
            x[i] = low * cosines[i] - high * sines[i]
            x[half + i] = high * cosines[half + i] + low * sines[half + i]


@kernel()
def gate_row(gate: Floats, up: Floats, out: Floats) -> None:
    """``out`` (n,) = silu(gate) * up."""
    count = out.shape[0]
    whole = count - count % LANES
    for i in range(0, whole, LANES):
        gate_lanes(gate, up, i, out)
    for i in range(whole, count):
        out[i] = gate[i] * up[i] / (np.float32(1) + np.exp(-gate[i]))


@kernel()
def gate(gate_up: Floats, out: Floats) -> None:
    """``out`` (rows, n) = silu(gate) * up; ``gate_up`` (rows, 2 n): the gate, then up.

    SwiGLU: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    width = out.shape[1]
    if out.shape[0] < FEW_ROWS:
        for row in range(out.shape[0]):
            gate_row(gate_up[row, :width], gate_up[row, width:], out[row])
    else:
        _gate_many(gate_up, out)


@kernel(is_parallel=True)
def _gate_many(gate_up: Floats, out: Floats) -> None:
    width = out.shape[1]
    for row in prange(out.shape[0]):
        gate_row(gate_up[row, :width], gate_up[row, width:], out[row])
