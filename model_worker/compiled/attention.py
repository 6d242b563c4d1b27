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

from model_worker.compiled.jit import kernel
from model_worker.compiled.lanes import largest, put_exponentials, put_turned
from model_worker.compiled.panel_sums import FLOAT_ROWS, add_panel_sums
from model_worker.compiled.panels import FLOAT_PANEL
from model_worker.compiled.tiles import (
    KEYS,
    KEYS_OF_ONE,
    QUERIES,
    STEP,
    WEIGHTED_COLUMNS,
    WEIGHTED_ROWS,
    dot,
    put_scores,
    put_scores_of_one,
    weighted_sums,
    weighted_sums_narrow,
    weighted_sums_of_row,
)
from model_worker.compiled.vectors import LANES

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Rows = NDArray[Any]  # float32 or int8

_VALUES_AT_ONCE = 64  # that stay in the first cache while all queries weigh them
# Rows from which on a stretch's keys are turned over: sums that lie side by side in a register need
# not be added up across it, which costs as much as the products of a short vector.
_MANY_ROWS = 16
_NOTHING = np.float32(-1e30)  # a score whose weight is nothing beside any other
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
        num_panels = (length + FLOAT_PANEL - 1) // FLOAT_PANEL
        weights = np.empty((most, num_panels * FLOAT_PANEL), np.float32)
        results = np.empty((most, dim), np.float32)
        is_turned = item[3] - item[2] >= _MANY_ROWS
        turned = np.empty((num_panels if is_turned else 0, dim, FLOAT_PANEL), np.float32)
        if is_turned:
            _turn(keys[kv_head, start : start + length], turned)
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
                _scores_of_turned(queries[:num_queries], turned, seen, weights)
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
                whole = (count + LANES - 1) // LANES * LANES
                own_weights[count:whole] = _NOTHING
                top = largest(weights, i, whole)
                tops[entry, head] = top
                sums[entry, head] = put_exponentials(weights, i, whole, top)
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
def _turn(keys: Rows, turned: Floats) -> None:
    """``turned`` (panels, head_dim, FLOAT_PANEL): the keys as weights of a linear layer lie."""
    count, dim = keys.shape
    whole, even = count - count % LANES, dim - dim % LANES
    for t in range(0, whole, LANES):
        for d in range(0, even, LANES):
            put_turned(keys, t, d, turned, t // FLOAT_PANEL, t % FLOAT_PANEL)
    for t in range(turned.shape[0] * FLOAT_PANEL):
        for d in range(even if t < whole else 0, dim):
            number = np.float32(keys[t, d]) if t < count else np.float32(0)
            turned[t // FLOAT_PANEL, d, t % FLOAT_PANEL] = number


@kernel()
def _scores_of_turned(queries: Floats, turned: Floats, seen: int, scores: Floats) -> None:
    """``scores`` (queries, whole panels) with the first ``seen`` keys, and some after them."""
    count, dim = queries.shape
    tiles = (count + FLOAT_ROWS - 1) // FLOAT_ROWS
    for panel in range((seen + FLOAT_PANEL - 1) // FLOAT_PANEL):
        own_scores = scores[:, panel * FLOAT_PANEL :]
        for tile in range(tiles):
            i, after = count * tile // tiles, count * (tile + 1) // tiles
            add_panel_sums(queries, turned, after - i, i, panel, 0, dim, own_scores, i, True)


@kernel()
def _scores(queries: Floats, keys: Rows, scores: Floats) -> None:
    """``scores`` (queries, keys): every query with every key."""
    num_queries, dim = queries.shape
    count = keys.shape[0]
    whole = dim - dim % STEP
    # The last tiles begin early enough to be whole, and repeat what is there.
    if num_queries >= QUERIES and count >= KEYS:
        for key in range(0, count, KEYS):
            t = min(key, count - KEYS)
            for query in range(0, num_queries, QUERIES):
                i = min(query, num_queries - QUERIES)
                put_scores(queries, keys, i, t, whole, scores)
    else:
        for i in range(num_queries):
            for key in range(0, count, KEYS_OF_ONE):
                t = min(key, count - KEYS_OF_ONE)
                if t >= 0:
                    put_scores_of_one(queries, keys, i, t, whole, scores)
                else:
                    for u in range(count):
                        scores[i, u] = dot(queries, keys, i, u, whole)
    for i in range(num_queries if whole < dim else 0):
        for t in range(count):
            for d in range(whole, dim):
                scores[i, t] += queries[i, d] * np.float32(keys[t, d])


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
