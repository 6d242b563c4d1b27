"""The innermost loops of attention: tiles of dot products and of weighted sums.

What is summed in which order depends on neither the tile nor its neighbours, so a row's result is
the same to the bit whatever is computed beside it. Operands are float32 or, beside float32, int8.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from model_worker.compiled.vectors import (
    BYTE,
    FLOAT,
    FLOATS,
    LANES,
    LONG,
    ZEROS,
    SumLoop,
    as_floats,
    cg,
    lane_sums,
    multiply_add,
    row_pointers,
    splat,
    vector_at,
)

ROWS, COLUMNS = 4, 3  # of a tile: all sixteen vector registers are in use
ROW_COLUMNS = 8  # of a tile of one row: as many sums as hide a multiply-add's latency
STEP = LANES  # numbers that one step of a dot product takes

_types: Any = types  # numba brings no types


def _dots(rows: int, columns: int) -> Any:
    """The intrinsic ``(x, weight, m, n, depth)``: the dot products over the first ``depth`` (a
    multiple of the step) numbers of ``rows`` rows of ``x`` (any, k) from m on with ``columns`` rows
    of ``weight`` (any, k) from n on, row by row, as float32."""
    returned = _types.UniTuple(types.float32, rows * columns)

    def tile(typing_context: Any, x: Any, weight: Any, m: Any, n: Any, depth: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            m, n, depth = args[2:]
            x_rows = row_pointers(context, builder, signature.args[0], args[0], m, rows)
            w_rows = row_pointers(context, builder, signature.args[1], args[1], n, columns)
            with SumLoop(builder, depth, STEP, [ZEROS] * (rows * columns)) as loop:
                weights = [_floats_of(builder, row, loop.index) for row in w_rows]
                sums: list[Any] = []
                for row in x_rows:
                    own = _floats_of(builder, row, loop.index)
                    for column in weights:
                        sums.append(multiply_add(builder, own, column, loop.sums[len(sums)]))
                loop.close(sums)
            groups = [loop.sums[i : i + columns] for i in range(0, rows * columns, columns)]
            flat = [total for group in groups for total in lane_sums(builder, group)]
            return context.make_tuple(builder, returned, flat)

        return returned(x, weight, types.intp, types.intp, types.intp), generate

    return intrinsic(tile)


dots = _dots(ROWS, COLUMNS)
dots_of_row = _dots(1, ROW_COLUMNS)
dot = _dots(1, 1)


def _weighted_sums(rows: int, vectors: int) -> Any:
    """The intrinsic ``(weights, values, m, d, out)``: to ``rows`` rows of ``out`` (any, width) from
    m on, ``vectors`` times eight columns of it from d on, add the sums over t of weights[row, t]
    (float32) * values[t, column] (float32 or int8)."""

    def tile(typing_context: Any, weights: Any, values: Any, m: Any, d: Any, out: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            m, d = args[2:4]
            w_rows = row_pointers(context, builder, signature.args[0], args[0], m, rows)
            outputs = row_pointers(context, builder, signature.args[4], args[4], m, rows)
            targets = [
                builder.bitcast(
                    builder.gep(output, [builder.add(d, LONG(vector * LANES))]),
                    FLOATS.as_pointer(),
                )
                for output in outputs
                for vector in range(vectors)
            ]
            array = cg.create_struct_proxy(signature.args[1])(context, builder, value=args[1])
            stride = builder.extract_value(array.strides, 0)
            kind = array.data.type
            data = builder.bitcast(builder.gep(array.data, [d]), BYTE.as_pointer())
            count = builder.extract_value(array.shape, 0)
            before = [builder.load(target, align=4) for target in targets]
            with SumLoop(builder, count, 1, before) as loop:
                own = [
                    splat(builder, builder.load(builder.gep(row, [loop.index]))) for row in w_rows
                ]
                row = builder.gep(data, [builder.mul(loop.index, stride)])
                row = builder.bitcast(row, kind)
                sums = list(loop.sums)
                for vector in range(vectors):
                    value = _floats_of(builder, row, LONG(vector * LANES))
                    for index, weight in enumerate(own):
                        at = index * vectors + vector
                        sums[at] = multiply_add(builder, weight, value, sums[at])
                loop.close(sums)
            for target, total in zip(targets, loop.sums, strict=True):
                builder.store(total, target, align=4)
            return context.get_dummy_value()

        return types.void(weights, values, types.intp, types.intp, out), generate

    return intrinsic(tile)


WEIGHTED_ROWS, WEIGHTED_COLUMNS = 3, 32
weighted_sums = _weighted_sums(WEIGHTED_ROWS, WEIGHTED_COLUMNS // LANES)
weighted_sums_of_row = _weighted_sums(1, WEIGHTED_COLUMNS // LANES)
weighted_sums_narrow = _weighted_sums(1, 1)


def _floats_of(builder: Any, row: Any, index: Any) -> Any:
    """Eight numbers of a row, as float32."""
    kind = row.type.pointee
    loaded = vector_at(builder, builder.gep(row, [index]), ir.VectorType(kind, LANES))
    return loaded if kind == FLOAT else as_floats(builder, loaded)
