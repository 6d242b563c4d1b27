"""The free list of block ids, and their placement.

Owns which ids 0..num_blocks-1 are free. Knows nothing of what the others hold. Blocks of one
sequence get consecutive ids where possible, because attention over a run of consecutive blocks
reads the KV in place, while a scattered table has to be gathered first. Not thread-safe: owned
by the engine thread.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Collection, Iterator

import numpy as np

_START_BITS = 32
_START_MASK = (1 << _START_BITS) - 1
_FEW_IDS = 64  # up to here a loop over the ids is quicker than arrays of them


class BlockPool:
    """Free blocks as maximal runs of consecutive ids; O(log n) per run taken or given back.

    A run is known by its length, written at its first and at its last id, so that a freed block
    finds both neighbours without a search. The largest run comes from a heap whose outdated
    entries are dropped when they surface.
    """

    # A run this many times longer than the request is entered in its middle: the sequence that
    # ends before the run, and the one that now starts in it, both keep room to grow.
    SPREAD_FACTOR = 4

    def __init__(self, num_blocks: int) -> None:
        """Raises ValueError unless there is at least one block."""
        if not 1 <= num_blocks <= _START_MASK >> 1:
            raise ValueError(f"a pool needs between 1 and 2^31 - 1 blocks, not {num_blocks}")
        self.num_blocks = num_blocks
        self.num_free = 0
        self.num_free_runs = 0
        self._is_free = bytearray(num_blocks)
        self._length_at_start = array("i", bytes(4 * num_blocks))
        self._length_at_end = array("i", bytes(4 * num_blocks))
        self._heap: list[int] = []
        self._add_run(0, num_blocks)

    def allocate(self, num_blocks: int, after: int | None = None) -> list[int]:
        """Take ``num_blocks`` ids, if possible those right after the block ``after``.

        AssertionError if fewer are free: callers look at ``num_free`` first.
        """
        assert 0 <= num_blocks <= self.num_free, f"{num_blocks} of {self.num_free} free blocks"
        taken: list[int] = []
        if after is not None and num_blocks:
            start = after + 1
            if start < self.num_blocks and self._is_free[start]:
                length = self._length_at_start[start]
                if length:  # or else ``after`` is free, too
                    count = min(num_blocks, length)
                    self._take_front(start, length, count)
                    taken = list(range(start, start + count))
        while len(taken) < num_blocks:
            start, length = self._largest_run()
            count = min(num_blocks - len(taken), length)
            # nothing grows into the run at id 0, so there its start is as good as its middle
            is_roomy = start > 0 and length >= self.SPREAD_FACTOR * count
            offset = length // 2 if is_roomy else 0
            self._carve(start, length, offset, count)
            taken.extend(range(start + offset, start + offset + count))
        return taken

    def free(self, block_ids: Collection[int]) -> None:
        """Give blocks back. AssertionError for one that is free already, or not of this pool."""
        if not block_ids:
            return
        for start, stop in _runs(block_ids):
            assert start >= 0, f"no block {start}"
            assert stop <= self.num_blocks, f"no block {stop - 1}"
            self._add_run(start, stop - start)

    def is_free(self, block_id: int) -> bool:
        return bool(self._is_free[block_id])

    def largest_free_run(self) -> int:
        """Length in blocks of the longest run of consecutive free ids."""
        return self._largest_run()[1] if self.num_free else 0

    def free_runs(self) -> Iterator[tuple[int, int]]:
        """(first id, length) of each free run in the order of ids; O(number of runs)."""
        start = self._is_free.find(1)
        while start >= 0:
            length = self._length_at_start[start]
            yield start, length
            start = self._is_free.find(1, start + length)

    def check_integrity(self) -> None:
        """Assert that runs, marks and counts agree."""
        marks = bytearray(self.num_blocks)
        end = -1
        num_runs = 0
        for start, length in self.free_runs():
            assert start > end, "free runs overlap or were not joined"
            end = start + length
            assert length > 0, "a free run without blocks"
            assert self._length_at_end[end - 1] == length, "a run's ends disagree"
            marks[start:end] = b"\x01" * length
            num_runs += 1
        assert marks == self._is_free, "marks outside the runs"
        assert self.num_free == marks.count(1), "free blocks miscounted"
        assert self.num_free_runs == num_runs, "free runs miscounted"
        assert self.num_free == 0 or self._largest_run()[1] == max(
            length for _, length in self.free_runs()
        ), "the longest run is not at the top of the heap"

    def _largest_run(self) -> tuple[int, int]:
        """(first id, length) of the longest free run, the one with the lowest id of those."""
        while True:
            entry = self._heap[0]
            if self._is_current(entry):
                return entry & _START_MASK, -(entry >> _START_BITS)
            heapq.heappop(self._heap)

    def _is_current(self, entry: int) -> bool:
        start = entry & _START_MASK
        return self._length_at_start[start] == -(entry >> _START_BITS)

    def _add_run(self, start: int, length: int) -> None:
        """Mark blocks free and join them with the free runs on both sides."""
        end = start + length
        twice = self._is_free.find(1, start, end)
        assert twice < 0, f"block {twice} freed twice"
        self._is_free[start:end] = b"\x01" * length
        self.num_free += length
        if start and self._is_free[start - 1]:
            left = self._length_at_end[start - 1]
            self._unlink(start - left, left)
            start -= left
        if end < self.num_blocks and self._is_free[end]:
            right = self._length_at_start[end]
            self._unlink(end, right)
            end += right
        self._link(start, end - start)

    def _take_front(self, start: int, length: int, count: int) -> None:
        """As ``_carve``, from the start of the run: what a growing answer does at each block."""
        self._is_free[start : start + count] = bytes(count)
        self.num_free -= count
        self._length_at_start[start] = 0
        left = length - count
        self._length_at_end[start + length - 1] = left
        if left:
            self._length_at_start[start + count] = left
            self._offer(start + count, left)
        else:
            self.num_free_runs -= 1

    def _carve(self, start: int, length: int, offset: int, count: int) -> None:
        """Take ``count`` blocks out of a free run, from ``offset`` on."""
        first, end = start + offset, start + offset + count
        self._is_free[first:end] = bytes(count)
        self.num_free -= count
        self._unlink(start, length)
        if offset:
            self._link(start, offset)
        if end < start + length:
            self._link(end, start + length - end)

    def _link(self, start: int, length: int) -> None:
        self._length_at_start[start] = self._length_at_end[start + length - 1] = length
        self.num_free_runs += 1
        self._offer(start, length)

    def _offer(self, start: int, length: int) -> None:
        heapq.heappush(self._heap, (-length << _START_BITS) + start)
        if len(self._heap) > 2 * self.num_free_runs + 64:
            self._heap = list({entry for entry in self._heap if self._is_current(entry)})
            heapq.heapify(self._heap)

    def _unlink(self, start: int, length: int) -> None:
        self._length_at_start[start] = self._length_at_end[start + length - 1] = 0
        self.num_free_runs -= 1


def _runs(block_ids: Collection[int]) -> Iterator[tuple[int, int]]:
    """(first id, last id + 1) of each run of consecutive ids among some that are not none."""
    if len(block_ids) <= _FEW_IDS:
        ordered = sorted(block_ids)
        start = stop = ordered[0]
        for block_id in ordered:
            assert block_id >= stop, f"block {block_id} freed twice"
            if block_id > stop:
                yield start, stop
                start = block_id
            stop = block_id + 1
        yield start, stop
        return
    ids = np.sort(np.fromiter(block_ids, dtype=np.int64, count=len(block_ids)))
    steps = np.diff(ids)
    assert steps.all(), f"block {ids[:-1][steps == 0][:1]} freed twice"
    cuts = np.flatnonzero(steps != 1)
    starts = ids[np.concatenate(([0], cuts + 1))]
    stops = ids[np.concatenate((cuts, [len(ids) - 1]))] + 1
    yield from zip(starts.tolist(), stops.tolist(), strict=True)
