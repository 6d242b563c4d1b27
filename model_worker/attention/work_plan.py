"""What the kernels have to do in a step: which query rows meet which stretch of which KV.

A unit of work is a tile of query rows against consecutive KV tokens of one block table. A long
stretch is split so that few sequences fill a device too (Dao et al., "Flash-Decoding", 2023), the
leading blocks that several sequences share are met by all their rows at once, and every row that
has several partial results gets the list of them. One description serves decode, chunks, mixed
batches and shared prefixes. Plain numpy: nothing here knows a device or a kernel.

How a sequence is split depends on that sequence alone, so that its result does not depend on what
else is in the batch (unless it shares a prefix with it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model_worker.attention.block_tables import FlatTables
from model_worker.attention.metadata import SequenceSpan
from model_worker.attention.shared_prefix import SharedPrefixPlan

Int32Array = NDArray[np.int32]

MIN_SPLIT_TOKENS = 256
ITEM_FIELDS = 8
"""int32 fields of an item: rows_start, num_rows, table_start, kv_start, full_stop, kv_stop,
part_start, 0. Its rows are ``query_rows[rows_start:][:num_rows]``; its KV are tokens kv_start to
kv_stop of the table at ``tables[table_start:]``; before full_stop (whole tiles from kv_start) every
row sees every token; part_start is the first row of its partial result, -1 for a final one."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """How much a kernel's tile takes, and when a stretch is worth splitting.

    ``kv_heads``: a tile is run once for each. ``small_rows`` and ``large_rows``: tokens in a tile
    of the two kernels. ``small_kv`` and ``large_kv``: KV tokens that their loops take at a time.
    ``target_units``: tiles that fill the device. ``min_split``: tokens, a multiple of both loops'.
    """

    kv_heads: int
    small_rows: int
    large_rows: int
    small_kv: int
    large_kv: int
    target_units: int
    min_split: int = MIN_SPLIT_TOKENS
    max_splits: int = 32


@dataclass(frozen=True, slots=True)
class WorkPlan:
    """``small`` and ``large``: items (n, ITEM_FIELDS), longest first. ``row_limits[t]``: how many
    KV tokens new token t sees. Partial results of token t: ``part_ids[part_starts[t]:
    part_starts[t + 1]]``, none where an item writes it directly. ``num_parts``: rows of them."""

    small: Int32Array
    large: Int32Array
    query_rows: Int32Array
    row_limits: Int32Array
    part_starts: Int32Array
    part_ids: Int32Array
    tables: Int32Array
    num_parts: int

    @property
    def num_rows(self) -> int:
        return len(self.row_limits)


@dataclass(frozen=True, slots=True)
class _Strips:
    """Query rows that meet the same KV: one strip for each span, then one for each group. Arrays.

    Row r of a strip sees tokens ``kv_start`` to ``first_limit`` + r x ``is_causal``.
    """

    rows_start: Int32Array
    num_rows: Int32Array
    table_start: Int32Array
    kv_start: Int32Array
    first_limit: Int32Array
    is_causal: Int32Array
    is_final: NDArray[np.bool_]  # nothing else contributes to its rows


def plan_work(
    spans: Sequence[SequenceSpan],
    shared: SharedPrefixPlan,
    tables: FlatTables,
    shape: TileShape,
    block_size: int,
) -> WorkPlan:
    """The step's items. ``spans`` follow one another: the first begins at row 0."""
    query_len = np.array([span.query_len for span in spans], dtype=np.int32)
    context = np.array([span.context_len for span in spans], dtype=np.int32)
    num_rows = int(query_len.sum())
    row_limits = np.repeat(context + 1, query_len) + _counters(query_len)
    group_rows = [
        np.arange(spans[index].query_start, spans[index].query_stop, dtype=np.int32)
        for group in shared.groups
        for index in group.span_indices
    ]
    query_rows = np.concatenate([np.arange(num_rows, dtype=np.int32), *group_rows])
    strips = _strips(query_len, context, shared, tables, block_size)
    items, is_small, part_rows = _items(strips, shape)
    part_tokens = query_rows[part_rows]
    part_ids = np.argsort(part_tokens, kind="stable").astype(np.int32)
    part_starts = np.zeros(num_rows + 1, dtype=np.int32)
    np.cumsum(np.bincount(part_tokens, minlength=num_rows), out=part_starts[1:])
    return WorkPlan(
        small=items[is_small],
        large=items[~is_small],
        query_rows=query_rows,
        row_limits=row_limits,
        part_starts=part_starts,
        part_ids=part_ids,
        tables=tables.block_ids,
        num_parts=len(part_rows),
    )


def _strips(
    query_len: Int32Array,
    context: Int32Array,
    shared: SharedPrefixPlan,
    tables: FlatTables,
    block_size: int,
) -> _Strips:
    own_start = np.array(shared.own_starts, dtype=np.int32) * block_size
    groups = shared.groups
    first_members = [group.span_indices[0] for group in groups]
    group_rows = np.array(
        [sum(int(query_len[index]) for index in group.span_indices) for group in groups],
        dtype=np.int32,
    )
    starts = np.array([group.first_block for group in groups], dtype=np.int32) * block_size
    stops = np.array([group.stop_block for group in groups], dtype=np.int32) * block_size
    own_rows = _before(query_len)
    shared_rows = int(query_len.sum()) + _before(group_rows)
    return _Strips(
        rows_start=np.concatenate([own_rows, shared_rows]),
        num_rows=np.concatenate([query_len, group_rows]),
        table_start=np.concatenate([tables.starts, tables.starts[first_members]]),
        kv_start=np.concatenate([own_start, starts]),
        first_limit=np.concatenate([context + 1, stops]),
        is_causal=np.repeat(np.array([1, 0], dtype=np.int32), [len(context), len(groups)]),
        is_final=np.concatenate([own_start == 0, np.zeros(len(groups), dtype=np.bool_)]),
    )


def _items(strips: _Strips, shape: TileShape) -> tuple[Int32Array, NDArray[np.bool_], Int32Array]:
    """Items longest first, which of them are small, and for each row of the partial results its
    place in ``query_rows``."""
    is_small_strip = strips.num_rows <= shape.small_rows
    num_tiles = np.where(is_small_strip, 1, -(-strips.num_rows // shape.large_rows))
    last_limit = strips.first_limit + strips.is_causal * (strips.num_rows - 1)
    split_len = _split_len(num_tiles, last_limit - strips.kv_start, shape)
    # Tiles of query rows.
    strip = np.repeat(np.arange(len(num_tiles)), num_tiles)
    skipped = _counters(num_tiles) * shape.large_rows
    rows = np.minimum(shape.large_rows, strips.num_rows[strip] - skipped)
    rows = np.where(is_small_strip[strip], strips.num_rows[strip], rows)
    first_limit = strips.first_limit[strip] + strips.is_causal[strip] * skipped
    kv_stop = first_limit + strips.is_causal[strip] * (rows - 1)
    num_splits = -(-(kv_stop - strips.kv_start[strip]) // split_len[strip])
    is_final = strips.is_final[strip] & (num_splits == 1)
    # Splits of tiles.
    tile = np.repeat(np.arange(len(strip)), num_splits)
    owner = strip[tile]
    length = split_len[owner]
    start = strips.kv_start[owner] + _counters(num_splits) * length
    stop = np.minimum(start + length, kv_stop[tile])
    is_small = is_small_strip[owner]
    step = np.where(is_small, shape.small_kv, shape.large_kv)
    seen_by_all = np.maximum(np.minimum(stop, first_limit[tile]) - start, 0)
    part_len = np.where(is_final[tile], 0, rows[tile])
    items = np.zeros((len(tile), ITEM_FIELDS), dtype=np.int32)
    items[:, 0] = (strips.rows_start[strip] + skipped)[tile]
    items[:, 1] = rows[tile]
    items[:, 2] = strips.table_start[owner]
    items[:, 3] = start
    items[:, 4] = start + seen_by_all // step * step
    items[:, 5] = stop
    items[:, 6] = np.where(is_final[tile], -1, _before(part_len))
    part_rows = np.repeat(items[:, 0], part_len) + _counters(part_len)
    order = np.argsort(start - stop, kind="stable")
    return items[order], is_small[order], part_rows


def _split_len(num_tiles: Int32Array, kv_len: Int32Array, shape: TileShape) -> Int32Array:
    wanted = shape.target_units // (num_tiles * shape.kv_heads)
    num_splits = np.clip(wanted, 1, shape.max_splits)
    length = -(-kv_len // num_splits)
    rounded: Int32Array = -(-length // shape.min_split) * shape.min_split
    return rounded


def _counters(lengths: Int32Array) -> Int32Array:
    """0, 1, ... for each length, one after another."""
    total = int(lengths.sum())
    return np.arange(total, dtype=np.int32) - np.repeat(_before(lengths), lengths)


def _before(lengths: Int32Array) -> Int32Array:
    """The sum of what comes before each element."""
    sums = np.zeros(len(lengths), dtype=np.int32)
    np.cumsum(lengths[:-1], out=sums[1:])
    return sums
