"""The innermost loop of linear layers: a few rows times one panel of weights.

The sums of a tile are vector registers, each of eight outputs. Every sum adds its products in the
order of the inputs, whatever else the tile holds, so a row's result is the same to the bit in every
batch. Operands are float32 both, or int16 rows beside int8 panels, whose products are summed in
int32: exactly, as long as nobody asks for more than ``MOST_PRODUCTS`` at once.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from model_worker.compiled.panels import FLOAT_PANEL, INTEGER_PANEL, INTEGERS_AT_ONCE
from model_worker.compiled.vectors import (
    BYTE,
    FLOATS,
    INT,
    INT_ZEROS,
    LANES,
    LONG,
    SHORTS,
    ZEROS,
    SumLoop,
    multiply_add,
    numbers_from,
    pairs_multiply_add,
    prefetch,
    put,
    row_pointers,
    splat,
    vector_at,
)
from model_worker.row_codes import LARGEST_CODE

FLOAT_ROWS, INTEGER_ROWS = 4, 4  # of a tile: as many as there are registers for their sums
MOST_PRODUCTS = (2**31 - 1) // (127 * LARGEST_CODE)


def _add_panel_sums(
    typing_context: Any,
    x: Any,
    panels: Any,
    rows: Any,
    m: Any,
    panel: Any,
    first: Any,
    count: Any,
    sums: Any,
    s: Any,
    is_first: Any,
) -> Any:
    """``(x, panels, rows, m, panel, first, count, sums, s, is_first)``: to ``sums`` (any, outputs
    of a panel) from row s on, add what ``count`` inputs from ``first`` on contribute to the
    outputs of one panel, for ``rows`` (1 to FLOAT_ROWS or INTEGER_ROWS) rows of ``x`` (any, inputs)
    from m on. For int16, ``first`` and ``count`` are even; ``is_first``: what was in ``sums`` does
    not count. What follows in the panels is asked for meanwhile: memory is slower than the sums."""
    most = FLOAT_ROWS if x.dtype == types.float32 else INTEGER_ROWS

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows = args[2]
        after = builder.append_basic_block("panel.after")
        switch = builder.switch(rows, after)
        for count in range(1, most + 1):
            block = builder.append_basic_block(f"panel.rows{count}")
            switch.add_case(LONG(count), block)
            builder.position_at_end(block)
            _tile(context, builder, signature, args, count)
            builder.branch(after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    n = types.intp
    return types.void(x, panels, n, n, n, n, n, sums, n, types.boolean), generate


add_panel_sums: Any = intrinsic(_add_panel_sums)


def _tile(context: Any, builder: Any, signature: Any, args: Any, num_rows: int) -> None:
    x, panels, _, m, panel, first, count, sums, s, is_first = args
    x_type, panels_type, sums_type = (signature.args[i] for i in (0, 1, 7))
    is_float = x_type.dtype == types.float32
    vectors = (FLOAT_PANEL if is_float else INTEGER_PANEL) // LANES
    input_bytes = FLOAT_PANEL * 4 if is_float else INTEGER_PANEL
    x_rows = [
        builder.gep(row, [first]) for row in row_pointers(context, builder, x_type, x, m, num_rows)
    ]
    targets = row_pointers(context, builder, sums_type, sums, s, num_rows)
    data = row_pointers(context, builder, panels_type, panels, panel, 1)[0]
    begin = _after_inputs(builder, data, first, input_bytes)
    ahead = _after_inputs(builder, begin, count, input_bytes)
    zeros = ZEROS if is_float else INT_ZEROS
    with SumLoop(
        builder, count, 1 if is_float else INTEGERS_AT_ONCE, [zeros] * (num_rows * vectors)
    ) as loop:
        offset = builder.mul(loop.index, LONG(input_bytes))
        prefetch(builder, builder.gep(ahead, [offset]))
        at = builder.gep(begin, [offset])
        weights = [_weights_at(builder, at, vector, is_float) for vector in range(vectors)]
        totals: list[Any] = []
        for row in x_rows:
            own = _own_at(builder, builder.gep(row, [loop.index]), is_float)
            for weight in weights:
                add = multiply_add if is_float else pairs_multiply_add
                totals.append(add(builder, own, weight, loop.sums[len(totals)]))
        loop.close(totals)
    for number, total in enumerate(loop.sums):
        row, vector = divmod(number, vectors)
        floats = total if is_float else builder.sitofp(total, FLOATS)
        offset = 4 * LANES * vector
        before = vector_at(builder, targets[row], FLOATS, offset)
        before = builder.select(is_first, ZEROS, before)
        put(builder, targets[row], builder.fadd(before, floats), offset)


def _put_panel_row(width: int) -> Any:
    """The intrinsic ``(sums, s, row_scale, scale, bias, n, out, m, is_added)``: ``width`` outputs
    from n on of row m of ``out`` (rows, outputs) are row s of ``sums`` (any, width) *
    ``row_scale`` * ``scale`` (outputs,) + ``bias`` (outputs,), or that is added to them."""

    def put_row(
        typing_context: Any,
        sums: Any,
        s: Any,
        row_scale: Any,
        scale: Any,
        bias: Any,
        n: Any,
        out: Any,
        m: Any,
        is_added: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            sums, s, row_scale, scale, bias, n, out, m, is_added = args
            own = row_pointers(context, builder, signature.args[0], sums, s, 1)[0]
            row = row_pointers(context, builder, signature.args[6], out, m, 1)[0]
            row = builder.gep(row, [n])
            factors = numbers_from(context, builder, signature.args[3], scale, n)
            biases = numbers_from(context, builder, signature.args[4], bias, n)
            row_scale = splat(builder, row_scale)
            for offset in range(0, 4 * width, 4 * LANES):
                total = builder.fmul(vector_at(builder, own, FLOATS, offset), row_scale)
                total = builder.fmul(total, vector_at(builder, factors, FLOATS, offset))
                total = builder.fadd(total, vector_at(builder, biases, FLOATS, offset))
                before = vector_at(builder, row, FLOATS, offset)
                before = builder.select(is_added, before, ZEROS)
                put(builder, row, builder.fadd(total, before), offset)
            return context.get_dummy_value()

        i, real = types.intp, types.float32
        returned = types.void(sums, i, real, scale, bias, i, out, i, types.boolean)
        return returned, generate

    return intrinsic(put_row)


put_float_row = _put_panel_row(FLOAT_PANEL)
put_integer_row = _put_panel_row(INTEGER_PANEL)


def _after_inputs(builder: Any, pointer: Any, count: Any, bytes_of_one: int) -> Any:
    pointer = builder.bitcast(pointer, BYTE.as_pointer())
    return builder.gep(pointer, [builder.mul(count, LONG(bytes_of_one))])


def _weights_at(builder: Any, pointer: Any, vector: int, is_float: bool) -> Any:
    if is_float:
        return vector_at(builder, pointer, FLOATS, 4 * LANES * vector)
    bytes_ = vector_at(builder, pointer, ir.VectorType(BYTE, 2 * LANES), 2 * LANES * vector)
    return builder.sext(bytes_, SHORTS)


def _own_at(builder: Any, pointer: Any, is_float: bool) -> Any:
    """One number of a row, or two of int16, in all lanes."""
    if is_float:
        return splat(builder, builder.load(pointer))
    pair = builder.load(builder.bitcast(pointer, INT.as_pointer()), align=2)
    return builder.bitcast(splat(builder, pair), SHORTS)
