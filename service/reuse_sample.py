"""How far apart uses of the same block are, measured on a sample of the blocks.

Owns the sample and the histogram of reuse distances: SHARDS with a fixed size (Waldspurger, Park,
Garthwaite and Ahmad, "Efficient MRC Construction with SHARDS", FAST 2015), with the correction that
is called SHARDS-adj there. A block is in the sample if its hash lies below a threshold, which falls
as more blocks come than the sample holds; a distance within the sample stands for one that is as
many times longer as the sample leaves blocks out.

A distance is the number of other blocks that were used later than this one. Under lru that is all
that matters (Mattson et al., "Evaluation techniques for storage hierarchies", 1970): whatever the
size of a cache, it holds the blocks that were used last. Of one request the first block counts as
used last and the deepest as used first, as the cache has it: so a block is never later than those
that it stands behind, and one that is found has its whole prefix found.

Knows nothing of records, tokens or sizes in bytes.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["ReuseSample"]

_HASHES = 2**64
_STEPS = 16  # cells of the histogram per doubling of the distance
_CELLS = 48 * _STEPS
_SLACK = 1.25  # so much larger may it get before it is cut, since cutting sorts all of it


class ReuseSample:
    """At most ``max_blocks`` blocks are followed."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._threshold = _HASHES
        self._known = np.empty(0, dtype=np.uint64)  # hashes in the sample, ascending
        self._used = np.empty(0, dtype=np.int64)  # when each was used last
        self._times = np.empty(0, dtype=np.int64)  # the same, ascending
        self._now = 0
        self._reused = np.zeros(_CELLS)  # uses again, by distance, each for all that it stands for
        self._num_sampled = 0.0  # uses, likewise
        self.num_used = 0  # uses of all blocks

    @property
    def rate(self) -> float:
        """The share of blocks in the sample."""
        return self._threshold / _HASHES

    @property
    def num_blocks(self) -> int:
        return len(self._known)

    def use(
        self, hashes: NDArray[np.uint64], num_counted: int, *, is_counting: bool = True
    ) -> None:
        """One request's blocks, from its first to its deepest, 1-D uint64 and uniform. The first
        ``num_counted`` were looked up, the others only stored."""
        if is_counting:
            self.num_used += num_counted
        sampled = self._sampled(hashes)
        if not len(sampled):
            return
        of_sample = hashes[sampled]
        places = np.searchsorted(self._known, of_sample)
        is_known = np.zeros(len(sampled), dtype=bool)
        inside = places < len(self._known)
        is_known[inside] = self._known[places[inside]] == of_sample[inside]
        old = self._used[places[is_known]]
        ranks = np.searchsorted(self._times, old)
        if is_counting:
            self._count(len(self._times) - 1 - ranks[sampled[is_known] < num_counted])
            self._num_sampled += int(np.count_nonzero(sampled < num_counted)) / self.rate
        times = self._now + len(hashes) - sampled
        self._now += len(hashes)
        self._used[places[is_known]] = times[is_known]
        stays = np.ones(len(self._times), dtype=bool)
        stays[ranks] = False
        self._times = np.concatenate((self._times[stays], times[::-1]))
        if len(old) < len(of_sample):
            self._insert(of_sample[~is_known], places[~is_known], times[~is_known])
        if len(self._known) > _SLACK * self._max_blocks:
            self._shrink()

    def found_within(self, num_blocks: float) -> float:
        """The share of looked-up blocks that an lru cache of so many blocks would have had."""
        if not self.num_used:
            return 0.0
        cell = _cell(max(num_blocks, 0.0))
        whole = math.floor(cell)
        found = float(self._reused[:whole].sum() + (cell - whole) * self._reused[whole])
        return self._adjusted(found)

    @property
    def found_ever(self) -> float:
        """That share without any bound: of those that had been used before."""
        return self._adjusted(float(self._reused.sum())) if self.num_used else 0.0

    def _adjusted(self, found: float) -> float:
        """What the sample has too few or too many of are uses of its hottest blocks."""
        missing = self.num_used - self._num_sampled
        return min(max((found + missing) / self.num_used, 0.0), 1.0)

    def _sampled(self, hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        if self._threshold == _HASHES:
            return np.arange(len(hashes))
        return np.flatnonzero(hashes < np.uint64(self._threshold))

    def _count(self, distances: NDArray[np.int64]) -> None:
        scaled = distances / self.rate
        cells = np.minimum(_STEPS * np.log2(1.0 + scaled), _CELLS - 1).astype(np.int64)
        np.add.at(self._reused, cells, 1.0 / self.rate)

    def _insert(
        self, hashes: NDArray[np.uint64], places: NDArray[np.int64], times: NDArray[np.int64]
    ) -> None:
        order = np.argsort(hashes)
        at = places[order] + np.arange(len(order))  # where they stand afterwards
        is_old = np.ones(len(self._known) + len(order), dtype=bool)
        is_old[at] = False
        known = np.empty(len(is_old), dtype=np.uint64)
        used = np.empty(len(is_old), dtype=np.int64)
        known[is_old], used[is_old] = self._known, self._used
        known[at], used[at] = hashes[order], times[order]
        self._known, self._used = known, used

    def _shrink(self) -> None:
        self._threshold = int(self._known[self._max_blocks])
        self._known = self._known[: self._max_blocks]
        self._used = self._used[: self._max_blocks]
        self._times = np.sort(self._used)


def _cell(distance: float) -> float:
    return min(_STEPS * math.log2(1.0 + distance), _CELLS - 1.0)
