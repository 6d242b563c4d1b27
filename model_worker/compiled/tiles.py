"""The innermost loops of attention: tiles of scores and of weighted sums.

What is summed in which order depends on neither the tile nor its neighbours, so a row's result is
the same to the bit whatever is computed beside it. Operands are float32 or, beside float32, int8.
"""

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
    cg,
    floats_of,
    lane_sums,
    multiply_add,
    put,
    row_pointers,
    splat,
    vector_at,
)

KEYS, QUERIES = 4, 3  # of a tile of scores: all sixteen vector registers are in use
KEYS_OF_ONE = 8  # of a tile of one query: as many sums as hide a multiply-add's latency
STEP = LANES  # numbers that one step of a dot product takes
_FOUR = 4  # scores that are stored at once


def _scores(num_keys: int, num_queries: int) -> Any:
    """The intrinsic ``(queries, keys, i, t, depth, scores)``: the dot products over the first
    ``depth`` (a multiple of the step) numbers of ``num_queries`` rows of ``queries`` from i on with
    ``num_keys`` (a multiple of four) rows of ``keys`` from t on, into ``scores[i:, t:]``."""

    def tile(
        typing_context: Any, queries: Any, keys: Any, i: Any, t: Any, depth: Any, scores: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            queries, keys, i, t, depth, scores = args
            q_rows = row_pointers(context, builder, signature.args[0], queries, i, num_queries)
            k_rows = row_pointers(context, builder, signature.args[1], keys, t, num_keys)
            targets = row_pointers(context, builder, signature.args[5], scores, i, num_queries)
            totals = _dots(builder, q_rows, k_rows, depth)
            for query, target in enumerate(targets):
                of_query = totals[query::num_queries]
                for first in range(0, num_keys, _FOUR):
                    four = lane_sums(builder, of_query[first : first + _FOUR])
                    put(builder, builder.gep(target, [t]), four, 4 * first)
            return context.get_dummy_value()

        n = types.intp
        return types.void(queries, keys, n, n, n, scores), generate

    return intrinsic(tile)


def _dots(builder: Any, q_rows: list[Any], k_rows: list[Any], depth: Any) -> list[Any]:
    """The sums of each key with each query, key by key, in eight lanes each."""
    count = len(q_rows) * len(k_rows)
    with SumLoop(builder, depth, STEP, [ZEROS] * count) as loop:
        queries = [floats_of(builder, row, loop.index) for row in q_rows]
        sums: list[Any] = []
        for row in k_rows:
            key = floats_of(builder, row, loop.index)
            for query in queries:
                sums.append(multiply_add(builder, key, query, loop.sums[len(sums)]))
        loop.close(sums)
    return loop.sums


put_scores = _scores(KEYS, QUERIES)
put_scores_of_one = _scores(KEYS_OF_ONE, 1)


def _dot(typing_context: Any, query: Any, keys: Any, i: Any, t: Any, depth: Any) -> Any:
    """``(queries, keys, i, t, depth)``: one of these dot products, summed in the same order."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        queries, keys, i, t, depth = args
        q_rows = row_pointers(context, builder, signature.args[0], queries, i, 1)
        k_rows = row_pointers(context, builder, signature.args[1], keys, t, 1)
        total = lane_sums(builder, _dots(builder, q_rows, k_rows, depth))
        return builder.extract_element(total, INT(0))

    return types.float32(query, keys, types.intp, types.intp, types.intp), generate


dot: Any = intrinsic(_dot)


def _weighted_sums(rows: int, vectors: int) -> Any:
    """The intrinsic ``(weights, values, m, d, out)``: to ``rows`` rows of ``out`` (any, width) from
    m on, ``vectors`` times eight columns of it from d on, add the sums over t of weights[row, t]
    (float32) * values[t, column] (float32 or int8)."""

    def tile(typing_context: Any, weights: Any, values: Any, m: Any, d: Any, out: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            m, d = args[2:4]
            w_rows = row_pointers(context, builder, signature.args[0], args[0], m, rows)
            outputs = row_pointers(context, builder, signature.args[4], args[4], m, rows)
            places = [
                (builder.gep(output, [d]), 4 * LANES * vector)
                for output in outputs
                for vector in range(vectors)
            ]
            array = cg.create_struct_proxy(signature.args[1])(context, builder, value=args[1])
            stride = builder.extract_value(array.strides, 0)
            kind = array.data.type
            data = builder.bitcast(builder.gep(array.data, [d]), BYTE.as_pointer())
            count = builder.extract_value(array.shape, 0)
            before = [vector_at(builder, target, FLOATS, offset) for target, offset in places]
            with SumLoop(builder, count, 1, before) as loop:
                own = [
                    splat(builder, builder.load(builder.gep(row, [loop.index]))) for row in w_rows
                ]
                row = builder.gep(data, [builder.mul(loop.index, stride)])
                row = builder.bitcast(row, kind)
                sums = list(loop.sums)
                for vector in range(vectors):
                    value = floats_of(builder, row, LONG(vector * LANES))
                    for index, weight in enumerate(own):
                        at = index * vectors + vector
                        sums[at] = multiply_add(builder, weight, value, sums[at])
                loop.close(sums)
            for (target, offset), total in zip(places, loop.sums, strict=True):
                put(builder, target, total, offset)
            return context.get_dummy_value()

        return types.void(weights, values, types.intp, types.intp, out), generate

    return intrinsic(tile)


WEIGHTED_ROWS, WEIGHTED_COLUMNS = 3, 32
weighted_sums = _weighted_sums(WEIGHTED_ROWS, WEIGHTED_COLUMNS // LANES)
weighted_sums_of_row = _weighted_sums(1, WEIGHTED_COLUMNS // LANES)
weighted_sums_narrow = _weighted_sums(1, 1)
