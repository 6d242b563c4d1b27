"""Makes room and moves blocks: what leaves the device, what comes back, what is kept on disk.

Owns the pools of all tiers, the transfer jobs in flight, and the order of things: a copy is demoted
before it is dropped, a promotion has all its blocks or does not begin, and what a failed one did
not bring is a miss. The tree says what may go; tensors and files are the executor's. Knows nothing
of requests. Not thread-safe: owned by the engine thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cache_store.block_pool import BlockPool
from cache_store.events import Tier
from cache_store.leaf_eviction import LeafEviction
from cache_store.load_planner import LoadPlan, LoadPlanner
from cache_store.lost_blocks import LostBlocks
from cache_store.overdue_jobs import OverdueJobs
from cache_store.prefix_search import is_redundant
from cache_store.radix_node import RadixNode
from cache_store.radix_tree import RadixTree
from cache_store.stats import TierCounters
from cache_store.transfer import TransferExecutor, TransferJob, TransferResult
from cache_store.transfer_orders import divide, make_order
from cache_store.unsaved_nodes import UnsavedNodes, that_fit

# A tier that refused a copy (a full disk, an I/O error) is left alone for this long.
REST_AFTER_FAILURE_S = 10.0
# Blocks kept free on the device while lower tiers can take what has to go: a running answer that
# needs its next block does not wait for a copy.
RESERVE_SHARE = 1 / 32
MAX_RESERVE_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class LowerTiers:
    """The tiers below the device. ``num_blocks`` has an entry for each that exists.

    ``write_blocks``: how many blocks one batch to disk carries at most.
    """

    num_blocks: Mapping[Tier, int]
    executor: TransferExecutor
    planner: LoadPlanner
    clock: Callable[[], float]
    write_blocks: int = 64


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
        self._jobs: dict[int, TransferJob] = {}
        self._num_jobs = 0
        self._num_coming = dict.fromkeys(self.pools, 0)  # blocks that jobs in flight will free
        self._lost = LostBlocks(tree)
        self._unsaved = UnsavedNodes(tree)
        self._overdue = OverdueJobs()
        self._resting_until = dict.fromkeys(self.pools, 0.0)
        self._reserve = min(int(device.num_blocks * RESERVE_SHARE), MAX_RESERVE_BLOCKS)

    @property
    def has_transfers(self) -> bool:
        return bool(self._jobs)

    @property
    def has_unsaved(self) -> bool:
        return bool(self._unsaved)

    @property
    def num_transfers(self) -> int:
        return len(self._jobs)

    @property
    def num_available(self) -> int:
        """Blocks of the device that are free or can be evicted."""
        return self._device.num_free + self._tree.residency.num_evictable

    @property
    def is_room_coming(self) -> bool:
        """Whether a job in flight frees blocks of some tier, which lets the next one begin."""
        return any(self._num_coming.values())

    def jobs(self) -> Collection[TransferJob]:
        """Those in flight: each holds a lock on its nodes, and its targets are nobody's else."""
        return self._jobs.values()

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
        batches: dict[Tier, _Batch] = {place: _Batch() for place in self.pools}
        batched = 0
        while True:
            num_coming = residency.num_given_up(tier) + self._num_coming[tier] + batched
            missing = num_blocks - pool.num_free - num_coming
            if missing <= 0:
                break
            # Of the host's copies the spare ones go first, being of use to nobody now; of the
            # disk's last, being what a restart finds of the sessions in use.
            if tier is Tier.HOST and takes_spares and self._drop_spare(tier):
                continue
            node = residency.queues[tier].pop()
            if node is None:
                if tier is Tier.DISK and takes_spares and self._drop_spare(tier):
                    continue
                break
            target = self._resting_place(node, tier, missing)
            if target is None:
                self._drop(node, tier, missing)
            elif node.ids_in(target) is not None:
                self._tree.split_tail(node, missing)
                self._tree.drop_copy(node, tier)
            elif self.pools[target].num_free - batches[target].num_blocks <= 0:
                residency.queues[tier].put_back(node)
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
            self._start(tier, target, batch.nodes, frees_source=True)
            for node in batch.nodes:
                self._tree.unlock(node)
        return pool.num_free >= num_blocks

    def collect(self) -> None:
        """Free what the tree has given up."""
        for tier in self.pools:
            ids = self._tree.residency.take_given_up(tier)
            if ids:
                self._free(tier, ids)

    def _resting_place(self, node: RadixNode, tier: Tier, num_blocks: int) -> Tier | None:
        """The lower tier that ``node`` is in, or is to be copied to; None if it has to be dropped.

        Room for up to ``num_blocks`` of it is being made there, if there is any to be made.
        """
        for place in self.pools:  # the quickest first
            if not place.is_below(tier) or (place is Tier.DISK and node.num_host_children):
                continue
            if node.ids_in(place) is not None or self._can_take(node, place, num_blocks):
                return place
        return None

    def _can_take(self, node: RadixNode, tier: Tier, num_blocks: int) -> bool:
        assert self._lower is not None
        if not self._is_usable(tier):
            return False
        # Not for all of a long node: what fits is better there than nowhere.
        wanted = min(num_blocks, node.num_blocks, max(1, self.pools[tier].num_blocks // 2))
        return (
            self.make_room(tier, wanted)
            or self.pools[tier].num_free > 0
            or self._num_coming[tier] > 0
        )

    def _drop_spare(self, tier: Tier) -> bool:
        node = self._tree.residency.pop_spare(tier)
        if node is None:
            return False
        self._tree.drop_copy(node, tier)
        return True

    def _drop(self, node: RadixNode, tier: Tier, num_blocks: int) -> None:
        """Let up to ``num_blocks`` of an evictable node go, and what hangs below it."""
        counters = self.counters[tier]
        is_bare = node.children is None and node.host_ids is None and node.disk_ids is None
        if is_bare and node.num_blocks > num_blocks:
            self._tree.trim(node, num_blocks)
            self._tree.residency.queues[tier].put_back(node)
            counters.dropped += num_blocks
            return
        self._tree.split_tail(node, num_blocks)
        counters.dropped += self._tree.drop(node)

    # ------------------------------------------------------------ transfers

    def plan(self, num_host_blocks: int, num_disk_blocks: int) -> LoadPlan:
        """Whether a hit in the lower tiers is worth its loading."""
        assert self._lower is not None
        plan = self._lower.planner.plan(num_host_blocks, num_disk_blocks)
        return replace(plan, lowest=self._overdue.slowest_usable(plan.lowest))

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
            self._start(tier, Tier.DEVICE, group, frees_source=False)

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
            self._start(Tier.DEVICE, target, batch.nodes, frees_source=True)
        self.collect()
        return num_blocks

    def _start(
        self, source: Tier, target: Tier, nodes: Sequence[RadixNode], *, frees_source: bool
    ) -> None:
        """Order the copies of ``nodes``, if there are any; ``target`` has the room."""
        if not nodes:
            return
        assert self._lower is not None
        ids = self.pools[target].allocate(sum(node.num_blocks for node in nodes))
        self._num_jobs += 1
        order = make_order(self._tree, self._num_jobs, source, target, nodes, ids)
        job = TransferJob(order, divide(ids, nodes), self._lower.clock(), frees_source)
        self._jobs[order.number] = job
        for node in nodes:
            assert node.transfer is None, "a node is in one transfer at a time"
            node.transfer = job
            self._tree.lock(node)
        if frees_source:
            self._num_coming[source] += len(ids)
        self._lower.executor.submit(order)

    # ------------------------------------------------------------ between steps

    def advance(self) -> None:
        """Take what has arrived, keep a reserve free, and save what is not on disk yet."""
        if self._lower is None:
            return
        if self._jobs or self._overdue.tiers:
            for result in self._lower.executor.take_results():
                self._finish(self._jobs.pop(result.number), result)
            for job in self._overdue.check(self._jobs.values(), self._lower.clock()):
                self._give_up_waiting(job)
        self.sweep()
        if self.pools[Tier.DEVICE].num_free < self._reserve:
            self.make_room(Tier.DEVICE, self._reserve)
        if self._unsaved:
            self._save_idle()
        self.collect()

    def _give_up_waiting(self, job: TransferJob) -> None:
        """Nobody waits for it any more; its ends stay pinned until it returns, if it ever does."""
        if job.frees_source:
            self._num_coming[job.order.source] -= len(job.order.source_ids)
        if job.order.target is Tier.DEVICE:
            job.has_failed = True
            self._lost.add(job)

    def _is_usable(self, tier: Tier) -> bool:
        assert self._lower is not None
        is_rested = self._resting_until[tier] <= self._lower.clock()
        return is_rested and tier not in self._overdue.tiers

    def _finish(self, job: TransferJob, result: TransferResult) -> None:
        order = job.order
        job.is_pending = False
        num_done = 0 if job.has_failed else result.num_done
        if job.frees_source and not job.is_overdue:
            self._num_coming[order.source] -= len(order.source_ids)
        counters = self.counters[order.source if order.target is Tier.DEVICE else order.target]
        if order.target is Tier.DEVICE:
            counters.promoted += num_done
            assert self._lower is not None
            self._lower.planner.record(order.source, num_done, result.seconds)
        else:
            counters.stored += num_done
        counters.failed += len(order.source_ids) - num_done
        left = num_done
        arrived = []
        for node, ids in job.targets.items():
            if left >= len(ids):
                left -= len(ids)
                node.transfer = None
                self._tree.add_copy(node, order.target, ids)
                arrived.append(node)
            else:
                left = 0
                self._fail(job, node, ids)
            self._tree.unlock(node)
            if is_redundant(node, self._tree.block_bytes):
                self._tree.drop(node)  # a longer block came while this one could not go
        if job.frees_source:
            for node in arrived:  # victims came leaves first
                # Something may have come below it in the meantime, in a tier between.
                is_gap = order.target is Tier.DISK and node.num_host_children > 0
                if node.is_evictable_from(order.source) and not is_gap:
                    self._tree.drop_copy(node, order.source)

    def _fail(self, job: TransferJob, node: RadixNode, ids: array[int]) -> None:
        order = job.order
        self._free(order.target, ids)
        if order.target is Tier.DEVICE:
            # Its bytes are lost: it is a miss as soon as nobody holds it. Until then its transfer
            # stands, which keeps others from loading it again.
            if not job.has_failed:
                job.has_failed = True
                self._lost.add(job)
            return
        node.transfer = None
        assert self._lower is not None
        self._resting_until[order.target] = self._lower.clock() + REST_AFTER_FAILURE_S

    def _free(self, tier: Tier, ids: array[int]) -> None:
        if tier is not Tier.DEVICE:
            assert self._lower is not None
            self._lower.executor.delete(tier, ids)
        self.pools[tier].free(ids)

    def sweep(self) -> None:
        """Drop what could not be loaded, and all below it, as far as no request holds it."""
        if self._lost:
            self._lost.sweep()
            self.collect()

    # ------------------------------------------------------------ write-behind

    def save_later(self, node: RadixNode) -> None:
        """The path to ``node`` is to be on disk, too, when there is time."""
        if Tier.DISK in self.pools:
            self._unsaved.add(node)

    def _save_idle(self) -> None:
        """Begin the next batch to disk, if none is on its way there."""
        if any(job.order.target is Tier.DISK for job in self._jobs.values()):
            return
        assert self._lower is not None
        if not self._is_usable(Tier.DISK):
            return
        batch = self._unsaved.next_batch(self._lower.write_blocks)
        self.make_room(Tier.DISK, sum(n.num_blocks for n in batch), takes_spares=False)
        nodes = that_fit(batch, self.pools[Tier.DISK].num_free)
        if nodes:
            self._start(nodes[0].tier, Tier.DISK, nodes, frees_source=False)
        elif batch:
            self._unsaved.clear()  # the disk is full of what is in use; what is used again returns
