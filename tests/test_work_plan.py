"""Items of work: exact plans of small steps, and what must hold for any step."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from model_worker.attention.block_tables import BlockTables
from model_worker.attention.metadata import SequenceSpan
from model_worker.attention.shared_prefix import plan_shared_prefixes
from model_worker.attention.step_planner import StepPlanner
from model_worker.attention.work_plan import TileShape, WorkPlan, plan_work
from tests.attention_kit import AttentionCase, Share

BLOCK = 8
SHAPE = TileShape(
    kv_heads=2,
    small_rows=4,
    large_rows=16,
    small_kv=16,
    large_kv=8,
    target_units=16,
    min_split=32,
    max_splits=4,
)


def make_plan(
    spans: tuple[SequenceSpan, ...], shape: TileShape = SHAPE, min_shared: int = 10**6
) -> WorkPlan:
    shared = plan_shared_prefixes(spans, BLOCK, min_shared, shape.large_rows // 2)
    return plan_work(spans, shared, BlockTables(BLOCK).flatten(spans), shape, BLOCK)


def test_decode_is_split_by_its_own_length() -> None:
    spans = (
        SequenceSpan(0, 1, 99, list(range(100, 113))),
        SequenceSpan(1, 1, 20, [7, 5, 6]),
    )
    plan = make_plan(spans)
    # 16 units / 2 heads = 8 splits wanted, 4 allowed: 25 tokens, rounded up to 32.
    assert plan.small.tolist() == [
        [0, 1, 0, 0, 32, 32, 0, 0],
        [0, 1, 0, 32, 64, 64, 1, 0],
        [0, 1, 0, 64, 96, 96, 2, 0],
        [1, 1, 13, 0, 16, 21, -1, 0],
        [0, 1, 0, 96, 96, 100, 3, 0],
    ]
    assert plan.large.shape == (0, 8)
    assert plan.query_rows.tolist() == [0, 1]
    assert plan.row_limits.tolist() == [100, 21]
    assert plan.part_starts.tolist() == [0, 4, 4]
    assert plan.part_ids.tolist() == [0, 1, 2, 3]
    assert plan.tables.tolist() == [*range(100, 113), 7, 5, 6]
    assert (plan.num_rows, plan.num_parts) == (2, 4)


def test_a_chunk_is_tiled_and_each_tile_ends_where_its_last_row_looks() -> None:
    plan = make_plan((SequenceSpan(0, 40, 10, list(range(7))),))
    assert plan.small.shape == (0, 8)
    # Three tiles of up to 16 rows, two heads: 2 splits wanted, of at least 32 tokens.
    assert plan.large.tolist() == [
        [16, 16, 0, 0, 24, 32, 0, 0],
        [32, 8, 0, 0, 32, 32, 32, 0],
        [0, 16, 0, 0, 8, 26, -1, 0],
        [32, 8, 0, 32, 40, 50, 40, 0],
        [16, 16, 0, 32, 32, 42, 16, 0],
    ]
    assert plan.part_starts.tolist() == [
        *[0] * 16, *range(0, 32, 2), *range(32, 50, 2)
    ]  # fmt: skip
    assert plan.part_ids.tolist() == [
        *[part for row in range(16) for part in (row, 16 + row)],
        *[part for row in range(8) for part in (32 + row, 40 + row)],
    ]


def test_a_shared_prefix_is_met_by_all_rows_at_once() -> None:
    shared = list(range(50, 54))
    spans = (
        SequenceSpan(0, 1, 40, [*shared, 1, 2]),
        SequenceSpan(1, 2, 33, [*shared, 3]),
        SequenceSpan(3, 1, 9, [8, 9]),
    )
    plan = make_plan(spans, min_shared=32)
    assert plan.small.tolist() == [
        [4, 3, 0, 0, 32, 32, 3, 0],  # both spans' rows over the prefix
        [3, 1, 11, 0, 0, 10, -1, 0],
        [0, 1, 0, 32, 32, 41, 0, 0],
        [1, 2, 6, 32, 32, 35, 1, 0],
    ]
    assert plan.query_rows.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert plan.row_limits.tolist() == [41, 34, 35, 10]
    assert plan.part_starts.tolist() == [0, 2, 4, 6, 6]
    assert plan.part_ids.tolist() == [0, 3, 1, 4, 2, 5]


def read_of(plan: WorkPlan) -> tuple[list[list[int]], list[int]]:
    """What each new token reads, as slots of the pool in the order of its partial results, and how
    often its result is written."""
    parts: dict[int, list[int]] = {}
    direct: dict[int, list[int]] = {}
    for item in np.concatenate([plan.small, plan.large]).tolist():
        rows_start, num_rows, table_start, start, full_stop, stop, part_start, _ = item
        assert start < stop
        assert start <= full_stop <= stop
        for row in range(num_rows):
            token = int(plan.query_rows[rows_start + row])
            limit = int(plan.row_limits[token])
            assert full_stop <= limit or full_stop == start
            positions = range(start, min(stop, limit))
            slots = [
                int(plan.tables[table_start + p // BLOCK]) * BLOCK + p % BLOCK for p in positions
            ]
            if part_start < 0:
                assert token not in direct
                direct[token] = slots
            else:
                assert part_start + row not in parts
                parts[part_start + row] = slots
    assert sorted(parts) == list(range(plan.num_parts))
    reads, writes = [], []
    for token in range(plan.num_rows):
        ids = plan.part_ids[plan.part_starts[token] : plan.part_starts[token + 1]].tolist()
        reads.append([*direct.get(token, []), *(slot for part in ids for slot in parts[part])])
        writes.append((token in direct) + (len(ids) > 0))
    return reads, writes


shares = st.lists(
    st.tuples(st.integers(0, 150), st.integers(1, 3) | st.integers(1, 50), st.integers(0, 18),
              st.sampled_from("ab")),
    min_size=1, max_size=5,
)  # fmt: skip


@given(shares, st.sampled_from([1, 16, 200]), st.sampled_from([8, 10**6]), st.integers(0, 5))
@settings(deadline=None, max_examples=60)
def test_every_token_reads_its_past_once(
    drawn: list[tuple[int, int, int, str]], target_units: int, min_shared: int, seed: int
) -> None:
    case = AttentionCase(
        tuple(
            Share(context, new, min(prefix, context // BLOCK), name)
            for context, new, prefix, name in drawn
        ),
        block_size=BLOCK,
        seed=seed,
    )
    spans = case.spans()
    shape = TileShape(2, 4, 16, 16, 8, target_units, 32, 4)
    plan = make_plan(spans, shape, min_shared)
    reads, writes = read_of(plan)
    assert writes == [1] * plan.num_rows
    for span in spans:
        for row in range(span.query_len):
            limit = span.context_len + row + 1
            wanted = [span.block_ids[p // BLOCK] * BLOCK + p % BLOCK for p in range(limit)]
            assert sorted(reads[span.query_start + row]) == sorted(wanted)


def test_how_a_sequence_is_split_depends_on_it_alone() -> None:
    spans = AttentionCase((Share(140, 1), Share(90, 20), Share(3, 1)), block_size=BLOCK).spans()
    together, _ = read_of(make_plan(spans))
    for span in spans:
        alone = SequenceSpan(0, span.query_len, span.context_len, span.block_ids)
        reads, _ = read_of(make_plan((alone,)))
        assert reads == together[span.query_start : span.query_stop]


def test_tables_are_converted_once_and_told_apart_by_content() -> None:
    tables = BlockTables(BLOCK)
    ids = [4, 5, 6, 9]
    first = tables.flatten((SequenceSpan(0, 1, 15, ids), SequenceSpan(1, 1, 0, [2])))
    assert first.block_ids.tolist() == [4, 5, 2]
    assert first.starts.tolist() == [0, 2]
    assert not first.are_known
    longer = tables.flatten((SequenceSpan(0, 2, 24, ids),))
    assert (longer.block_ids.tolist(), longer.are_known) == ([4, 5, 6, 9], True)
    shorter = tables.flatten((SequenceSpan(0, 1, 0, ids),))
    assert (shorter.block_ids.tolist(), shorter.are_known) == ([4], True)
    ids[1] = 7  # the same list, other blocks
    changed = tables.flatten((SequenceSpan(0, 1, 15, ids),))
    assert (changed.block_ids.tolist(), changed.are_known) == ([4, 7], False)
    assert tables.flatten(()).block_ids.tolist() == []


def test_shared_prefixes_are_planned_anew_when_they_no_longer_hold() -> None:
    planner = StepPlanner(SHAPE, BLOCK, min_shared_tokens=16)
    ids = [[1, 2, 3, 10, 11], [1, 2, 3, 20, 21], [1, 2, 30, 31, 32]]

    def plan(contexts: list[int]) -> WorkPlan:
        spans = tuple(
            SequenceSpan(row, 1, context, ids[row]) for row, context in enumerate(contexts)
        )
        got = planner.plan(spans)
        wanted = StepPlanner(SHAPE, BLOCK, min_shared_tokens=16).plan(spans)
        assert got.small.tolist() == wanted.small.tolist()
        assert got.part_ids.tolist() == wanted.part_ids.tolist()
        return got

    assert plan([25, 26, 27]).num_parts == 6
    assert plan([26, 27, 28]).num_parts == 6
    assert plan([9, 27, 28]).num_parts == 4  # one begins again, before the end of the prefix
    ids[0][1] = 9
    assert plan([26, 27, 28]).num_parts == 4
    assert planner.plan((SequenceSpan(0, 1, 26, ids[1]),)).num_parts == 0


def test_without_sharing_each_prefix_is_read_apart() -> None:
    spans = tuple(SequenceSpan(row, 1, 25, [1, 2, 3, 10 + row]) for row in range(2))
    assert StepPlanner(SHAPE, BLOCK, min_shared_tokens=None).plan(spans).num_parts == 0
    planner = StepPlanner(SHAPE, BLOCK, min_shared_tokens=16)
    assert planner.plan(spans).num_parts == 4
    assert planner.plan(spans, is_sharing=False).num_parts == 0
