"""Makes room on a device that has no tier below it: leaves go, in the order of eviction.

Owns the loop in which they do, which every new block of a full cache runs through: what holds for
all of the leaves is done once. Knows nothing of other tiers.
"""

from __future__ import annotations

from cache_store.adaptive_queue import AdaptiveQueue
from cache_store.block_pool import BlockPool
from cache_store.events import Tier
from cache_store.eviction import EvictionQueue
from cache_store.ghosts import Cause
from cache_store.radix_node import RadixNode
from cache_store.radix_tree import RadixTree
from cache_store.stats import TierCounters
from cache_store.tenant_shares import TenantShare

_DEVICE = Tier.DEVICE


# So many blocks are evicted at once, if fewer are wanted: an answer that grows block by block does
# not pay for an eviction each time. What it costs is that so few less are stored.
EVICTED_SHARE = 1 / 1024
MAX_EVICTED_BLOCKS = 32


class LeafEviction:
    """Blocks of ``pool``, whose device has no tier below it, at the cost of what ``tree`` holds."""

    def __init__(self, tree: RadixTree, pool: BlockPool, counters: TierCounters) -> None:
        self._tree = tree
        self._pool = pool
        self._counters = counters
        self._min_evicted = min(int(pool.num_blocks * EVICTED_SHARE), MAX_EVICTED_BLOCKS)

    def take(self, num_blocks: int, after: int | None) -> list[int] | None:
        """``num_blocks`` ids, which are more than are free, if possible those right after the block
        ``after``. None, and nothing has changed, if there are not so many to be had."""
        pool = self._pool
        missing = num_blocks - pool.num_free
        assert missing > 0, "no need to evict"
        if missing > self._tree.residency.num_evictable:
            return None
        evicted = self._evict(max(missing, self._min_evicted))
        if missing < self._min_evicted:
            pool.free(evicted)
            return pool.allocate(num_blocks, after)
        # All that there is goes to one owner, so the pool has no choice to make and need not know.
        taken = pool.allocate(pool.num_free, after)
        taken += evicted[:missing]
        pool.free(evicted[missing:])
        return taken

    def make_room(self, num_blocks: int) -> bool:
        """Whether ``num_blocks`` are free now."""
        missing = num_blocks - self._pool.num_free
        if missing > 0:
            self._pool.free(self._evict(missing))
        return self._pool.num_free >= num_blocks

    def cut_back(self, share: TenantShare) -> None:
        """Evict what ``share`` has beyond its cap, as far as nobody holds it."""
        excess = share.num_over_cap(_DEVICE)
        if excess > 0:
            now_ns = self._tree.residency.clock_ns()
            queue = share.queues[_DEVICE]
            with self._tree.residency.ghosts.because(Cause.TENANT_CAP):
                self._counters.dropped += _evict_from(self._tree, queue, excess, now_ns)
            self._pool.free(self._tree.residency.take_given_up(_DEVICE))

    def _evict(self, num_blocks: int) -> list[int]:
        clock_ns = self._tree.residency.clock_ns
        started_ns = clock_ns()
        self._counters.dropped += evict_leaves(self._tree, num_blocks, started_ns)
        given_up = sorted(self._tree.residency.take_given_up(_DEVICE))
        self._counters.eviction_ns += max(0, clock_ns() - started_ns)
        return given_up


def evict_leaves(tree: RadixTree, num_blocks: int, now_ns: int) -> int:
    """Let up to ``num_blocks`` blocks go that are on the device alone; how many went."""
    left = num_blocks
    for queue, most in tree.residency.shares.sources(_DEVICE):
        left -= _evict_from(tree, queue, left if most is None else min(left, most), now_ns)
        if left == 0:
            break
    return num_blocks - left


def _evict_from(
    tree: RadixTree, queue: EvictionQueue | AdaptiveQueue, num_blocks: int, now_ns: int
) -> int:
    """The same of one tenant's leaves.

    Of the last leaf only as much as is wanted, from its end: what is left of it stays the next.
    """
    residency = tree.residency
    pop, detach = queue.pop, tree.detach
    leaves: list[RadixNode] = []
    left = num_blocks
    rest: RadixNode | None = None
    while left > 0:
        leaf = pop()
        if leaf is None:
            break
        parent, ids = leaf.parent, leaf.block_ids
        assert parent is not None
        assert ids is not None
        if len(ids) > left:
            rest = leaf
            break
        left -= len(ids)
        parent.num_device_children -= 1
        detach(leaf)  # after it the parent may be the next to go
        leaves.append(leaf)
    residency.ages.evicted(leaves, now_ns)
    residency.give_up_leaves(leaves)
    if rest is None:
        return num_blocks - left
    residency.ages.cut(rest, left, now_ns)
    tree.trim(rest, left)
    queue.put_back(rest)
    return num_blocks
