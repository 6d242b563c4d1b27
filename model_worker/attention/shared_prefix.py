"""Which leading blocks of a step are the same for several sequences, and worth reading once.

The blocks of a shared system prompt, or of a session that several requests continue, are the very
same blocks of the pool: the tree hands them out. Attention over them can be computed for all those
sequences' queries together and joined with each one's own part by log-sum-exp (Juravsky et al.,
"Hydragen", 2024; Ye et al., "Cascade Inference", 2024). Owns that grouping alone, in plain Python,
so that every device's backend plans alike. Knows nothing of tensors, and compares nothing but ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from model_worker.attention.metadata import SequenceSpan


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Blocks that all the named spans have at the same place of their tables.

    They are blocks ``first_block`` to ``stop_block`` of each of these tables, ``num_tokens`` tokens
    in all, every one of which lies in the context of every span: no mask is needed. ``level`` is
    the number of groups before it: 0 for the system prompt, 1 for what a session adds to it.
    """

    span_indices: tuple[int, ...]
    block_ids: tuple[int, ...]
    first_block: int
    num_tokens: int
    level: int

    @property
    def stop_block(self) -> int:
        return self.first_block + len(self.block_ids)


@dataclass(frozen=True, slots=True)
class SharedPrefixPlan:
    """``groups`` by level, then by their first span. Span i reads ``own_starts[i]`` blocks, its
    leading ones, through its groups, each exactly once, and the rest of its table by itself."""

    groups: tuple[SharedPrefix, ...]
    own_starts: tuple[int, ...]

    def levels(self) -> tuple[tuple[SharedPrefix, ...], ...]:
        """The groups by level. No two groups of one level have a span in common."""
        num_levels = 1 + max((group.level for group in self.groups), default=-1)
        return tuple(
            tuple(group for group in self.groups if group.level == level)
            for level in range(num_levels)
        )


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Spans whose tables are equal up to ``equal_blocks``; ``first_block`` ones have a group."""

    span_indices: list[int]
    first_block: int
    equal_blocks: int
    level: int


def plan_shared_prefixes(
    spans: Sequence[SequenceSpan],
    block_size: int,
    min_tokens: int,
    max_query_len: int | None = None,
) -> SharedPrefixPlan:
    """Group spans by equal leading blocks that hold context only, nested where they branch.

    A group needs two spans and ``min_tokens`` tokens (of its own level): below that, one more
    kernel launch and one more partial result to merge cost more than the reads they save. A stretch
    too short for a group joins the groups of the branches behind it. Spans with more than
    ``max_query_len`` new tokens are left alone: they are bound by arithmetic, not by reads.

    The result depends on nothing but the arguments. Ids are compared by slices, which runs in C,
    and no id much more than twice. Tables must be of one type of sequence, as all lists are.
    """
    usable = [
        0
        if max_query_len is not None and span.query_len > max_query_len
        else _full_blocks(span, block_size)
        for span in spans
    ]
    own_starts = [0] * len(spans)
    groups: list[SharedPrefix] = []
    everyone = [index for index, count in enumerate(usable) if count > 0]
    waiting = _branches(spans, usable, _Candidates(everyone, 0, 0, 0))
    while waiting:
        found = waiting.pop(0)
        equal = _equal_blocks(spans, usable, found)
        level = found.level
        first = found.first_block
        num_tokens = (equal - first) * block_size
        if num_tokens >= max(min_tokens, 1):
            head = spans[found.span_indices[0]]
            block_ids = tuple(head.block_ids[first:equal])
            groups.append(
                SharedPrefix(tuple(found.span_indices), block_ids, first, num_tokens, level)
            )
            for index in found.span_indices:
                own_starts[index] = equal
            first, level = equal, level + 1
        waiting += _branches(spans, usable, _Candidates(found.span_indices, first, equal, level))
    groups.sort(key=lambda group: (group.level, group.span_indices[0]))
    return SharedPrefixPlan(tuple(groups), tuple(own_starts))


def _full_blocks(span: SequenceSpan, block_size: int) -> int:
    """Blocks of which every row was computed in an earlier step."""
    return min(span.context_len // block_size, len(span.block_ids))


def _branches(
    spans: Sequence[SequenceSpan], usable: Sequence[int], parent: _Candidates
) -> list[_Candidates]:
    """The parent's spans by their next block; only branches of several."""
    depth = parent.equal_blocks
    branches: dict[int, list[int]] = {}
    for index in parent.span_indices:
        if usable[index] > depth:
            branches.setdefault(spans[index].block_ids[depth], []).append(index)
    return [
        _Candidates(indices, parent.first_block, depth + 1, parent.level)
        for indices in branches.values()
        if len(indices) > 1
    ]


def _equal_blocks(spans: Sequence[SequenceSpan], usable: Sequence[int], found: _Candidates) -> int:
    """How many leading blocks all the candidates have alike.

    Looks ahead by doubling steps, so that what is compared in vain is no more than what is equal.
    """
    head, *others = [spans[index].block_ids for index in found.span_indices]
    limit = min(usable[index] for index in found.span_indices)
    equal, step = found.equal_blocks, 1
    while equal < limit:
        stop = min(equal + step, limit)
        wanted = head[equal:stop]
        if any(other[equal:stop] != wanted for other in others):
            return equal + min(common_length(head, other, equal, stop) for other in others)
        equal, step = stop, 2 * step
    return equal


def common_length(one: Sequence[int], other: Sequence[int], start: int, stop: int) -> int:
    """How many ids, from ``start`` on and before ``stop``, are equal without a gap."""
    low, high = start, stop
    if one[low:high] == other[low:high]:
        return high - low
    while high - low > 1:  # ids before low are equal, one before high is not
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low - start
