"""The cut of a step's attention: every row reads exactly its own tokens, each once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_worker.attention.metadata import SequenceSpan
from model_worker.compiled.plan import (
    LONG_PIECE_TOKENS,
    PIECE_TOKENS,
    ROWS_TOGETHER,
    AttentionPlan,
    plan_attention,
)

BLOCK = 8


def slots_read(plan: AttentionPlan, row: int) -> list[int]:
    slots: list[int] = []
    for entry in plan.row_entries[plan.row_starts[row] : plan.row_starts[row + 1]]:
        assert plan.rows[entry] == row
        (item,) = (i for i in plan.items if i[2] <= entry < i[3])
        assert 1 <= plan.limits[entry] <= item[1]
        slots += range(item[0], item[0] + plan.limits[entry])
    return sorted(slots)


def slots_of(span: SequenceSpan, row: int) -> list[int]:
    count = span.context_len + row - span.query_start + 1
    return sorted(span.block_ids[i // BLOCK] * BLOCK + i % BLOCK for i in range(count))


@st.composite
def steps(draw: st.DrawFn) -> tuple[SequenceSpan, ...]:
    """Up to four sequences, some with leading blocks in common."""
    shared = draw(st.permutations(range(100, 130)))
    spans, start, free = [], 0, 200
    for _ in range(draw(st.integers(1, 4))):
        query_len = draw(st.sampled_from([1, 2, 5, ROWS_TOGETHER, ROWS_TOGETHER + 3]))
        num_shared = draw(st.integers(0, 20))
        context_len = num_shared * BLOCK + draw(st.integers(0, 3 * BLOCK))
        num_own = -(-(context_len + query_len) // BLOCK) - num_shared
        own = list(range(free, free + num_own))
        if draw(st.booleans()):
            own.reverse()
        free += num_own
        blocks = [*shared[:num_shared], *own]
        spans.append(SequenceSpan(start, query_len, context_len, blocks))
        start += query_len
    return tuple(spans)


@settings(max_examples=60, deadline=None)
@given(steps(), st.integers(1, 4))
def test_every_row_reads_its_tokens_once(spans: tuple[SequenceSpan, ...], threads: int) -> None:
    plan = plan_attention(spans, BLOCK, threads)
    for span in spans:
        for row in range(span.query_start, span.query_stop):
            assert slots_read(plan, row) == slots_of(span, row)


def test_a_shared_prefix_is_one_item_for_all() -> None:
    shared = list(range(10, 10 + 16))  # 128 tokens
    spans = tuple(
        SequenceSpan(i, 1, 130, [*shared, 50 + i]) for i in range(3)
    )  # and three tokens each of their own
    plan = plan_attention(spans, BLOCK)
    items = sorted(map(tuple, plan.items.tolist()))
    assert items[0] == (80, 128, 0, 3)
    assert [(slot, count) for slot, count, *_ in items[1:]] == [(400, 3), (408, 3), (416, 3)]


@pytest.mark.parametrize(
    ("query_len", "length"), [(1, PIECE_TOKENS), (ROWS_TOGETHER, LONG_PIECE_TOKENS)]
)
def test_long_stretches_are_cut_evenly(query_len: int, length: int) -> None:
    total = 2 * length + 8
    blocks = list(range(total // BLOCK))
    plan = plan_attention((SequenceSpan(0, query_len, total - query_len, blocks),), BLOCK)
    sizes = plan.items[:, 1].tolist()
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) < 8
    assert max(sizes) <= length


def test_threads_get_about_the_same_work() -> None:
    spans = (SequenceSpan(0, 4 * ROWS_TOGETHER, 0, list(range(4 * ROWS_TOGETHER // BLOCK))),)
    items = plan_attention(spans, BLOCK, 2).items
    work = (items[:, 1] * (items[:, 3] - items[:, 2])).tolist()
    half = len(work) // 2
    assert len(work) == 4
    assert sum(work[:half]) == sum(work[half:])


def test_new_tokens_that_see_nothing_of_a_piece_are_not_in_it() -> None:
    num_tokens = ROWS_TOGETHER + LONG_PIECE_TOKENS
    blocks = list(range(num_tokens // BLOCK))
    plan = plan_attention((SequenceSpan(0, num_tokens, 0, blocks),), BLOCK)
    assert plan.limits.min() == 1
    assert np.all(plan.items[:, 3] > plan.items[:, 2])
