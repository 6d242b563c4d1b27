"""A batch in numbers: each new token's id, position and slot, as counted out one by one."""

from __future__ import annotations

import numpy as np
from msgspec import structs

from cache_store.block_hash import Namespace
from cache_store.cache import Lease
from model_worker.attention.metadata import SequenceSpan
from model_worker.batch import ScheduledBatch, ScheduledRequest
from model_worker.protocol import SamplingParams
from model_worker.request import Request, RequestKey
from model_worker.step_inputs import step_inputs

NAMESPACE = Namespace("step-inputs")


def item(
    prompt: list[int],
    num_computed: int,
    num_scheduled: int,
    block_ids: list[int],
    drafts: tuple[int, ...] = (),
) -> ScheduledRequest:
    request = Request.create(
        RequestKey("link", "request"),
        NAMESPACE,
        np.array(prompt, dtype=np.int32),
        SamplingParams(max_tokens=8),
        seed=0,
        arrival_s=0.0,
        order=0,
        max_model_len=64,
    )
    request.num_computed_tokens = num_computed
    request.lease = Lease(NAMESPACE, block_ids)
    return ScheduledRequest.next_of(request, num_scheduled - len(drafts), drafts)


def batch_of(*items: ScheduledRequest) -> ScheduledBatch:
    return ScheduledBatch(items, (), 0, sum(each.num_scheduled_tokens for each in items))


def test_one_decoding_request_writes_its_last_row() -> None:
    inputs = step_inputs(batch_of(item([5, 6, 7, 8, 9, 10], 5, 1, [3, 8])), block_size=4)
    assert inputs.per_token.tolist() == [[10], [5], [8 * 4 + 1]]
    assert inputs.logit_rows.tolist() == [0]
    assert inputs.spans == (SequenceSpan(0, 1, 5, [3, 8]),)


def test_a_chunk_crosses_blocks_that_lie_apart() -> None:
    """Positions 3 to 8 of a table 7, 2, 5: the end of one block, all of the next, the head of one
    more; the request goes on after them."""
    inputs = step_inputs(batch_of(item(list(range(20, 32)), 3, 6, [7, 2, 5])), block_size=4)
    assert inputs.per_token[0].tolist() == [23, 24, 25, 26, 27, 28]
    assert inputs.per_token[1].tolist() == [3, 4, 5, 6, 7, 8]
    assert inputs.per_token[2].tolist() == [31, 8, 9, 10, 11, 20]
    assert inputs.logit_rows.tolist() == []


def test_requests_follow_one_another_with_tables_of_their_own() -> None:
    items = (
        item([1, 2, 3, 4], 0, 4, [9]),  # a whole prompt
        item([5, 6, 7, 8, 9], 1, 2, [4, 0]),  # a chunk
        item([10, 11, 12, 13, 14], 4, 1, [1, 6]),  # a decode
    )
    inputs = step_inputs(batch_of(*items), block_size=2 * 2)
    assert inputs.per_token[0].tolist() == [1, 2, 3, 4, 6, 7, 14]
    assert inputs.per_token[1].tolist() == [0, 1, 2, 3, 1, 2, 4]
    assert inputs.per_token[2].tolist() == [36, 37, 38, 39, 17, 18, 24]
    assert inputs.logit_rows.tolist() == [3, 6]
    assert [(span.query_start, span.query_stop) for span in inputs.spans] == [
        (0, 4),
        (4, 6),
        (6, 7),
    ]
    assert [span.context_len for span in inputs.spans] == [0, 1, 4]


def test_drafts_are_rows_after_the_last_token_and_all_of_these_give_logits() -> None:
    items = (
        item([1, 2, 3], 2, 1, [4]),
        item([5, 6, 7, 8], 2, 5, [0, 3], (20, 21, 22)),  # two of its own, then the drafts
        item([9, 10, 11], 0, 2, [5]),
    )
    inputs = step_inputs(batch_of(*items), block_size=4)
    assert inputs.per_token[0].tolist() == [3, 7, 8, 20, 21, 22, 9, 10]
    assert inputs.per_token[1].tolist() == [2, 2, 3, 4, 5, 6, 0, 1]
    assert inputs.per_token[2].tolist() == [18, 2, 3, 12, 13, 14, 20, 21]
    assert inputs.logit_rows.tolist() == [0, 2, 3, 4, 5]


def test_random_batches_agree_with_counting_token_by_token() -> None:
    rng = np.random.default_rng(5)
    for block_size in (1, 4, 32):
        items = []
        for _ in range(40):
            length = int(rng.integers(1, 200))
            computed = int(rng.integers(0, length))
            count = int(rng.integers(1, length - computed + 1))
            blocks = rng.permutation(500)[: -(-length // block_size) + int(rng.integers(0, 3))]
            tokens = rng.integers(0, 50_000, length).tolist()
            items.append(item(tokens, computed, count, blocks.tolist()))
        inputs = step_inputs(batch_of(*items), block_size)
        expected: list[tuple[int, int, int]] = []
        logit_rows = []
        for each in items:
            request, start = each.request, each.request.num_computed_tokens
            assert request.lease is not None
            for position in range(start, start + each.num_scheduled_tokens):
                block_id = request.lease.block_ids[position // block_size]
                slot = block_id * block_size + position % block_size
                expected.append((int(request.token_ids[position]), position, slot))
            if start + each.num_scheduled_tokens == request.num_tokens:
                logit_rows.append(len(expected) - 1)
        assert inputs.per_token.T.tolist() == [list(row) for row in expected]
        assert inputs.logit_rows.tolist() == logit_rows


def test_rows_that_score_a_prompt_come_before_the_one_that_is_drawn_from() -> None:
    """Of a chunk in the middle, and of one that reaches the end with a draft behind it."""
    middle = item(list(range(20, 32)), 3, 4, [7, 2])
    last = item(list(range(20, 32)), 8, 5, [4, 5, 6, 9], drafts=(40,))
    items = [
        structs.replace(middle, scored=range(5, 8)),
        structs.replace(last, scored=range(9, 12)),
    ]
    inputs = step_inputs(batch_of(*items), block_size=4)
    # Positions 4 to 6; then 8 to 10, and 11 with the draft's.
    assert inputs.logit_rows.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
