"""Linear layers, for one row or thousands: each weight is read once for some forty rows.

With few rows a linear layer only streams its weights; with many it is bound by arithmetic. One
kernel does both, since its tiles use all vector registers and ask for the next weights while they
compute these. Weights are float32, or int8 with a scale per output. Activations beside int8 weights
are rounded to integers of 16 bits with a scale per row, so that a product of two numbers and the
sum of two products is one instruction; at 32,767 steps for the largest number of a row this costs
less than the weights' own rounding by two orders of magnitude.

The inputs are taken in blocks, so that a panel's part stays in the first cache while all rows pass
(Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008). Sums do not
depend on a row's neighbours: its result is the same to the bit in every batch.
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
from model_worker.compiled.panel_sums import (
    FLOAT_ROWS,
    INTEGER_ROWS,
    MOST_PRODUCTS,
    add_panel_sums,
    put_float_row,
    put_integer_row,
)
from model_worker.compiled.panels import FLOAT_PANEL, INTEGER_PANEL
from model_worker.row_codes import LARGEST_CODE

Floats = NDArray[np.float32]
Panels = NDArray[Any]  # float32 or int8, as compiled.panels lays them out
Operand = NDArray[Any]  # float32 or int16

# What lies in the second cache while it is used: the panels that a thread takes at once, and the
# rows that pass through them together.
_WEIGHT_BYTES = 2**18
_ROW_BYTES = 96 * 2**10
# The work is cut into so many equal parts, or a multiple: most numbers of threads divide it, and
# then end together. (How many there are cannot be asked for in code that is kept on disk.)
_SHARES = 24
# Inputs of a block: of float32, a panel's part then fills half of the first cache.
_FLOAT_INPUTS = 256
_INTEGER_INPUTS = MOST_PRODUCTS - MOST_PRODUCTS % 2

_MOST = np.float32(LARGEST_CODE)


@kernel(is_parallel=True)
def linear(
    x: Floats, panels: Panels, scale: Floats, bias: Floats, out: Floats, is_added: bool
) -> None:
    """``out`` (rows, n) = x (rows, k) W^T * scale (n,) + bias (n,), or that added to it where
    ``is_added``; W (n, k) lies in ``panels``."""
    operand, row_scales = operand_of(x, panels)
    num_panels = panels.shape[0]
    turns = max(num_panels * panels[0].nbytes // (_SHARES * _WEIGHT_BYTES), 1)
    tasks = min(_SHARES * turns, num_panels)
    for task in prange(tasks):
        first, stop = num_panels * task // tasks, num_panels * (task + 1) // tasks
        _through_panels(operand, row_scales, panels, first, stop, scale, bias, out, is_added)


@kernel()
def _through_panels(
    x: Operand,
    row_scales: Floats,
    panels: Panels,
    first: int,
    stop: int,
    scale: Floats,
    bias: Floats,
    out: Floats,
    is_added: bool,
) -> None:
    rows, depth = x.shape
    most_rows = max(_ROW_BYTES // max(depth * x.itemsize, 1), rows_of_tile(x))
    block = block_of(depth, inputs_of_block(x))
    panel_width = outputs_of_panel(x)
    sums = np.empty((min(rows, most_rows), panel_width), np.float32)
    for start in range(0, rows, most_rows):
        count = min(rows - start, most_rows)
        for panel in range(first, stop):
            for k in range(0, depth, block):
                _add_tiles(x, panels, start, count, panel, k, min(block, depth - k), sums)
            n = panel * panel_width
            _put_panel(x, sums, count, row_scales, scale, bias, out, start, n, is_added)


@kernel()
def _add_tiles(
    x: Operand,
    panels: Panels,
    start: int,
    count: int,
    panel: int,
    first: int,
    inputs: int,
    sums: Floats,
) -> None:
    """All ``count`` rows from ``start`` on through one block of a panel, in tiles as even as can
    be."""
    most = rows_of_tile(x)
    tiles = (count + most - 1) // most
    for tile in range(tiles):
        row, after = count * tile // tiles, count * (tile + 1) // tiles
        add_panel_sums(
            x, panels, after - row, start + row, panel, first, inputs, sums, row, first == 0
        )


@kernel()
def _put_panel(
    x: Operand,
    sums: Floats,
    count: int,
    row_scales: Floats,
    scale: Floats,
    bias: Floats,
    out: Floats,
    start: int,
    first: int,
    is_added: bool,
) -> None:
    """One panel's outputs, from ``first`` on, of ``count`` rows from ``start`` on."""
    width = out.shape[1]
    for i in range(count):
        row, row_scale = start + i, row_scales[start + i]
        if first + sums.shape[1] <= width:
            put_panel_row(x, sums, i, row_scale, scale, bias, first, out, row, is_added)
        else:
            for n in range(first, width):
                value = sums[i, n - first] * row_scale * scale[n] + bias[n]
                out[row, n] = value + (out[row, n] if is_added else np.float32(0))


@kernel()
def block_of(depth: int, most: int) -> int:
    """Inputs of a block where ``depth`` is cut into as few of up to ``most`` (even) as can be, the
    last one the shortest. Even, for the sake of pairs."""
    blocks = max((depth + most - 1) // most, 1)
    return ((depth + blocks - 1) // blocks + 1) // 2 * 2


def rows_of_tile(x: Operand) -> int:
    raise NotImplementedError("for compiled code")


@overload(rows_of_tile, strict=False)
def _rows_of_tile(x: Any) -> Callable[[Any], int]:
    return _by_type(x, FLOAT_ROWS, INTEGER_ROWS)


def inputs_of_block(x: Operand) -> int:
    raise NotImplementedError("for compiled code")


@overload(inputs_of_block, strict=False)
def _inputs_of_block(x: Any) -> Callable[[Any], int]:
    return _by_type(x, _FLOAT_INPUTS, _INTEGER_INPUTS)


def outputs_of_panel(x: Operand) -> int:
    raise NotImplementedError("for compiled code")


@overload(outputs_of_panel, strict=False)
def _outputs_of_panel(x: Any) -> Callable[[Any], int]:
    return _by_type(x, FLOAT_PANEL, INTEGER_PANEL)


def _by_type(x: Any, for_floats: int, for_integers: int) -> Callable[[Any], int]:
    value = for_floats if x.dtype == types.float32 else for_integers
    return lambda x: value


def put_panel_row(x: Operand, *row: Any) -> None:
    """``panel_sums.put_float_row`` or ``put_integer_row``, as goes with ``x``."""
    raise NotImplementedError("for compiled code")


@overload(put_panel_row, strict=False)
def _put_panel_row(x: Any, *row: Any) -> Callable[..., None]:
    if x.dtype == types.float32:
        return lambda x, *row: put_float_row(*row)
    return lambda x, *row: put_integer_row(*row)


def operand_of(x: Floats, panels: Panels) -> tuple[Operand, Floats]:
    """``x`` (rows, k) in the numbers that go with ``panels``, and the scale of each row."""
    raise NotImplementedError("for compiled code")


@overload(operand_of, strict=False)
def _operand_of(x: Any, panels: Any) -> Callable[[Any, Any], Any]:
    if panels.dtype == types.float32:
        return lambda x, panels: (x, np.ones(x.shape[0], np.float32))
    return lambda x, panels: round_rows(x)


@kernel()
def round_rows(x: Floats) -> tuple[NDArray[np.int16], Floats]:
    """Codes (rows, k, or one more where that is odd) and scales (rows,) by row_codes' rule: x is
    about code * scale."""
    rows, depth = x.shape
    codes = np.empty((rows, depth + depth % 2), np.int16)
    scales = np.empty(rows, np.float32)
    if rows < FEW_ROWS:
        for row in range(rows):
            _round_row(x[row], codes[row], scales[row : row + 1])
    else:
        _round_many(x, codes, scales)
    return codes, scales


@kernel(is_parallel=True)
def _round_many(x: Floats, codes: NDArray[np.int16], scales: Floats) -> None:
    for row in prange(x.shape[0]):
        _round_row(x[row], codes[row], scales[row : row + 1])


@kernel()
def _round_row(x: Floats, codes: NDArray[np.int16], scale: Floats) -> None:
    """By bits, whose order is that of the numbers: NaN is the largest, and makes the row NaN."""
    bits = x.view(np.int32)
    largest = np.int32(0)
    for k in range(bits.shape[0]):
        largest = max(largest, bits[k] & np.int32(0x7FFFFFFF))
    scale.view(np.int32)[0] = largest
    factor = _MOST / scale[0] if largest else np.float32(0)
    for k in range(x.shape[0]):
        codes[k] = np.int16(np.rint(x[k] * factor))
    codes[x.shape[0] :] = 0
    scale[0] /= _MOST
