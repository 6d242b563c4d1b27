"""The copies between tiers that are under way: begun, counted, and what becomes of them.

Owns the jobs in flight and what is known of tiers that fail or do not answer. What goes where is
the tier manager's to say; tensors and files are the executor's. Not thread-safe: owned by the
engine thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from cache_store.block_pool import BlockPool
from cache_store.events import Tier
from cache_store.load_planner import LoadPlanner
from cache_store.lost_blocks import LostBlocks
from cache_store.overdue_jobs import OverdueJobs
from cache_store.prefix_search import is_redundant
from cache_store.radix_node import RadixNode
from cache_store.radix_tree import RadixTree
from cache_store.stats import TierCounters
from cache_store.tenant_shares import TenantShare
from cache_store.transfer import TransferExecutor, TransferJob, TransferResult
from cache_store.transfer_orders import divide, make_order

# A tier that refused a copy (a full disk, an I/O error) is left alone for this long.
REST_AFTER_FAILURE_S = 10.0


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


class TransferDesk:
    """``pools`` of all tiers and their ``counters`` are shared with the tier manager. Without
    ``lower`` there are no transfers."""

    def __init__(
        self,
        tree: RadixTree,
        pools: Mapping[Tier, BlockPool],
        counters: Mapping[Tier, TierCounters],
        lower: LowerTiers | None,
    ) -> None:
        self._tree = tree
        self._pools = pools
        self._counters = counters
        self._lower = lower
        self._jobs: dict[int, TransferJob] = {}
        self._num_jobs = 0
        self.num_coming = dict.fromkeys(pools, 0)  # blocks that jobs in flight will free
        self._lost = LostBlocks(tree)
        self._overdue = OverdueJobs()
        self._resting_until = dict.fromkeys(pools, 0.0)
        self._stored_for: dict[str, TenantShare] = {}

    @property
    def jobs(self) -> Collection[TransferJob]:
        """Those in flight: each holds a lock on its nodes, and its targets are nobody's else."""
        return self._jobs.values()

    @property
    def is_room_coming(self) -> bool:
        """Whether a job in flight frees blocks of some tier, which lets the next one begin."""
        return any(self.num_coming.values())

    def is_usable(self, tier: Tier) -> bool:
        assert self._lower is not None
        is_rested = self._resting_until[tier] <= self._lower.clock()
        return is_rested and tier not in self._overdue.tiers

    def slowest_usable(self, tier: Tier) -> Tier:
        """``tier``, or the slowest above it that answers."""
        return self._overdue.slowest_usable(tier)

    def start(
        self, source: Tier, target: Tier, nodes: Sequence[RadixNode], *, frees_source: bool
    ) -> None:
        """Order the copies of ``nodes``, if there are any; ``target`` has the room."""
        if not nodes:
            return
        assert self._lower is not None
        ids = self._pools[target].allocate(sum(node.num_blocks for node in nodes))
        self._num_jobs += 1
        order = make_order(self._tree, self._num_jobs, source, target, nodes, ids)
        job = TransferJob(order, divide(ids, nodes), self._lower.clock(), frees_source)
        self._jobs[order.number] = job
        for node in nodes:
            assert node.transfer is None, "a node is in one transfer at a time"
            node.transfer = job
            self._tree.lock(node)
            if frees_source:
                node.owner.num_leaving[source] += node.num_blocks
        if frees_source:
            self.num_coming[source] += len(ids)
        self._lower.executor.submit(order)

    def take_results(self) -> None:
        """What has ended since the last time, and what is overdue by now."""
        if self._jobs or self._overdue.tiers:
            assert self._lower is not None
            for result in self._lower.executor.take_results():
                self._finish(self._jobs.pop(result.number), result)
            for job in self._overdue.check(self._jobs.values(), self._lower.clock()):
                self._give_up_waiting(job)

    def take_stored_for(self) -> Collection[TenantShare]:
        """The tenants for whom something has come to a lower tier since the last call."""
        shares, self._stored_for = self._stored_for, {}
        return shares.values()

    def _give_up_waiting(self, job: TransferJob) -> None:
        """Nobody waits for it any more; its ends stay pinned until it returns, if it ever does."""
        if job.frees_source:
            self.num_coming[job.order.source] -= len(job.order.source_ids)
        if job.order.target is Tier.DEVICE:
            job.has_failed = True
            self._lost.add(job)

    def _finish(self, job: TransferJob, result: TransferResult) -> None:
        order = job.order
        job.is_pending = False
        num_done = 0 if job.has_failed else result.num_done
        if job.frees_source and not job.is_overdue:
            self.num_coming[order.source] -= len(order.source_ids)
        counters = self._counters[order.source if order.target is Tier.DEVICE else order.target]
        if order.target is Tier.DEVICE:
            counters.promoted += num_done
            counters.promoted_s += result.seconds
            assert self._lower is not None
            self._lower.planner.record(order.source, num_done, result.seconds)
        else:
            counters.stored += num_done
            counters.stored_s += result.seconds
            self._stored_for |= {node.owner.tenant: node.owner for node in job.targets}
        counters.failed += len(order.source_ids) - num_done
        counters.corrupt += result.is_corrupt
        left = num_done
        arrived = []
        for node, ids in job.targets.items():
            if job.frees_source:
                node.owner.num_leaving[order.source] -= len(ids)
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
            emptied = self._counters[order.source]
            emptied.demoted_s += result.seconds
            for node in arrived:  # victims came leaves first
                # Something may have come below it in the meantime, in a tier between.
                is_gap = order.target is Tier.DISK and node.num_host_children > 0
                if node.is_evictable_from(order.source) and not is_gap:
                    emptied.demoted += node.num_blocks
                    self._tree.drop_copy(node, order.source)

    def _fail(self, job: TransferJob, node: RadixNode, ids: array[int]) -> None:
        order = job.order
        self.free(order.target, ids)
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

    def free(self, tier: Tier, ids: array[int]) -> None:
        """Give back blocks that neither the tree nor a job has any more."""
        if tier is not Tier.DEVICE:
            assert self._lower is not None
            self._lower.executor.delete(tier, ids)
        self._pools[tier].free(ids)

    def sweep(self) -> bool:
        """Drop what could not be loaded, and all below it, as far as no request holds it; whether
        there was any such thing."""
        if self._lost:
            self._lost.sweep()
            return True
        return False
