"""Attention over paged KV, read in place: each stretch once for all the sequences that share it.

The work is cut into items: a stretch of consecutive slots of the pool and the rows (new tokens)
that attend to it. A prefix common to several sequences is one item with the rows of all of them:
its KV is read once a step (Juravsky et al., "Hydragen", 2024). Each item leaves a partial result
per row, and a row's partial results are joined by their log-sum-exp (Milakov and Gimelshein,
"Online normalizer calculation for softmax", 2018; Dao et al., "Flash-Decoding", 2023), which is
exact up to rounding.

Knows arrays only: what an item is for is the plan's business.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange
from numpy.typing import NDArray

from model_worker.compiled.elementwise import exponentials
from model_worker.compiled.jit import kernel
from model_worker.compiled.tiles import (
    COLUMNS,
    ROW_COLUMNS,
    ROWS,
    STEP,
    WEIGHTED_COLUMNS,
    WEIGHTED_ROWS,
    dot,
    dots,
    dots_of_row,
    weighted_sums,
    weighted_sums_narrow,
    weighted_sums_of_row,
)

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Rows = NDArray[Any]  # float32 or int8

_VALUES_AT_ONCE = 64  # that stay in the first cache while all queries weigh them
# Rows from which on a stretch's keys are turned over: sums that lie side by side in a register need
# not be added up across it, which costs as much as the products of a short vector.
_MANY_ROWS = 16
_ROWS_AT_ONCE = 8  # whose scores are kept while a stretch is read: they fit the second cache


@kernel(is_parallel=True)
def attend(
    query: Floats,
    keys: Rows,
    values: Rows,
    key_scales: Floats,
    value_scales: Floats,
    scaling: np.float32,
    items: Ints,
    rows: Ints,
    limits: Ints,
    row_starts: Ints,
    row_entries: Ints,
    out: Floats,
) -> None:
    """``out`` (rows, heads * head_dim) from ``query`` (rows, heads, head_dim).

    ``keys`` and ``values`` (kv_heads, slots, head_dim), with ``key_scales`` and ``value_scales``
    (kv_heads, slots) where they are int8, of no size where they are not. The rest is an
    ``AttentionPlan``.
    """
    num_rows, heads, dim = query.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    partial = np.empty((rows.shape[0], heads, dim), np.float32)
    tops = np.empty((rows.shape[0], heads), np.float32)
    sums = np.empty((rows.shape[0], heads), np.float32)
    for task in prange(items.shape[0] * kv_heads):
        item = items[task // kv_heads]
        kv_head = task % kv_heads
        start, length = item[0], item[1]
        most = min(item[3] - item[2], _ROWS_AT_ONCE) * group
        queries = np.empty((most, dim), np.float32)
        weights = np.empty((most, length), np.float32)
        results = np.empty((most, dim), np.float32)
        powers = np.empty(length, np.int32)
        is_turned = item[3] - item[2] >= _MANY_ROWS
        turned = np.empty((dim, length if is_turned else 0), np.float32)
        if is_turned:
            for t in range(length):
                for d in range(dim):
                    turned[d, t] = keys[kv_head, start + t, d]
        for first in range(item[2], item[3], _ROWS_AT_ONCE):
            last = min(item[3], first + _ROWS_AT_ONCE)
            num_queries = (last - first) * group
            seen = limits[first]
            for entry in range(first, last):
                seen = max(seen, limits[entry])
            for i in range(num_queries):
                own = query[rows[first + i // group], kv_head * group + i % group]
                for d in range(dim):
                    queries[i, d] = own[d] * scaling
            if is_turned:
                _weighted_sums(queries, turned[:, :seen], weights[:num_queries, :seen])
            else:
                own_keys = keys[kv_head, start : start + seen]
                _scores(queries[:num_queries], own_keys, weights[:, :seen])
            for i in range(num_queries):
                entry, head = first + i // group, kv_head * group + i % group
                count = limits[entry]
                own_weights = weights[i]
                if key_scales.size:
                    for t in range(count):
                        own_weights[t] *= key_scales[kv_head, start + t]
                top = own_weights[0]
                for t in range(count):
                    top = max(top, own_weights[t])
                tops[entry, head] = top
                for t in range(count):
                    own_weights[t] -= top
                exponentials(own_weights, powers, count)
                total = np.float32(0)
                for t in range(count):
                    total += own_weights[t]
                sums[entry, head] = total
                if value_scales.size:
                    for t in range(count):
                        own_weights[t] *= value_scales[kv_head, start + t]
                for t in range(count, seen):
                    own_weights[t] = np.float32(0)
            own_values = values[kv_head, start : start + seen]
            _weighted_sums(weights, own_values, results[:num_queries])
            for i in range(num_queries):
                target = partial[first + i // group, kv_head * group + i % group]
                for d in range(dim):
                    target[d] = results[i, d]
    for row in prange(num_rows):
        own_entries = row_entries[row_starts[row] : row_starts[row + 1]]
        _join(own_entries, tops, sums, partial, out[row])


@kernel()
def _scores(queries: Floats, keys: Rows, scores: Floats) -> None:
    """``scores`` (queries, keys): every query with every key."""
    num_queries, dim = queries.shape
    count = keys.shape[0]
    whole = dim - dim % STEP
    if num_queries < COLUMNS or count < ROWS:
        _scores_of_few(queries, keys, whole, scores)
    else:
        for key in range(0, count, ROWS):
            # The last tiles begin early enough to be whole, and repeat what is there.
            t = min(key, count - ROWS)
            for query in range(0, num_queries, COLUMNS):
                i = min(query, num_queries - COLUMNS)
                totals = dots(keys, queries, t, i, whole)
                tile = scores[i : i + COLUMNS, t : t + ROWS]
                for a in range(ROWS):
                    for b in range(COLUMNS):
                        tile[b, a] = totals[a * COLUMNS + b]
    for i in range(num_queries if whole < dim else 0):
        for t in range(count):
            for d in range(whole, dim):
                scores[i, t] += queries[i, d] * np.float32(keys[t, d])


@kernel()
def _scores_of_few(queries: Floats, keys: Rows, whole: int, scores: Floats) -> None:
    count = keys.shape[0]
    for i in range(queries.shape[0]):
        for key in range(0, count, ROW_COLUMNS):
            t = min(key, count - ROW_COLUMNS)
            if t >= 0:
                totals = dots_of_row(queries, keys, i, t, whole)
                tile = scores[i, t : t + ROW_COLUMNS]
                for a in range(ROW_COLUMNS):
                    tile[a] = totals[a]
            else:
                for u in range(count):
                    scores[i, u] = dot(queries, keys, i, u, whole)[0]


@kernel()
def _weighted_sums(weights: Floats, values: Rows, out: Floats) -> None:
    """``out`` (queries, head_dim) = weights (queries, values) values."""
    num_queries, dim = out.shape
    out[:] = np.float32(0)
    for start in range(0, values.shape[0], _VALUES_AT_ONCE):
        stop = min(values.shape[0], start + _VALUES_AT_ONCE)
        own_weights, own_values = weights[:, start:stop], values[start:stop]
        tiled = num_queries - num_queries % WEIGHTED_ROWS
        for d in range(0, dim - WEIGHTED_COLUMNS + 1, WEIGHTED_COLUMNS):
            for i in range(0, tiled, WEIGHTED_ROWS):
                weighted_sums(own_weights, own_values, i, d, out)
            for i in range(tiled, num_queries):
                weighted_sums_of_row(own_weights, own_values, i, d, out)
        for i in range(num_queries):
            for d in range(dim - dim % WEIGHTED_COLUMNS, dim - 7, 8):
                weighted_sums_narrow(own_weights, own_values, i, d, out)
            for d in range(dim - dim % 8, dim):
                for t in range(stop - start):
                    out[i, d] += own_weights[i, t] * np.float32(own_values[t, d])


@kernel()
def _join(entries: Ints, tops: Floats, sums: Floats, partial: Floats, out: Floats) -> None:
    heads, dim = partial.shape[1], partial.shape[2]
    for head in range(heads):
        top = tops[entries[0], head]
        for entry in entries:
            top = max(top, tops[entry, head])
        total = np.float32(0)
        own = out[head * dim : (head + 1) * dim]
        for d in range(dim):
            own[d] = np.float32(0)
        for entry in entries:
            factor = np.exp(tops[entry, head] - top)
            total += sums[entry, head] * factor
            for d in range(dim):
                own[d] += partial[entry, head, d] * factor
        for d in range(dim):
            own[d] /= total
