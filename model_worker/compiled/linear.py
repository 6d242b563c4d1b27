"""Linear layers, for one row or thousands: each weight is read once for some sixty rows.

With few rows a linear layer only streams its weights; with many it is bound by arithmetic. One
kernel does both, since its tiles use all vector registers and ask for the next weights while they
compute these. Weights are float32, or int8 with a scale per output. Activations beside int8 weights
are rounded to integers of up to 16 bits with a scale per row, so that a product of two numbers and
the sum of two products is one instruction; at 32,767 steps for the largest number of a row this
costs less than the weights' own rounding by two orders of magnitude.

Sums do not depend on a row's neighbours: its result is the same to the bit in every batch.
Knows arrays only: no module, no model, no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import prange, types
from numba.extending import overload
from numpy.typing import NDArray

from model_worker.compiled.elementwise import FEW_ROWS
from model_worker.compiled.jit import kernel
from model_worker.compiled.tiles import (
    COLUMNS,
    STREAM_COLUMNS,
    dot,
    dots,
    dots_ahead,
    dots_of_stream,
    rows_of_tile,
    step_of,
)
from model_worker.row_codes import largest_code

Floats = NDArray[np.float32]
Weights = NDArray[Any]  # float32 or int8
Operand = NDArray[Any]  # float32 or int16

# What lies in the second cache while it is used: the weights of so many outputs, and the rows that
# are taken through them together. Outputs are also what threads share out.
_WEIGHT_BYTES = 2**18
_ROW_BYTES = 96 * 2**10

_largest_code = kernel()(largest_code)


@kernel(is_parallel=True)
def linear(
    x: Floats, weight: Weights, scale: Floats, bias: Floats, out: Floats, is_added: bool
) -> None:
    """``out`` (rows, n) = x (rows, k) weight (n, k)^T * scale (n,) + bias (n,), or that added to it
    where ``is_added``."""
    rows, depth = x.shape
    width = weight.shape[0]
    operand, row_scales = operand_of(x, weight)
    whole = depth - depth % step_of(operand)
    high = rows_of_tile(operand)
    is_tiled = rows >= high and width >= COLUMNS
    outputs = max(min(_WEIGHT_BYTES // (depth * weight.itemsize), width // 8) // 24 * 24, 24)
    rows_at_once = max(_ROW_BYTES // (depth * operand.itemsize) // 12 * 12, 12)
    for block in prange((width + outputs - 1) // outputs):
        stop = min(width, (block + 1) * outputs)
        first = block * outputs
        for chunk in range(0, rows if is_tiled else 0, rows_at_once):
            for column in range(first, stop, COLUMNS):
                # The last tiles begin early enough to be whole; what they repeat is not put.
                n = min(column, width - COLUMNS)
                for row in range(chunk, min(rows, chunk + rows_at_once), high):
                    m = min(row, rows - high)
                    if row == 0:
                        totals = dots_ahead(operand, weight, m, n, whole)
                    else:
                        totals = dots(operand, weight, m, n, whole)
                    if row == m and column == n and whole == depth:
                        _put_tile(
                            totals,
                            row_scales[m : m + high],
                            scale[n : n + COLUMNS],
                            bias[n : n + COLUMNS],
                            out[m : m + high, n : n + COLUMNS],
                            is_added,
                        )
                    else:
                        for i in range(row - m, high):
                            for j in range(column - n, COLUMNS):
                                value = totals[i * COLUMNS + j]
                                value += rest_of_dot(operand, weight, m + i, n + j, whole)
                                value *= row_scales[m + i]
                                _put(out, m + i, n + j, value, scale, bias, is_added)
        for column in range(first, first if is_tiled else stop, STREAM_COLUMNS):
            n = min(column, width - STREAM_COLUMNS)
            for row in range(rows):
                if n == column and whole == depth:
                    _put_tile(
                        dots_of_stream(operand, weight, row, n, whole),
                        row_scales[row : row + 1],
                        scale[n : n + STREAM_COLUMNS],
                        bias[n : n + STREAM_COLUMNS],
                        out[row : row + 1, n : n + STREAM_COLUMNS],
                        is_added,
                    )
                elif n >= 0:
                    of_row = dots_of_stream(operand, weight, row, n, whole)
                    for j in range(column - n, STREAM_COLUMNS):
                        value = of_row[j] + rest_of_dot(operand, weight, row, n + j, whole)
                        value *= row_scales[row]
                        _put(out, row, n + j, value, scale, bias, is_added)
                else:
                    for j in range(width):
                        value = dot(operand, weight, row, j, whole)[0]
                        value += rest_of_dot(operand, weight, row, j, whole)
                        value *= row_scales[row]
                        _put(out, row, j, value, scale, bias, is_added)


def operand_of(x: Floats, weight: Weights) -> tuple[Operand, Floats]:
    """``x`` (rows, k) in the numbers that go with ``weight``, and the scale of each row."""
    raise NotImplementedError("for compiled code")


@overload(operand_of, strict=False)
def _operand_of(x: Any, weight: Any) -> Callable[[Any, Any], Any]:
    if weight.dtype == types.float32:
        return lambda x, weight: (x, np.ones(x.shape[0], np.float32))
    return lambda x, weight: round_rows(x)


@kernel()
def round_rows(x: Floats) -> tuple[NDArray[np.int16], Floats]:
    """Codes (rows, k) and scales (rows,) by row_codes' rule: x is about code * scale."""
    rows, depth = x.shape
    most = np.float32(_largest_code(depth))
    codes = np.empty((rows, depth), np.int16)
    scales = np.empty(rows, np.float32)
    if rows < FEW_ROWS:
        for row in range(rows):
            _round_row(x[row], most, codes[row], scales[row : row + 1])
    else:
        _round_many(x, most, codes, scales)
    return codes, scales


@kernel(is_parallel=True)
def _round_many(x: Floats, most: np.float32, codes: NDArray[np.int16], scales: Floats) -> None:
    for row in prange(x.shape[0]):
        _round_row(x[row], most, codes[row], scales[row : row + 1])


@kernel()
def _round_row(x: Floats, most: np.float32, codes: NDArray[np.int16], scale: Floats) -> None:
    """By bits, whose order is that of the numbers: NaN is the largest, and makes the row NaN."""
    bits = x.view(np.int32)
    largest = np.int32(0)
    for k in range(bits.shape[0]):
        largest = max(largest, bits[k] & np.int32(0x7FFFFFFF))
    scale.view(np.int32)[0] = largest
    factor = most / scale[0] if largest else np.float32(0)
    for k in range(x.shape[0]):
        codes[k] = np.int16(np.rint(x[k] * factor))
    scale[0] /= most


@kernel()
def rest_of_dot(x: Operand, weight: Weights, m: int, n: int, start: int) -> np.float32:
    """What rows m of ``x`` and n of ``weight`` add to their dot product from ``start`` on."""
    total = np.float32(0)
    for k in range(start, x.shape[1]):
        total += np.float32(x[m, k]) * np.float32(weight[n, k])
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


@kernel()
def _put_tile(
    totals: tuple[np.float32, ...],
    row_scales: Floats,
    scale: Floats,
    bias: Floats,
    out: Floats,
    is_added: bool,
) -> None:
    """A whole tile: its indices are known to be in the arrays, which are its own parts."""
    rows, columns = out.shape
    for i in range(rows):
        for j in range(columns):
            value = totals[i * columns + j] * row_scales[i] * scale[j] + bias[j]
            out[i, j] = value + (out[i, j] if is_added else np.float32(0))
