"""How a step's attention is cut into stretches of the pool and the rows that read them.

Owns the cut: shared prefixes once for all their sequences, long stretches in pieces that threads
can share out, new tokens causally. Knows nothing of tensors, layers or kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model_worker.attention.metadata import SequenceSpan
from model_worker.attention.shared_prefix import SharedPrefix, plan_shared_prefixes

Ints = NDArray[np.int64]

# A piece of so many tokens is some tens of microseconds of work for one head: enough to hide what a
# piece costs by itself, and small enough that all threads end together.
PIECE_TOKENS = 256
# With many rows a piece has work enough, and a longer one leaves fewer partial results to join; the
# keys of one head still fit the second cache.
LONG_PIECE_TOKENS = 1024
# Rows of one sequence that go together: few enough that most of what is masked is not computed.
ROWS_TOGETHER = 64
# Below this, one more partial result to join costs more than the reads that sharing saves.
MIN_SHARED_TOKENS = 64


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """``items`` int64 (items, 4): first slot, number of slots, first and last + 1 index of the
    entries that read it. An entry is a row (new token) at an item: ``rows`` (entries,) says which,
    ``limits`` (entries,) how many of the item's slots it attends to, from the first on. Row r's own
    entries are ``row_entries[row_starts[r] : row_starts[r + 1]]``.
    """

    items: Ints
    rows: Ints
    limits: Ints
    row_starts: Ints
    row_entries: Ints

    @property
    def arrays(self) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """In the order that the kernels take them."""
        return (self.items, self.rows, self.limits, self.row_starts, self.row_entries)


@dataclass(frozen=True, slots=True)
class _Piece:
    slot: int
    position: int  # of its first token in the sequence
    num_tokens: int


def plan_attention(
    spans: Sequence[SequenceSpan], block_size: int, num_threads: int = 1
) -> AttentionPlan:
    """For all rows of a step, numbered as the spans do, from 0 on without a gap. Each row reads its
    sequence's tokens up to and including its own. Items are ordered so that as many equal parts of
    them as there are threads hold about the same work."""
    shared = plan_shared_prefixes(spans, block_size, MIN_SHARED_TOKENS, ROWS_TOGETHER)
    builder = _Builder()
    for group in shared.groups:
        _add_group(builder, group, spans, block_size)
    for span, own_start in zip(spans, shared.own_starts, strict=True):
        _add_own(builder, span, own_start, block_size)
    return builder.build(spans[-1].query_stop, num_threads)


@dataclass(frozen=True, slots=True)
class _Item:
    piece: _Piece
    rows: Ints
    limits: Ints


class _Builder:
    def __init__(self) -> None:
        self._items: list[_Item] = []

    def add(self, piece: _Piece, rows: Ints, limits: Ints) -> None:
        self._items.append(_Item(piece, rows, limits))

    def build(self, num_rows: int, num_threads: int) -> AttentionPlan:
        ordered = _dealt(self._items, num_threads)
        rows = np.concatenate([item.rows for item in ordered])
        stops = np.cumsum([len(item.rows) for item in ordered])
        items = np.empty((len(ordered), 4), dtype=np.int64)
        items[:, 0] = [item.piece.slot for item in ordered]
        items[:, 1] = [item.piece.num_tokens for item in ordered]
        items[:, 2] = np.concatenate(([0], stops[:-1]))
        items[:, 3] = stops
        counts = np.bincount(rows, minlength=num_rows)
        return AttentionPlan(
            items=items,
            rows=rows,
            limits=np.concatenate([item.limits for item in ordered]),
            row_starts=np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
            row_entries=np.argsort(rows, kind="stable"),
        )


def _dealt(items: list[_Item], num_threads: int) -> list[_Item]:
    """Largest first, dealt out to the threads in turn and back again."""
    if num_threads == 1 or len(items) < 2:
        return items
    largest_first = sorted(items, key=lambda item: -len(item.rows) * item.piece.num_tokens)
    hands: list[list[_Item]] = [[] for _ in range(num_threads)]
    for number, item in enumerate(largest_first):
        turn, seat = divmod(number, num_threads)
        hands[num_threads - 1 - seat if turn % 2 else seat].append(item)
    return [item for hand in hands for item in hand]


def _add_group(
    builder: _Builder, group: SharedPrefix, spans: Sequence[SequenceSpan], block_size: int
) -> None:
    rows = np.concatenate(
        [
            np.arange(spans[index].query_start, spans[index].query_stop)
            for index in group.span_indices
        ]
    )
    length = _piece_length(len(rows))
    for piece in _pieces(group.block_ids, 0, group.num_tokens, block_size, length):
        builder.add(piece, rows, np.full(len(rows), piece.num_tokens))


def _add_own(builder: _Builder, span: SequenceSpan, first_block: int, block_size: int) -> None:
    """Every row attends to the context; new tokens to those before them and to themselves."""
    num_blocks = -(-span.kv_len // block_size)
    blocks = span.block_ids[first_block:num_blocks]
    first = first_block * block_size
    length = _piece_length(span.query_len)
    pieces = _pieces(blocks, first, span.kv_len - first, block_size, length)
    for start in range(0, span.query_len, ROWS_TOGETHER):
        stop = min(start + ROWS_TOGETHER, span.query_len)
        rows = np.arange(span.query_start + start, span.query_start + stop)
        ends = np.arange(start, stop) + span.context_len + 1  # how far each row sees
        for piece in pieces:
            blind = int(np.searchsorted(ends, piece.position, side="right"))
            if blind < len(rows):
                limits = np.minimum(ends[blind:] - piece.position, piece.num_tokens)
                builder.add(piece, rows[blind:], limits)


def _piece_length(num_rows: int) -> int:
    return PIECE_TOKENS if num_rows < ROWS_TOGETHER else LONG_PIECE_TOKENS


def _pieces(
    block_ids: Sequence[int], position: int, num_tokens: int, block_size: int, length: int
) -> list[_Piece]:
    """Consecutive slots of at most ``length``, as even as can be, in order of their tokens."""
    ids = np.asarray(block_ids, dtype=np.int64)
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    pieces = []
    for start, stop in zip([0, *breaks.tolist()], [*breaks.tolist(), len(ids)], strict=True):
        first, last = start * block_size, min(stop * block_size, num_tokens)
        slot = int(ids[start]) * block_size
        size = -(-(last - first) // -(-(last - first) // length))
        for offset in range(first, last, size):
            count = min(size, last - offset)
            pieces.append(_Piece(slot + offset - first, position + offset, count))
    return pieces
