"""Linear layers for few rows: what a step with a handful of tokens spends its time on.

With few rows a linear layer only streams its weights, and torch's GEMM reaches a third to a half of
the memory's speed there. These kernels read each weight once, in rows as a checkpoint holds them,
and come close to it. Weights are float32, or int8 with a scale per output: a weight then costs a
quarter of the bytes. Activations stay float32, so that no row depends on its batch beyond the
rounding of sums.

Knows arrays only: no module, no model, no torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange
from numpy.typing import NDArray

from model_worker.compiled.jit import kernel

Floats = NDArray[np.float32]
Weights = NDArray[Any]  # float32 or int8

# Outputs that one thread computes before it takes the next: some tens of kilobytes of weights.
_BLOCK = 16


@kernel(is_parallel=True)
def linear(
    x: Floats, weight: Weights, scale: Floats, bias: Floats, out: Floats, is_added: bool
) -> None:
    """``out`` (rows, n) = x (rows, k) weight (n, k)^T * scale (n,) + bias (n,), or that added to it
    where ``is_added``."""
    rows, depth = x.shape
    width = weight.shape[0]
    tiled = rows - rows % 4
    for block in prange((width + _BLOCK - 1) // _BLOCK):
        stop = min(width, (block + 1) * _BLOCK)
        first = block * _BLOCK
        if tiled:
            for n in range(first, stop - 1, 2):
                w0 = weight[n]
                w1 = weight[n + 1]
                for m in range(0, tiled, 4):
                    x0 = x[m]
                    x1 = x[m + 1]
                    x2 = x[m + 2]
                    x3 = x[m + 3]
                    a00 = a01 = a10 = a11 = np.float32(0)
                    a20 = a21 = a30 = a31 = np.float32(0)
                    for k in range(depth):
                        u = np.float32(w0[k])
                        v = np.float32(w1[k])
                        a00 += x0[k] * u
                        a01 += x0[k] * v
                        a10 += x1[k] * u
                        a11 += x1[k] * v
                        a20 += x2[k] * u
                        a21 += x2[k] * v
                        a30 += x3[k] * u
                        a31 += x3[k] * v
                    _put(out, m, n, a00, scale, bias, is_added)
                    _put(out, m, n + 1, a01, scale, bias, is_added)
                    _put(out, m + 1, n, a10, scale, bias, is_added)
                    _put(out, m + 1, n + 1, a11, scale, bias, is_added)
                    _put(out, m + 2, n, a20, scale, bias, is_added)
                    _put(out, m + 2, n + 1, a21, scale, bias, is_added)
                    _put(out, m + 3, n, a30, scale, bias, is_added)
                    _put(out, m + 3, n + 1, a31, scale, bias, is_added)
            if (stop - first) % 2:
                for m in range(tiled):
                    _put(out, m, stop - 1, _dot(x[m], weight[stop - 1]), scale, bias, is_added)
        for n in range(first, stop):
            for m in range(tiled, rows):
                _put(out, m, n, _dot(x[m], weight[n]), scale, bias, is_added)


@kernel()
def _dot(x: Floats, weight: Weights) -> np.float32:
    total = np.float32(0)
    for k in range(x.shape[0]):
        total += x[k] * np.float32(weight[k])
    return total


@kernel()
def _put(
    out: Floats,
    m: int,
    n: int,
    value: np.float32,
    scale: Floats,
    bias: Floats,
    is_added: bool,
) -> None:
    total = value * scale[n] + bias[n]
    out[m, n] = out[m, n] + total if is_added else total
