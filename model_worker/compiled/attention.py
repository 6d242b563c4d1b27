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

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Rows = NDArray[Any]  # float32 or int8

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
            _scores(queries[:num_queries], keys[kv_head, start : start + seen], weights)
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
    """``scores`` (queries, keys): every query with every key, four keys at a time."""
    num_queries, dim = queries.shape
    count = keys.shape[0]
    tiled = count - count % 4
    for t in range(0, tiled, 4):
        k0 = keys[t]
        k1 = keys[t + 1]
        k2 = keys[t + 2]
        k3 = keys[t + 3]
        for i in range(num_queries):
            query = queries[i]
            a0 = a1 = a2 = a3 = np.float32(0)
            for d in range(dim):
                q = query[d]
                a0 += q * np.float32(k0[d])
                a1 += q * np.float32(k1[d])
                a2 += q * np.float32(k2[d])
                a3 += q * np.float32(k3[d])
            scores[i, t] = a0
            scores[i, t + 1] = a1
            scores[i, t + 2] = a2
            scores[i, t + 3] = a3
    for t in range(tiled, count):
        for i in range(num_queries):
            a0 = np.float32(0)
            for d in range(dim):
                a0 += queries[i, d] * np.float32(keys[t, d])
            scores[i, t] = a0


@kernel()
def _weighted_sums(weights: Floats, values: Rows, out: Floats) -> None:
    """``out`` (queries, head_dim) = weights (queries, values) values, four values at a time."""
    num_queries, dim = out.shape
    for i in range(num_queries):
        for d in range(dim):
            out[i, d] = np.float32(0)
    count = values.shape[0]
    tiled = count - count % 4
    for t in range(0, tiled, 4):
        v0 = values[t]
        v1 = values[t + 1]
        v2 = values[t + 2]
        v3 = values[t + 3]
        for i in range(num_queries):
            own = out[i]
            w0 = weights[i, t]
            w1 = weights[i, t + 1]
            w2 = weights[i, t + 2]
            w3 = weights[i, t + 3]
            for d in range(dim):
                own[d] += (
                    w0 * np.float32(v0[d])
                    + w1 * np.float32(v1[d])
                    + w2 * np.float32(v2[d])
                    + w3 * np.float32(v3[d])
                )
    for t in range(tiled, count):
        for i in range(num_queries):
            for d in range(dim):
                out[i, d] += weights[i, t] * np.float32(values[t, d])


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
