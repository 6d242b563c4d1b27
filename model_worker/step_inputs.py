"""What a scheduled batch is in numbers: token ids, positions, slots, and each request's share.

Owns the way from requests and block tables to flat arrays, in a few operations on the whole batch
rather than some on each request: with 64 requests that decode, the latter cost more than all the
rest of the engine. Knows nothing of tensors, devices or models.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt

from model_worker.attention.metadata import SequenceSpan
from model_worker.batch import ScheduledBatch
from model_worker.request import TokenIds

Int64s = npt.NDArray[np.int64]
_PLACEHOLDER = (0,)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """``per_token``: int64 (3, num_tokens), one array so that it is one transfer to a device: the
    token ids, their positions, and the slots (block_id * block_size + row) that their KV goes to.

    ``logit_rows``: int64, the rows whose logits are needed: of each request those that score its
    prompt's tokens, and then those that something is sampled from. ``spans``: one per scheduled
    request. ``drawn_rows``: int64, the rows whose token ids the step before draws; here they are 0.
    All in the order of the batch.
    """

    per_token: Int64s
    logit_rows: Int64s
    spans: tuple[SequenceSpan, ...]
    drawn_rows: Int64s = field(default_factory=lambda: np.empty(0, dtype=np.int64))


def step_inputs(batch: ScheduledBatch, block_size: int) -> StepInputs:
    """Flatten a batch that is not empty. O(new tokens + blocks that they lie in)."""
    tokens: list[TokenIds | tuple[int, ...]] = []
    starts, counts, blocks, first_blocks, num_blocks, tables = [], [], [], [], [], []
    for item in batch.scheduled:
        request = item.request
        assert request.lease is not None
        table = request.lease.block_ids
        start = item.start
        stop = start + item.num_scheduled_tokens
        first, end = start // block_size, (stop - 1) // block_size + 1
        own = _PLACEHOLDER if item.takes_drawn else request.token_ids[start : item.own_stop]
        tokens.append(own)
        if item.draft_token_ids:
            tokens.append(item.draft_token_ids)
        starts.append(start)
        counts.append(item.num_scheduled_tokens)
        blocks.append(table[first:end])
        first_blocks.append(first)
        num_blocks.append(end - first)
        tables.append(table)
    stops = np.cumsum(counts)
    per_token = np.empty((3, stops[-1]), dtype=np.int64)
    np.concatenate(tokens, out=per_token[0])
    per_token[1] = _joined_ranges(starts, counts)
    block, row = np.divmod(per_token[1], block_size)
    # From a block's place in its request's table to the one among all ``blocks``.
    block += np.repeat(np.cumsum(num_blocks) - num_blocks - first_blocks, counts)
    all_blocks = np.fromiter(chain.from_iterable(blocks), dtype=np.int64)
    per_token[2] = all_blocks[block] * block_size + row
    num_logit_rows = [item.num_logit_rows + len(item.scored) for item in batch.scheduled]
    logit_rows = _joined_ranges(stops - num_logit_rows, num_logit_rows)
    first_rows = np.asarray(stops - counts, dtype=np.int64)
    spans = tuple(map(SequenceSpan, first_rows.tolist(), counts, starts, tables))
    drawn = [index for index, item in enumerate(batch.scheduled) if item.takes_drawn]
    return StepInputs(per_token, logit_rows, spans, first_rows[np.array(drawn, dtype=np.int64)])


def _joined_ranges(starts: npt.ArrayLike, counts: list[int]) -> Int64s:
    """``counts[i]`` consecutive numbers from ``starts[i]`` on, for each i, one after the other."""
    stops = np.cumsum(counts)
    joined: Int64s = np.repeat(np.subtract(starts, stops) + counts, counts)
    joined += np.arange(stops[-1])
    return joined
