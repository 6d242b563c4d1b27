"""Makes room and moves blocks: what leaves the device, what comes back, what is kept on disk.

Owns the pools of all tiers and the order of things: a copy is demoted before it is dropped, a
promotion has all its blocks or does not begin, a tenant stays within its caps. The tree says what
may go, the transfer desk has what is under way. Knows nothing of requests. Not thread-safe: owned
by the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from cache_store.block_pool import BlockPool
from cache_store.events import Tier
from cache_store.ghosts import Cause
from cache_store.leaf_eviction import LeafEviction
from cache_store.load_planner import LoadPlan
from cache_store.radix_node import RadixNode, subtree_of
from cache_store.radix_tree import RadixTree
from cache_store.stats import BlockHistory, TierCounters, TierStats
from cache_store.tenant_shares import TenantShare
from cache_store.transfer import TransferJob
from cache_store.transfer_desk import LowerTiers, TransferDesk
from cache_store.unsaved_nodes import UnsavedNodes, that_fit

# Blocks kept free on the device while lower tiers can take what has to go: a running answer that
# needs its next block does not wait for a copy.
RESERVE_SHARE = 1 / 32
MAX_RESERVE_BLOCKS = 64


@dataclass(slots=True)
class _Batch:
    """Nodes that go from one tier to another in one order."""

    nodes: list[RadixNode] = field(default_factory=list)
    num_blocks: int = 0

    def add(self, node: RadixNode) -> None:
        self.nodes.append(node)
        self.num_blocks += node.num_blocks


class TierManager:
    def __init__(self, tree: RadixTree, device: BlockPool, lower: LowerTiers | None) -> None:
        self._tree = tree
        self._lower = lower
        self.pools, self._device = {Tier.DEVICE: device}, device
        if lower is not None:
            self.pools |= {tier: BlockPool(count) for tier, count in lower.num_blocks.items()}
        self.counters = {tier: TierCounters() for tier in self.pools}
        self._leaves = LeafEviction(tree, device, self.counters[Tier.DEVICE])
        self.desk = TransferDesk(tree, self.pools, self.counters, lower)
        self._unsaved = UnsavedNodes(tree)
        self._reserve = min(int(device.num_blocks * RESERVE_SHARE), MAX_RESERVE_BLOCKS)

    @property
    def has_transfers(self) -> bool:
        return bool(self.desk.jobs)

    @property
    def has_unsaved(self) -> bool:
        return bool(self._unsaved)

    @property
    def num_transfers(self) -> int:
        return len(self.desk.jobs)

    @property
    def num_available(self) -> int:
        """Blocks of the device that are free or can be evicted."""
        return self._device.num_free + self._tree.residency.num_evictable

    @property
    def is_room_coming(self) -> bool:
        return self.desk.is_room_coming

    def jobs(self) -> Collection[TransferJob]:
        return self.desk.jobs

    def stats(self) -> tuple[TierStats, ...]:
        if self._lower is None:
            return ()
        residency = self._tree.residency
        return tuple(
            TierStats(
                tier=tier,
                num_blocks=num_blocks,
                num_cached=residency.num_cached[tier],
                promoted_total=counters.promoted,
                stored_total=counters.stored,
                dropped_total=counters.dropped,
                failed_total=counters.failed,
                loads_total=counters.loads,
                recomputes_total=counters.recomputes,
                load_s_total=counters.load_s,
                recompute_s_total=counters.recompute_s,
                load_block_s=self._lower.planner.block_s(tier),
                demoted_total=counters.demoted,
                corrupt_total=counters.corrupt,
                promoted_s_total=counters.promoted_s,
                stored_s_total=counters.stored_s,
                demoted_s_total=counters.demoted_s,
                eviction_s_total=counters.eviction_ns / 1e9,
            )
            for tier, num_blocks in self._lower.num_blocks.items()
            for counters in (self.counters[tier],)
        )

    def history(self) -> BlockHistory:
        counters, ages = self.counters[Tier.DEVICE], self._tree.residency.ages
        return BlockHistory(
            dropped_total=counters.dropped,
            demoted_total=counters.demoted,
            demoted_s_total=counters.demoted_s,
            eviction_s_total=counters.eviction_ns / 1e9,
            lifetime=ages.lifetime.counts(),
            idle=ages.idle.counts(),
            reuse_gap=ages.reuse_gap.counts(),
        )

    # ------------------------------------------------------------ room

    def take(self, num_blocks: int, after: int | None) -> list[int] | None:
        """Ids of the device, if possible from ``after`` on; None if not all can be had now."""
        if self._device.num_free < num_blocks:
            if self._lower is None:
                return self._leaves.take(num_blocks, after)
            if self.num_available < num_blocks or not self.make_room(Tier.DEVICE, num_blocks):
                return None
        return self._device.allocate(num_blocks, after)

    def make_room(self, tier: Tier, num_blocks: int, *, takes_spares: bool = True) -> bool:
        """Whether ``num_blocks`` are free in ``tier`` now; if not, what can be is being freed.

        ``takes_spares``: also at the cost of copies that have a quicker one beside them.
        """
        if self._lower is None:
            return self._leaves.make_room(num_blocks)
        pool, residency = self.pools[tier], self._tree.residency

        def num_missing() -> int:
            num_coming = residency.num_given_up(tier) + self.desk.num_coming[tier]
            return num_blocks - pool.num_free - num_coming

        self._send_off(tier, num_missing, None, takes_spares)
        return pool.num_free >= num_blocks

    def cut_back(self, share: TenantShare) -> None:
        """Take from ``share`` what it has beyond its caps, of its own and as far as nobody holds
        it; what is over the cap of one tier goes to the next, if it may."""
        if not share.limits.max_blocks:
            return
        if self._lower is None:
            self._leaves.cut_back(share)
            return
        for tier in self.pools:
            if share.num_over_cap(tier) > 0:
                with self._tree.residency.ghosts.because(Cause.TENANT_CAP):
                    self._send_off(tier, lambda tier=tier: share.num_over_cap(tier), share, True)  # type: ignore[misc]

    def _send_off(
        self,
        tier: Tier,
        num_missing: Callable[[], int],
        share: TenantShare | None,
        takes_spares: bool,
    ) -> None:
        """Let victims leave ``tier`` (of ``share`` only, if given), as many as are missing."""
        shares, clock_ns = self._tree.residency.shares, self._tree.residency.clock_ns
        started_ns = clock_ns()
        batches: dict[Tier, _Batch] = {place: _Batch() for place in self.pools}
        batched = 0
        has_spares = takes_spares
        while True:
            missing = num_missing() - batched
            if missing <= 0:
                break
            # Of the host's copies the spare ones go first, being of use to nobody now; of the
            # disk's last, being what a restart finds of the sessions in use.
            if tier is Tier.HOST and has_spares:
                has_spares = self._drop_spare(tier, share)
                continue
            node = shares.pop(tier) if share is None else share.queues[tier].pop()
            if node is None:
                if tier is Tier.DISK and takes_spares and self._drop_spare(tier, share):
                    continue
                break
            target = self._resting_place(node, tier, missing)
            if target is None:
                self._drop(node, tier, missing)
            elif node.ids_in(target) is not None:
                self._tree.split_tail(node, missing)
                self.counters[tier].demoted += node.num_blocks
                self._tree.drop_copy(node, tier)
            elif self.pools[target].num_free - batches[target].num_blocks <= 0:
                node.owner.queues[tier].put_back(node)
                break  # room is being made there first
            else:
                batch = batches[target]
                room = self.pools[target].num_free - batch.num_blocks
                self._tree.split_tail(node, min(missing, room))
                batch.add(node)
                batched += node.num_blocks
                self._tree.lock(node)  # making room below must not offer it again
        self.collect()
        for target, batch in batches.items():
            self.desk.start(tier, target, batch.nodes, frees_source=True)
            for node in batch.nodes:
                self._tree.unlock(node)
        self.counters[tier].eviction_ns += max(0, clock_ns() - started_ns)

    def collect(self) -> None:
        """Free what the tree has given up."""
        for tier in self.pools:
            ids = self._tree.residency.take_given_up(tier)
            if ids:
                self.desk.free(tier, ids)

    def _resting_place(self, node: RadixNode, tier: Tier, num_blocks: int) -> Tier | None:
        """The lower tier that ``node`` is in, or is to be copied to; None if it has to be dropped.

        Room for up to ``num_blocks`` of it is being made there, if there is any to be made.
        """
        for place in self.pools:  # the quickest first
            if not place.is_below(tier) or (place is Tier.DISK and node.num_host_children):
                continue
            if not node.owner.may_enter(place):
                continue
            if node.ids_in(place) is not None or self._can_take(node, place, num_blocks):
                return place
        return None

    def _can_take(self, node: RadixNode, tier: Tier, num_blocks: int) -> bool:
        if not self.desk.is_usable(tier):
            return False
        # Not for all of a long node: what fits is better there than nowhere.
        wanted = min(num_blocks, node.num_blocks, max(1, self.pools[tier].num_blocks // 2))
        return (
            self.make_room(tier, wanted)
            or self.pools[tier].num_free > 0
            or self.desk.num_coming[tier] > 0
        )

    def _drop_spare(self, tier: Tier, share: TenantShare | None) -> bool:
        node = self._tree.residency.pop_spare(tier, share)
        if node is None:
            return False
        self._tree.drop_copy(node, tier)
        return True

    def _drop(self, node: RadixNode, tier: Tier, num_blocks: int) -> None:
        """Let up to ``num_blocks`` of an evictable node go, and what hangs below it."""
        counters, residency = self.counters[tier], self._tree.residency
        now_ns = residency.clock_ns()
        is_bare = node.children is None and node.host_ids is None and node.disk_ids is None
        if is_bare and node.num_blocks > num_blocks:
            residency.ages.cut(node, num_blocks, now_ns)
            self._tree.trim(node, num_blocks)
            node.owner.queues[tier].put_back(node)
            counters.dropped += num_blocks
            return
        self._tree.split_tail(node, num_blocks)
        residency.ages.evicted(subtree_of(node), now_ns)
        counters.dropped += self._tree.drop(node)

    # ------------------------------------------------------------ transfers

    def plan(self, num_host_blocks: int, num_disk_blocks: int) -> LoadPlan:
        """Whether a hit in the lower tiers is worth its loading."""
        assert self._lower is not None
        plan = self._lower.planner.plan(num_host_blocks, num_disk_blocks)
        return replace(plan, lowest=self.desk.slowest_usable(plan.lowest))

    def count_plan(self, plan: LoadPlan) -> None:
        """It was followed: once for each hit, however often that had to wait for room."""
        counters = self.counters[plan.slowest]
        is_recomputed = plan.slowest.is_below(plan.lowest)
        counters.recomputes += is_recomputed
        counters.loads += not is_recomputed
        counters.load_s += plan.load_s
        counters.recompute_s += plan.recompute_s

    def promote(self, nodes: Sequence[RadixNode]) -> None:
        """Bring nodes of lower tiers, parents first, to the device, whose pool has the room."""
        for tier in (Tier.HOST, Tier.DISK):
            group = [node for node in nodes if node.tier is tier]
            self.desk.start(tier, Tier.DEVICE, group, frees_source=False)

    def demote(self, nodes: Sequence[RadixNode]) -> int:
        """Take nodes off the device, leaves first, as far as there is a place below it; how many
        blocks leave, now or when their copies are made."""
        num_blocks = 0
        batches = {place: _Batch() for place in self.pools}
        for node in nodes:
            size = node.num_blocks
            target = self._resting_place(node, Tier.DEVICE, size)
            if target is None:
                break
            if node.ids_in(target) is not None:
                if not node.is_evictable_from(Tier.DEVICE):
                    break
                self.counters[Tier.DEVICE].demoted += size
                self._tree.drop_copy(node, Tier.DEVICE)
            else:
                batch = batches[target]
                self.make_room(target, batch.num_blocks + size)
                room = self.pools[target].num_free - batch.num_blocks
                if room <= 0:
                    break
                self._tree.split_tail(node, room)
                batch.add(node)
            num_blocks += node.num_blocks
            if node.num_blocks < size:
                break
        for target, batch in batches.items():
            self.desk.start(Tier.DEVICE, target, batch.nodes, frees_source=True)
        self.collect()
        return num_blocks

    # ------------------------------------------------------------ between steps

    def advance(self) -> None:
        """Take what has arrived, keep a reserve free, and save what is not on disk yet."""
        if self._lower is None:
            return
        self.desk.take_results()
        for share in self.desk.take_stored_for():
            self.cut_back(share)
        self.sweep()
        if self.pools[Tier.DEVICE].num_free < self._reserve:
            self.make_room(Tier.DEVICE, self._reserve)
        if self._unsaved:
            self._save_idle()
        self.collect()

    def sweep(self) -> None:
        """Drop what could not be loaded, and all below it, as far as no request holds it."""
        if self.desk.sweep():
            self.collect()

    # ------------------------------------------------------------ write-behind

    def save_later(self, node: RadixNode) -> None:
        """The path to ``node`` is to be on disk, too, when there is time."""
        if Tier.DISK in self.pools and node.owner.may_enter(Tier.DISK):
            self._unsaved.add(node)

    def _save_idle(self) -> None:
        """Begin the next batch to disk, if none is on its way there."""
        if any(job.order.target is Tier.DISK for job in self.desk.jobs):
            return
        assert self._lower is not None
        if not self.desk.is_usable(Tier.DISK):
            return
        batch = self._unsaved.next_batch(self._lower.write_blocks)
        self.make_room(Tier.DISK, sum(n.num_blocks for n in batch), takes_spares=False)
        nodes = that_fit(batch, self.pools[Tier.DISK].num_free)
        if nodes:
            self.desk.start(nodes[0].tier, Tier.DISK, nodes, frees_source=False)
        elif batch:
            self._unsaved.clear()  # the disk is full of what is in use; what is used again returns
