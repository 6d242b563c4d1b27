"""How soon what was used comes back: reuse intervals of each kind of prefix, learned as they come.

Owns the counts and what follows from them, the worth of keeping a block of a kind at an age. Knows
nothing of nodes, of queues or of what the kinds mean beyond their two features. Ages are in blocks
that requests have asked for since, so nothing here depends on a clock or on the size of the cache.
Counts are of requests: what one has used comes back as a whole or does not, and so has a weight of
one, however many blocks it is.

The worth is hits per block and unit of time: the largest ratio, over all times one might go on
holding a block, of its chance to be hit by then to the time it is held. That is hit density (LHD,
Beckmann, Chen, Cidon, NSDI 2018) with the best stopping time of Gittins' index (J. R. Stat. Soc.
B 41, 1979) in place of the lifetime that the cache happens to give.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NUM_BINS = 64  # two for each doubling of the age
NUM_ORIGINS = 7
NUM_SIZES = 8
NUM_PRIVATE = NUM_ORIGINS * NUM_SIZES
NUM_KINDS = NUM_PRIVATE + 17  # the others are prefixes that several continue, by their use
SUPERSEDED = NUM_KINDS - 1  # what a conversation has left behind

_Floats = NDArray[np.float64]

# What is believed before anything was seen: of those still there at an age, as many come back by
# twice that age whatever it is (Lomax's law with this exponent, some two in five in a doubling).
# The worth then falls with age, and the order is that of lru.
_PRIOR_EXPONENT = 0.64
_MAX_CHANCE = 0.9
_NEARNESS = 0.93  # what a kind does at one age says so much of the next bin
# What is believed of ages that next to nothing has reached falls by this per bin: else what is
# oldest, of which least is known, would be kept for what younger blocks have shown.
_UNREACHED = 0.7
# Weights of what is believed against what is counted, in requests. That a kind differs from all
# others takes as many as a share needs to be known at all: where evidence is thin, telling kinds
# apart by it loses more than it gains.
_PRIOR_FACTOR = 32.0
_PRIOR_CELL = 8.0
_SHARED_FACTOR = 2.0  # what several continue is believed to come back as much more often

_SUPERSEDED_FACTOR = 0.2


def bin_of(age: int) -> int:
    """0, 1, 2, 3, [4, 6), [6, 8), [8, 12), ..."""
    if age < 2:
        return max(age, 0)
    length = age.bit_length()
    return min(2 * length - 2 + (age >> (length - 2) & 1), NUM_BINS - 1)


def bin_edges() -> _Floats:
    """The lowest age of each bin, and of the one after the last."""
    edges = [0.0, 1.0]
    for power in range(1, NUM_BINS // 2 + 1):
        edges += [2.0**power, 1.5 * 2.0**power]
    return np.array(edges[: NUM_BINS + 1])


class ReuseModel:
    """``half_life``: after how many requests what was counted has half its weight."""

    def __init__(self, half_life: int = 4096) -> None:
        self._half_life = half_life
        edges = bin_edges()
        self._widths = np.diff(edges)
        self._prior = 1 - ((edges[:-1] + 1) / (edges[1:] + 1)) ** _PRIOR_EXPONENT
        self._reused = np.zeros((NUM_KINDS, NUM_BINS))
        self._survived = np.zeros((NUM_KINDS, NUM_BINS))
        self._origin = np.ones((NUM_ORIGINS, NUM_BINS))
        self._size = np.ones((NUM_SIZES, NUM_BINS))
        apart = np.abs(np.subtract.outer(np.arange(NUM_BINS), np.arange(NUM_BINS)))
        self._near = _NEARNESS**apart  # what one bin says of another
        self._worth: list[list[float]] = []
        self.refresh(0)

    def count_reuse(self, kind: int, age: int, share: float) -> None:
        """So much of what one request used, of ``kind``, was used again at ``age``."""
        self._reused[kind, bin_of(age)] += share

    def count_survival(self, kind: int, number: int, share: float) -> None:
        """So much of that left the bin ``number`` without having been used again."""
        self._survived[kind, number] += share

    def worth(self, kind: int, number: int) -> float:
        """Of a block of ``kind`` whose age is in the bin ``number``, as of the last refresh."""
        return self._worth[kind][number]

    def refresh(self, num_requests: int) -> None:
        """Take what was counted since the last time, ``num_requests`` ago, into account."""
        fade = 0.5 ** (num_requests / self._half_life)
        self._reused *= fade
        self._survived *= fade
        self._worth = _worth(self._chances(), self._widths).tolist()

    def _chances(self) -> _Floats:
        """(kinds, bins): the chance that what has reached a bin is used again in it.

        Kinds of few observations lean on what the kinds alike have together: one chance per bin
        for all, times a factor per feature, times one of their own, each learned from the ages
        nearby; each bin of a kind then moves from there to what was counted in it, as the counts
        grow. So where a kind was never seen, as at great ages, the order is that of lru.
        """
        prior = _PRIOR_FACTOR
        reused, at_risk = self._reused, self._reused + self._survived
        shape = NUM_ORIGINS, NUM_SIZES, NUM_BINS
        private, exposed = (n[:NUM_PRIVATE].reshape(shape) for n in (reused, at_risk))
        reached = at_risk.sum(0)
        known = reached / (reached + _PRIOR_CELL)
        fall = np.cumprod(_UNREACHED + (1 - _UNREACHED) * known)
        for _ in range(2):
            factors = self._origin[:, None] * self._size
            hits, expected = private.sum((0, 1)), (factors * exposed).sum((0, 1))
            # Ages that nothing has reached yet are taken to be as those before them were, not
            # as was believed at first: else what is oldest would seem to be worth most.
            level = (hits @ self._near + 1) / ((expected * self._prior) @ self._near + 1)
            pooled = (hits + prior * level * self._prior) / (expected + prior)
            pooled = np.minimum(pooled, _MAX_CHANCE) * fall
            base = exposed * pooled
            self._origin = (private.sum(1) @ self._near + prior) / (
                (base * self._size).sum(1) @ self._near + prior
            )
            self._size = (private.sum(0) @ self._near + prior) / (
                (base * self._origin[:, None]).sum(0) @ self._near + prior
            )
        factor = np.empty((NUM_KINDS, NUM_BINS))
        factor[:NUM_PRIVATE] = (self._origin[:, None] * self._size).reshape(-1, NUM_BINS)
        factor[NUM_PRIVATE:] = _SHARED_FACTOR
        factor[SUPERSEDED] = _SUPERSEDED_FACTOR
        factor *= (reused @ self._near + prior) / ((factor * at_risk * pooled) @ self._near + prior)
        odds = factor * pooled
        believed = odds / (1 - pooled + odds)
        chances: _Floats = (reused + _PRIOR_CELL * believed) / (at_risk + _PRIOR_CELL)
        return chances


def _worth(chances: _Floats, widths: _Floats) -> _Floats:
    """(kinds, bins): the largest ratio of hits to time held, over all times to stop at."""
    worth = np.empty_like(chances)
    held = widths * (1 - chances / 2)  # what is used again leaves half-way, as it were
    for first in range(chances.shape[1]):
        left = np.cumprod(1 - chances[:, first:], axis=1)
        alive = np.concatenate([np.ones((len(chances), 1)), left[:, :-1]], axis=1)
        hits = np.cumsum(alive * chances[:, first:], axis=1)
        time = np.cumsum(alive * held[:, first:], axis=1)
        worth[:, first] = (hits / time).max(axis=1)
    return worth
