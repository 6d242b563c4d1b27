"""Loops over numbers one by one, eight at once, where a compiler would take several passes."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from model_worker.compiled.vectors import (
    BYTE,
    FLOATS,
    INT,
    LANES,
    LONG,
    ZEROS,
    SumLoop,
    all_lanes,
    cg,
    exponential,
    floats_of,
    lane_sums,
    numbers_from,
    put,
    row_pointers,
    shuffle,
    splat,
    vector_at,
)


def _put_exponentials(typing_context: Any, x: Any, row: Any, count: Any, top: Any) -> Any:
    """``(x, row, count, top)``: the first ``count`` (a multiple of eight) numbers of a row of ``x``
    (any, n) become exp(number - top); returns their sum."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, row, count, top = args
        numbers = row_pointers(context, builder, signature.args[0], x, row, 1)[0]
        tops = splat(builder, top)
        with SumLoop(builder, count, LANES, [ZEROS]) as loop:
            at = builder.gep(numbers, [loop.index])
            own = builder.fsub(vector_at(builder, at, FLOATS), tops)
            result = exponential(builder, own)
            put(builder, at, result)
            loop.close([builder.fadd(loop.sums[0], result)])
        return builder.extract_element(lane_sums(builder, loop.sums), INT(0))

    return types.float32(x, types.intp, types.intp, types.float32), generate


put_exponentials: Any = intrinsic(_put_exponentials)


def _largest(typing_context: Any, x: Any, row: Any, count: Any) -> Any:
    """``(x, row, count)``: of the first ``count`` (a multiple of eight, not 0) numbers of a row."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, row, count = args
        numbers = row_pointers(context, builder, signature.args[0], x, row, 1)[0]
        with SumLoop(builder, count, LANES, [vector_at(builder, numbers, FLOATS)]) as loop:
            own = vector_at(builder, builder.gep(numbers, [loop.index]), FLOATS)
            loop.close([_larger(builder, own, loop.sums[0])])
        best = loop.sums[0]
        for distance in (4, 2, 1):
            others = shuffle(builder, best, best, [(i + distance) % LANES for i in range(LANES)])
            best = _larger(builder, best, others)
        return builder.extract_element(best, INT(0))

    return types.float32(x, types.intp, types.intp), generate


largest: Any = intrinsic(_largest)


def _larger(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def _put_turned(
    typing_context: Any, x: Any, row: Any, column: Any, out: Any, i: Any, first: Any
) -> Any:
    """``(x, row, column, out, i, first)``: eight rows and columns of ``x`` (any, n), float32 or
    int8, from (row, column) on become the columns and rows of ``out[i]`` from (column, first) on,
    as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, row, column, out, i, first = args
        lines = [
            floats_of(builder, line, column)
            for line in row_pointers(context, builder, signature.args[0], x, row, LANES)
        ]
        for _ in range(3):  # what is a row's lane becomes a lane's row, one bit at a time
            lines = [
                shuffle(builder, lines[n], lines[n + 4], lanes)
                for n in range(4)
                for lanes in ((0, 8, 1, 9, 2, 10, 3, 11), (4, 12, 5, 13, 6, 14, 7, 15))
            ]
        fields = cg.create_struct_proxy(signature.args[3])(context, builder, value=out)
        stride = builder.extract_value(fields.strides, 1)
        target = row_pointers(context, builder, signature.args[3], out, i, 1)[0]
        target = builder.bitcast(builder.gep(target, [first]), BYTE.as_pointer())
        for n, line in enumerate(lines):
            offset = builder.mul(stride, builder.add(column, LONG(n)))
            put(builder, builder.gep(target, [offset]), line)
        return context.get_dummy_value()

    n = types.intp
    return types.void(x, n, n, out, n, n), generate


put_turned: Any = intrinsic(_put_turned)


def _gate_lanes(typing_context: Any, gate: Any, up: Any, i: Any, out: Any) -> Any:
    """``(gate, up, i, out)``: eight numbers from i on of ``out`` (n,) = silu(gate) * up."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        gate, up, i, out = args
        places = [
            numbers_from(context, builder, signature.args[n], array, i)
            for n, array in ((0, gate), (1, up), (3, out))
        ]
        own, other = (vector_at(builder, place, FLOATS) for place in places[:2])
        power = exponential(builder, builder.fsub(ZEROS, own))
        below = builder.fadd(all_lanes(1.0), power)
        put(builder, places[2], builder.fdiv(builder.fmul(own, other), below))
        return context.get_dummy_value()

    return types.void(gate, up, types.intp, out), generate


gate_lanes: Any = intrinsic(_gate_lanes)
