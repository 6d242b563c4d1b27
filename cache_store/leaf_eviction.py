"""Makes room on a device that has no tier below it: leaves go, in the order of eviction.

Owns the loop in which they do, which every new block of a full cache runs through: what holds for
all of the leaves is done once. Knows nothing of pools or of other tiers.
"""

from __future__ import annotations

from cache_store.events import Tier
from cache_store.radix_tree import RadixTree


def evict_leaves(tree: RadixTree, num_blocks: int) -> int:
    """Let up to ``num_blocks`` blocks go that are on the device alone; how many went.

    Of the last leaf only as much as is wanted, from its end: what is left of it stays the next.
    """
    residency = tree.residency
    queue = residency.queues[Tier.DEVICE]
    left = num_blocks
    while left > 0:
        leaf = queue.pop()
        if leaf is None:
            break
        assert leaf.block_ids is not None
        size = len(leaf.block_ids)
        if size > left:
            tree.trim(leaf, left)
            queue.put_back(leaf)
            return num_blocks
        residency.give_up((leaf,))
        tree.detach(leaf)
        left -= size
    return num_blocks - left
