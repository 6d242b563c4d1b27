"""In which tiers the nodes of the tree are, and what follows from it.

Owns the copies' accounting: counts by tier and by tenant, the hash of every block that is stored,
the ids that were given up, and the events that tell others; the order in which copies leave a tier
is tenant_shares'. It changes a node's copies and never the shape of the tree. Knows nothing of
pools, tensors or transfers.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from cache_store.adaptive import AdaptivePolicy, Visit
from cache_store.block_ages import BlockAges
from cache_store.block_hash import HASH_BYTES
from cache_store.copy_feed import CopyFeed, CopyListener
from cache_store.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent, Tier
from cache_store.eviction import EvictionPolicy
from cache_store.ghosts import GhostList
from cache_store.radix_node import RadixNode, is_lost
from cache_store.tenant_shares import TenantShare, TenantShares

# Events that nobody takes are not collected for ever: their readers start again from a snapshot.
MAX_EVENTS = 10_000
_DEVICE = Tier.DEVICE


class Residency:
    """``capacities`` bounds the block ids of each tier that exists; DEVICE always does.

    ``clock_ns`` tells what recency is measured in. ``event_blocks``: every that many blocks of a
    path make an event; 0 makes none. ``block_bytes``: those of a full block's tokens.
    """

    MIN_STALE_SPARES = 1024

    def __init__(
        self,
        capacities: Mapping[Tier, int],
        policy: EvictionPolicy,
        clock_ns: Callable[[], int],
        event_blocks: int = 0,
        block_bytes: int = 0,
    ) -> None:
        self.clock_ns = clock_ns
        self.ages = BlockAges()
        self._reuse = policy if isinstance(policy, AdaptivePolicy) else None
        self._block_bytes = block_bytes
        self.shares = TenantShares(capacities, policy, clock_ns)
        self.num_cached = dict.fromkeys(capacities, 0)  # blocks of the tree, by tier
        self.num_evictable = 0  # of those on the device, not locked
        self._hashes = {
            tier: np.zeros((num_blocks, HASH_BYTES), dtype=np.uint8)
            for tier, num_blocks in capacities.items()
        }
        self._given_up = {tier: array("i") for tier in capacities}
        self._spares: dict[Tier, deque[RadixNode]] = {
            tier: deque() for tier in capacities if tier is not Tier.DEVICE
        }
        self.ghosts = GhostList(clock_ns, capacities[_DEVICE])
        self._event_blocks = event_blocks
        self._events: list[CacheEvent] = []
        self._feed: CopyFeed | None = None

    # ------------------------------------------------------------ hashes

    def block_hash(self, tier: Tier, block_id: int) -> bytes:
        """The chained hash under which a full block was stored last."""
        return bytes(self._hashes[tier][block_id].data)

    def last_hash(self, node: RadixNode) -> bytes:
        """Of the last block of ``node``, which is a full one."""
        tier = node.tier
        ids = node.ids_in(tier)
        assert ids is not None
        return self.block_hash(tier, ids[-1])

    def hashes_of(self, node: RadixNode) -> bytes:
        """Of all blocks of ``node``, joined."""
        tier = node.tier
        return self._hashes[tier][node.ids_in(tier)].tobytes()

    def set_hashes(self, tier: Tier, block_ids: Sequence[int], joined: bytes) -> None:
        rows = np.frombuffer(joined, np.uint8).reshape(-1, HASH_BYTES)
        self._hashes[tier][block_ids] = rows

    # ------------------------------------------------------------ copies

    def add_copy(self, node: RadixNode, tier: Tier, ids: array[int]) -> None:
        """``node`` is in ``tier`` too from now on; hashes come from the copy it has already.

        Where that one is lost, the new copy takes its place.
        """
        was_lost = is_lost(node)
        assert node.ids_in(tier) is None, "a node has one copy in a tier"
        before = node.tier if node.has_copies() else None
        if before is not None:
            self._hashes[tier][ids] = self._hashes[before][node.ids_in(before)]
        node.set_ids(tier, ids)
        if self._feed is not None:
            self._feed.stored(node, tier)
        self.num_cached[tier] += len(ids)
        node.owner.num_cached[tier] += len(ids)
        if tier is _DEVICE and node.lock_ref == 0:
            self.count_evictable(node, len(ids))
        if before is not None:
            self._note_spare(node, tier if node.tier is before else before)
        self._moved(node, before)
        if was_lost:
            node.transfer = None
            for other in self._spares:
                if node.ids_in(other) is not None:
                    self.drop_copy(node, other)

    def drop_copy(self, node: RadixNode, tier: Tier) -> None:
        """Give the copy up. A node without any must be taken out of the tree by the caller."""
        ids = node.ids_in(tier)
        assert ids is not None, "there is no copy to give up"
        before = node.tier
        removed = self._event_hashes(node, 0) if before is tier else b""
        others = (other for other in self.num_cached if other is not tier)
        if all(node.ids_in(other) is None for other in others):
            self._leaves(node)
        if self._feed is not None:
            self._feed.removed(node, tier)
        node.set_ids(tier, None)
        self._let_go(node.owner, tier, ids)
        if tier is _DEVICE and node.lock_ref == 0:
            self.count_evictable(node, -len(ids))
        if node.has_copies():
            self._moved(node, before)
            return
        if node.parent is not None:
            node.parent.count_child(before, -1)
        if removed:
            self._tell(BlockRemoved(removed))

    def give_up(self, nodes: Sequence[RadixNode]) -> int:
        """Give up all copies of unlocked nodes that leave the tree now: one of them with all that
        lies below it, or childless ones; the number of their blocks."""
        if self._feed is not None:
            self._feed.left(nodes)
        num_blocks = 0
        removed = []
        for node in nodes:
            if self._event_blocks:
                removed.append(self._event_hashes(node, 0))
            self._leaves(node)
            num_blocks += node.num_blocks
            if node.parent is not None:
                node.parent.count_child(node.tier, -1)
            if node.block_ids is not None:
                self._let_go(node.owner, Tier.DEVICE, node.block_ids)
                self.count_evictable(node, -len(node.block_ids))
            if node.host_ids is not None:
                self._let_go(node.owner, Tier.HOST, node.host_ids)
            if node.disk_ids is not None:
                self._let_go(node.owner, Tier.DISK, node.disk_ids)
            node.block_ids = node.host_ids = node.disk_ids = None
        if any(removed):
            self._tell(BlockRemoved(b"".join(removed)))
        return num_blocks

    def give_up_leaves(self, leaves: Sequence[RadixNode]) -> None:
        """Give up unlocked leaves of one tenant that are on the device alone and have just left the
        tree, in the order in which they did; their parents were told. One event for all of them."""
        if not leaves:
            return
        if self._event_blocks:
            removed = self._event_hashes_of(leaves)
            if removed:
                self._tell(BlockRemoved(removed))
        if self._feed is not None:
            self._feed.left(leaves)
        if self._reuse is not None:
            for leaf in leaves:
                self._leave_reuse(self._reuse, leaf)
        given_up = self._given_up[_DEVICE]
        num_before = len(given_up)
        for leaf in leaves:
            assert leaf.block_ids is not None
            given_up += leaf.block_ids
            leaf.block_ids = None
        self.ghosts.left(self._hashes[_DEVICE][given_up[num_before:]].tobytes(), _DEVICE)
        num_blocks = len(given_up) - num_before
        self.num_cached[_DEVICE] -= num_blocks
        leaves[0].owner.num_cached[_DEVICE] -= num_blocks
        self.count_evictable(leaves[0], -num_blocks)

    def count_evictable(self, node: RadixNode, change: int) -> None:
        """So many blocks of ``node``'s owner can be evicted from the device from now on, or (below
        zero) no more."""
        self.num_evictable += change
        node.owner.num_evictable += change

    def extend(self, node: RadixNode, block_ids: Sequence[int]) -> None:
        """Blocks added to the end of a locked node that is on the device alone."""
        assert node.block_ids is not None
        first = len(node.block_ids)
        node.block_ids.extend(block_ids)
        if node.cohort is not None:
            node.cohort.num_blocks += len(block_ids)
        self.num_cached[_DEVICE] += len(block_ids)
        node.owner.num_cached[_DEVICE] += len(block_ids)
        self._tell_stored(node, first)
        if self._feed is not None:
            self._feed.stored(node, _DEVICE, first)

    def trim(self, node: RadixNode, num_blocks: int, num_bytes: int) -> None:
        """Give up the last blocks (``num_bytes`` of tokens) of a node on the device alone."""
        ids = node.block_ids
        assert ids is not None
        keep = len(ids) - num_blocks
        removed = self._event_hashes(node, keep)
        if self._reuse is not None:
            self._reuse.left(node, keep, self.block_hash(Tier.DEVICE, ids[keep]))
        if self._feed is not None:
            self._feed.removed(node, _DEVICE, keep)
        self.ghosts.left(self._hashes[_DEVICE][ids[keep:]].tobytes(), _DEVICE)
        self._given_up[Tier.DEVICE].extend(ids[keep:])
        del ids[keep:]
        del node.tokens[len(node.tokens) - num_bytes :]
        self.num_cached[_DEVICE] -= num_blocks
        node.owner.num_cached[_DEVICE] -= num_blocks
        self.count_evictable(node, -num_blocks)
        if removed:
            self._tell(BlockRemoved(removed))

    def split(self, node: RadixNode, upper: RadixNode, num_blocks: int) -> None:
        """Divide the copies between ``node`` and ``upper``, which has none yet."""
        upper.cohort = node.cohort
        for tier in self.num_cached:
            ids = node.ids_in(tier)
            if ids is not None:
                upper.set_ids(tier, ids[:num_blocks])
                node.set_ids(tier, ids[num_blocks:])
                self._note_spare(upper, tier)
        upper.count_child(node.tier, 1)

    def pop_spare(self, tier: Tier, owner: TenantShare | None = None) -> RadixNode | None:
        """A node whose copy in ``tier`` has a quicker one beside it, the oldest such copy first.

        ``owner``: only of this tenant, for which all are looked at.
        """
        spares = self._spares[tier]
        for _ in range(len(spares)):
            node = spares.popleft()
            if node.parent is None or node.ids_in(tier) is None or node.tier is tier:
                continue
            if node.transfer is None and (owner is None or node.owner is owner):
                return node
            spares.append(node)
        return None

    def _let_go(self, owner: TenantShare, tier: Tier, ids: array[int]) -> None:
        self._given_up[tier].extend(ids)
        self.num_cached[tier] -= len(ids)
        owner.num_cached[tier] -= len(ids)

    def num_given_up(self, tier: Tier) -> int:
        return len(self._given_up[tier])

    def take_given_up(self, tier: Tier) -> array[int]:
        """Block ids that the tree has let go since the last call."""
        ids = self._given_up[tier]
        if ids:
            self._given_up[tier] = array("i")
        return ids

    def push(self, node: RadixNode) -> None:
        """Enter a node that may have become evictable."""
        tier = node.tier
        if node.is_evictable_from(tier):
            node.owner.queues[tier].push(node)

    def forget(self, node: RadixNode) -> None:
        for queue in node.owner.queues.values():
            queue.forget(node)

    def _note_spare(self, node: RadixNode, tier: Tier) -> None:
        spares = self._spares.get(tier)
        if spares is None or node.tier is tier:
            return
        spares.append(node)
        if len(spares) > max(self.MIN_STALE_SPARES, 2 * self.num_cached[tier]):
            # What moves up and down often stands here often.
            live = (spare for spare in spares if spare.parent and spare.ids_in(tier))
            self._spares[tier] = deque(dict.fromkeys(live))

    def _moved(self, node: RadixNode, before: Tier | None) -> None:
        """The quickest tier of ``node`` was ``before``: parent, queues and listeners follow."""
        after = node.tier
        if after is before:
            return
        parent = node.parent
        if parent is not None:
            if before is not None:
                parent.count_child(before, -1)
            parent.count_child(after, 1)
            if parent.lock_ref == 0 and parent.parent is not None:
                self.push(parent)
        self.push(node)
        self._tell_stored(node, 0)

    # ------------------------------------------------------------ requests

    def began(self, node: RadixNode, clock_ns: int) -> Visit | None:
        """A request has found the path to ``node``; what :meth:`ended` is to be told of it."""
        return None if self._reuse is None else self._reuse.began(node, clock_ns)

    def ended(self, visit: Visit | None, node: RadixNode, bonus_ns: int) -> None:
        """That request is done with the path to ``node``."""
        if self._reuse is not None and visit is not None:
            self._reuse.ended(visit, node, self._full_hashes, bonus_ns)

    def _hash_at(self, node: RadixNode, index: int) -> bytes:
        tier = node.tier
        ids = node.ids_in(tier)
        assert ids is not None
        return self.block_hash(tier, ids[index])

    def _full_hashes(self, node: RadixNode) -> bytes:
        return self.hashes_of(node) if len(node.tokens) >= self._block_bytes else b""

    def _leaves(self, node: RadixNode) -> None:
        """It gives up its last copy."""
        if self._reuse is not None:
            self._leave_reuse(self._reuse, node)
        if len(node.tokens) >= self._block_bytes:
            self.ghosts.left(self.hashes_of(node), node.tier)

    def _leave_reuse(self, reuse: AdaptivePolicy, node: RadixNode) -> None:
        is_full = len(node.tokens) >= self._block_bytes
        reuse.left(node, 0, self._hash_at(node, 0) if is_full else b"")

    # ------------------------------------------------------------ events

    def tell_copies(self, listener: CopyListener) -> None:
        """Of each block in each tier, at once; before the first one is stored."""
        self._feed = CopyFeed(self._hashes, self._block_bytes, listener)

    def take_events(self) -> list[CacheEvent]:
        events, self._events = self._events, []
        return events

    def snapshot(self, nodes: Iterable[RadixNode]) -> list[CacheEvent]:
        """The events that tell a new listener all that is stored; ``nodes`` from the roots down."""
        events: list[CacheEvent] = [AllBlocksCleared()]
        for node in nodes:
            hashes = self._event_hashes(node, 0)
            if hashes:
                events.append(BlockStored(node.tier, hashes))
        return events

    def _tell_stored(self, node: RadixNode, first: int) -> None:
        if self._event_blocks:
            hashes = self._event_hashes(node, first)
            if hashes:
                self._tell(BlockStored(node.tier, hashes))

    def _tell(self, event: CacheEvent) -> None:
        if len(self._events) >= MAX_EVENTS:
            self._events = [AllBlocksCleared()]
        self._events.append(event)

    def _event_hashes_of(self, leaves: Sequence[RadixNode]) -> bytes:
        """The same of whole edges on the device, in or out of the tree, joined."""
        step = self._event_blocks
        ends: list[int] = []
        for leaf in leaves:
            ids = leaf.block_ids
            assert ids is not None
            offset = -(leaf.start + 1) % step
            if offset < len(ids):
                ends += ids[offset::step]
        return self._hashes[_DEVICE][ends].tobytes() if ends else b""

    def _event_hashes(self, node: RadixNode, first: int) -> bytes:
        """Hashes of the blocks from index ``first`` of the edge on that end a chunk."""
        step = self._event_blocks
        if not step or node.parent is None:
            return b""
        offset = -(node.start + 1 + first) % step + first
        tier = node.tier
        ids = node.ids_in(tier)
        assert ids is not None
        if offset >= len(ids):
            return b""
        return self._hashes[tier][ids[offset::step]].tobytes()
