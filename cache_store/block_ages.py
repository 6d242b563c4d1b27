"""How old blocks come to be: from storing to eviction, since their last use, between two uses.

Owns three histograms, over blocks. What it is told, it counts: the residency has
one, and those that evict or find blocks tell it. Knows nothing of tiers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from cache_store.radix_node import RadixNode
from cache_store.stats import AGE_BOUNDS_S, AgeCounts

__all__ = ["AgeHistogram", "BlockAges"]

_BOUNDS_NS = tuple(int(bound * 1e9) for bound in AGE_BOUNDS_S)


class AgeHistogram:
    __slots__ = ("_counts", "_sum_ns")

    def __init__(self) -> None:
        self._counts = [0] * (len(AGE_BOUNDS_S) + 1)
        self._sum_ns = 0

    def add(self, age_ns: int, num_blocks: int) -> None:
        """One that a bonus keeps young beyond now counts as new."""
        age_ns = max(age_ns, 0)
        self._counts[bisect_left(_BOUNDS_NS, age_ns)] += num_blocks
        self._sum_ns += age_ns * num_blocks

    def counts(self) -> AgeCounts:
        return AgeCounts(tuple(self._counts), self._sum_ns / 1e9)


class BlockAges:
    """Times are readings of the tree's clock, in nanoseconds."""

    def __init__(self) -> None:
        self.lifetime = AgeHistogram()
        self.idle = AgeHistogram()
        self.reuse_gap = AgeHistogram()

    def evicted(self, nodes: Iterable[RadixNode], now_ns: int) -> None:
        """They are about to leave the last tier that they are in."""
        for node in nodes:
            self.cut(node, node.num_blocks, now_ns)

    def cut(self, node: RadixNode, num_blocks: int, now_ns: int) -> None:
        """So many blocks of ``node`` go."""
        self.lifetime.add(now_ns - node.created, num_blocks)
        self.idle.add(now_ns - max(node.last_access, node.created), num_blocks)

    def reused(self, node: RadixNode, now_ns: int) -> None:
        """A request has found the path to ``node``, whose stamps are still those of before."""
        step = node
        while step.parent is not None:
            self.reuse_gap.add(now_ns - max(step.last_access, step.created), step.num_blocks)
            step = step.parent
