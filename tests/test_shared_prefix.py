"""Groups of spans with equal leading blocks: exact plans, and what must hold for any tables."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_worker.attention.metadata import SequenceSpan
from model_worker.attention.shared_prefix import (
    SharedPrefix,
    SharedPrefixPlan,
    common_length,
    plan_shared_prefixes,
)

BLOCK = 4


def make_spans(*shares: tuple[list[int], int, int]) -> tuple[SequenceSpan, ...]:
    """Each share: block ids, tokens of context, new tokens."""
    spans = []
    row = 0
    for block_ids, context, new in shares:
        spans.append(SequenceSpan(row, new, context, block_ids))
        row += new
    return tuple(spans)


def test_a_prefix_shared_by_all() -> None:
    spans = make_spans(
        ([7, 8, 9, 1], 13, 1),
        ([7, 8, 9, 2], 12, 1),
        ([7, 8, 9, 3, 4], 17, 2),
    )
    plan = plan_shared_prefixes(spans, BLOCK, min_tokens=12)
    assert plan == SharedPrefixPlan((SharedPrefix((0, 1, 2), (7, 8, 9), 0, 12, 0),), (3, 3, 3))
    assert plan.groups[0].stop_block == 3


def test_below_the_threshold_nothing_is_shared() -> None:
    spans = make_spans(([7, 8, 9, 1], 13, 1), ([7, 8, 9, 2], 12, 1))
    assert plan_shared_prefixes(spans, BLOCK, min_tokens=13) == SharedPrefixPlan((), (0, 0))
    assert plan_shared_prefixes(spans, BLOCK, 13).levels() == ()


def test_levels_nest_where_tables_branch() -> None:
    """A system prompt of two blocks; two sessions with three and two blocks more."""
    spans = make_spans(
        ([1, 2, 10, 11, 12, 50], 20, 1),
        ([1, 2, 20, 21, 60], 17, 1),
        ([1, 2, 10, 11, 12, 51], 21, 1),
        ([1, 2, 20, 21, 61], 16, 1),
        ([1, 2, 70], 9, 1),
        ([3, 2, 10], 9, 1),
    )
    plan = plan_shared_prefixes(spans, BLOCK, min_tokens=8)
    assert plan.groups == (
        SharedPrefix((0, 1, 2, 3, 4), (1, 2), 0, 8, 0),
        SharedPrefix((0, 2), (10, 11, 12), 2, 12, 1),
        SharedPrefix((1, 3), (20, 21), 2, 8, 1),
    )
    assert plan.own_starts == (5, 4, 5, 4, 2, 0)
    assert [len(level) for level in plan.levels()] == [1, 2]


def test_a_stretch_too_short_joins_the_branches_behind_it() -> None:
    spans = make_spans(
        ([1, 10, 11, 12], 16, 1),
        ([1, 20, 21, 22], 16, 1),
        ([1, 10, 11, 13], 16, 1),
        ([1, 20, 21, 22], 16, 1),
    )
    plan = plan_shared_prefixes(spans, BLOCK, min_tokens=8)
    assert plan.groups == (
        SharedPrefix((0, 2), (1, 10, 11), 0, 12, 0),
        SharedPrefix((1, 3), (1, 20, 21, 22), 0, 16, 0),
    )
    assert plan.own_starts == (3, 4, 3, 4)


def test_new_rows_and_partly_filled_blocks_are_not_shared() -> None:
    # Block 8 is full for the first span only after this step; the second has it as context.
    spans = make_spans(([7, 8, 9], 7, 1), ([7, 8, 9], 11, 1))
    plan = plan_shared_prefixes(spans, BLOCK, min_tokens=1)
    assert plan.groups == (SharedPrefix((0, 1), (7,), 0, 4, 0),)
    assert plan.own_starts == (1, 1)


def test_a_span_that_ends_inside_a_group_leaves_it_to_the_others() -> None:
    spans = make_spans(([1, 2, 3, 4], 16, 0), ([1, 2], 8, 0), ([1, 2, 3, 4], 16, 0))
    plan = plan_shared_prefixes(spans, BLOCK, min_tokens=4)
    assert plan.groups == (
        SharedPrefix((0, 1, 2), (1, 2), 0, 8, 0),
        SharedPrefix((0, 2), (3, 4), 2, 8, 1),
    )
    assert plan.own_starts == (4, 2, 4)


def test_the_same_block_at_another_place_is_no_common_prefix() -> None:
    spans = make_spans(([1, 2, 3], 12, 1), ([2, 1, 3], 12, 1), ([1, 9, 3], 12, 1))
    plan = plan_shared_prefixes(spans, BLOCK, min_tokens=4)
    assert plan.groups == (SharedPrefix((0, 2), (1,), 0, 4, 0),)


def test_spans_with_many_new_tokens_are_left_alone() -> None:
    spans = make_spans(([1, 2, 3], 8, 3), ([1, 2, 4], 8, 1), ([1, 2, 5], 8, 1))
    plan = plan_shared_prefixes(spans, BLOCK, min_tokens=8, max_query_len=2)
    assert plan.groups == (SharedPrefix((1, 2), (1, 2), 0, 8, 0),)
    assert plan.own_starts == (0, 2, 2)


@pytest.mark.parametrize("shares", [[], [([1, 2], 8, 1)], [([1], 0, 3), ([1], 0, 3)]])
def test_nothing_to_share(shares: list[tuple[list[int], int, int]]) -> None:
    plan = plan_shared_prefixes(make_spans(*shares), BLOCK, min_tokens=0)
    assert plan == SharedPrefixPlan((), (0,) * len(shares))


def test_common_length_finds_the_first_difference() -> None:
    for equal in range(9):
        one = list(range(9))
        other = [*range(equal), *range(100, 109 - equal)]
        for start in range(equal + 1):
            assert common_length(one, other, start, 9) == equal - start
    assert common_length([1, 2, 3], [1, 2, 3], 1, 2) == 1
    assert common_length([1, 9, 3], [1, 2, 3], 0, 3) == 1


# A walk down a small tree gives tables as a radix tree does; noise breaks that on purpose.
tables = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), max_size=7),
        st.integers(0, 3),  # tokens in a last, partly filled block
        st.integers(1, 3),
        st.booleans(),
    ),
    max_size=7,
)


def table_of(walk: list[int], is_noisy: bool) -> list[int]:
    block_ids = []
    node = 1
    for turn in walk:
        node = 2 * node + turn
        block_ids.append(node)
    if is_noisy and block_ids:
        block_ids[len(block_ids) // 2] = 10_000
    return block_ids


@given(tables, st.integers(1, 9))
@settings(deadline=None, max_examples=100)
def test_every_context_block_is_read_once_and_by_its_own_span(
    shares: list[tuple[list[int], int, int, bool]], min_tokens: int
) -> None:
    spans = make_spans(
        *[
            ([*table_of(walk, is_noisy), 999], len(walk) * BLOCK + tail, new)
            for walk, tail, new, is_noisy in shares
        ]
    )
    plan = plan_shared_prefixes(spans, BLOCK, min_tokens)
    covered: list[list[int]] = [[] for _ in spans]
    levels: list[list[int]] = [[] for _ in spans]
    for group in plan.groups:
        assert len(group.span_indices) > 1
        assert group.span_indices == tuple(sorted(set(group.span_indices)))
        assert group.num_tokens == len(group.block_ids) * BLOCK >= min_tokens
        for index in group.span_indices:
            assert group.first_block == len(covered[index])
            covered[index] += group.block_ids
            levels[index].append(group.level)
    for span, blocks, level, start in zip(spans, covered, levels, plan.own_starts, strict=True):
        assert span.block_ids[:start] == blocks
        assert start * BLOCK <= span.context_len
        assert level == list(range(len(level)))
    assert plan == plan_shared_prefixes(spans, BLOCK, min_tokens)
    if min_tokens <= BLOCK:
        assert_nothing_is_missed(spans, plan)


def assert_nothing_is_missed(spans: tuple[SequenceSpan, ...], plan: SharedPrefixPlan) -> None:
    """With the lowest threshold each span shares all that any other has in common with it."""
    for i, span in enumerate(spans):
        best = 0
        for j, other in enumerate(spans):
            if i != j:
                limit = min(span.context_len, other.context_len) // BLOCK
                best = max(best, common_length(span.block_ids, other.block_ids, 0, limit))
        assert plan.own_starts[i] == best


def test_planning_many_long_tables_is_quick() -> None:
    """64 spans of 1,024 blocks: 900 shared by all, 100 more by each pair."""
    spans = make_spans(
        *[
            (
                [
                    *range(900),
                    *range(1000 * (i // 2 + 1), 1000 * (i // 2 + 1) + 100),
                    *range(10**6 + 100 * i, 10**6 + 100 * i + 24),
                ],
                1023 * BLOCK,
                1,
            )
            for i in range(64)
        ]
    )
    best = 1.0
    for _ in range(5):
        started = time.perf_counter()
        plan = plan_shared_prefixes(spans, BLOCK, min_tokens=64)
        best = min(best, time.perf_counter() - started)
    assert len(plan.groups) == 33
    assert plan.own_starts == (1000,) * 64
    assert best < 0.05, best
