"""The prefix cache: the radix tree decides, this executes on the pools.

Owns the leases and what each holds in the tree and in the device's pool. It knows nothing of
tensors: row copies are handed to the scheduler as orders, and copies between tiers to an executor.
Not thread-safe: owned by the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from cache_store.block import num_blocks_for
from cache_store.block_hash import HASH_BYTES, BlockHashes, Namespace
from cache_store.block_pool import BlockPool
from cache_store.cache import Lease, PrefixReport, RowCopy
from cache_store.continuation import find_continuation
from cache_store.copy_feed import CopyListener
from cache_store.events import EVENT_CHUNK_TOKENS, CacheEvent, Tier
from cache_store.eviction import EvictionPolicy
from cache_store.ghosts import DepartedPrefix
from cache_store.holding import Holding
from cache_store.integrity import check_charges, check_ownership, check_tree
from cache_store.load_planner import LoadPlan
from cache_store.prefix_actions import PrefixActions
from cache_store.prefix_match import PrefixMatch
from cache_store.radix_node import RadixNode, arriving_ids, is_arriving
from cache_store.radix_tree import RadixTree, no_time
from cache_store.restore import StoredBlock, restore_blocks
from cache_store.stats import BlockHistory, CacheStats
from cache_store.tenant_shares import TenantBlocks, TenantLimits
from cache_store.tier_manager import TierManager
from cache_store.token_bytes import TokenIds, encode_tokens
from cache_store.transfer_desk import LowerTiers

_NS_PER_S = 1_000_000_000


class PrefixCache:
    """See :class:`cache_store.cache.Cache` for the contract."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        policy: EvictionPolicy,
        lower: LowerTiers | None = None,
        *,
        clock_ns: Callable[[], int] = no_time,
        has_events: bool = False,
        on_copy: CopyListener | None = None,
    ) -> None:
        """``block_size`` in tokens. ``clock_ns`` is what recency and its bonuses are measured
        with, ``on_copy`` is told of each block in each tier. Raises ValueError if either size is
        below 1."""
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1 token, not {block_size}")
        self._block_size = block_size
        self._pool = BlockPool(num_blocks)
        lower_blocks = {} if lower is None else lower.num_blocks
        event_blocks = max(1, EVENT_CHUNK_TOKENS // block_size) if has_events else 0
        self._tree = RadixTree(
            {Tier.DEVICE: num_blocks, **lower_blocks},
            block_size,
            policy,
            clock_ns=clock_ns,
            event_blocks=event_blocks,
        )
        if on_copy is not None:
            self._tree.residency.tell_copies(on_copy)
        self._tiers = TierManager(self._tree, self._pool, lower)
        self._actions = PrefixActions(self._tree, self._tiers)
        self._shares = self._tree.residency.shares
        self._holdings: dict[Lease, Holding] = {}
        self._stored_total = 0

    @property
    def block_size(self) -> int:
        return self._block_size

    def match(self, namespace: Namespace, token_ids: TokenIds) -> PrefixMatch:
        return self._tree.match_prefix(namespace, token_ids)

    def acquire(self, match: PrefixMatch, bonus_s: float = 0.0, tenant: str = "") -> Lease:
        share = self._shares.begin(tenant)
        match = self._tree.current(match)
        bonus_ns = int(bonus_s * _NS_PER_S)
        plan = self._plan(match)
        prefix = self._tree.acquire(match, plan.lowest if plan else Tier.DEVICE, bonus_ns)
        ready: list[int] = []
        is_ready = True
        in_tier = dict.fromkeys(Tier, 0)
        nobody = self._shares.nobody
        for node in prefix.path:
            if node.owner is nobody and share is not nobody:
                self._shares.adopt(node, share)
            in_tier[node.tier] += node.num_blocks * self._block_size
            is_ready = is_ready and node.block_ids is not None
            if is_ready:
                ready += node.block_ids or ()
        if prefix.source is not None:
            in_tier[prefix.source.tier] += prefix.num_rows
        lease = Lease(match.namespace, ready, sum(in_tier.values()))
        lease.num_host_tokens, lease.num_disk_tokens = in_tier[Tier.HOST], in_tier[Tier.DISK]
        num_shared = sum(node.num_blocks for node in prefix.path)
        self._holdings[lease] = Holding(
            share, prefix.node, num_shared, bonus_ns, plan, prefix.visit,
            prefix.source, prefix.num_rows,
        )  # fmt: skip
        return lease

    def allocate(self, lease: Lease, num_tokens: int, num_lookahead_tokens: int = 0) -> bool:
        holding = self._holding(lease)
        num_needed = num_blocks_for(num_tokens + num_lookahead_tokens, self._block_size)
        num_ready = len(lease.block_ids)
        if num_needed <= num_ready >= holding.num_shared:
            return True  # most often: a block holds the tokens of many steps
        if num_ready >= holding.num_shared and holding.source is None and holding.plan is None:
            return self._grow(lease, holding, num_needed - num_ready)
        unloaded = holding.unloaded(lease)
        num_private = num_needed - max(num_ready, holding.num_shared)
        to_load = _to_load(unloaded, holding.source)
        if any(node.transfer is not None for node in to_load):
            return False  # on its way elsewhere, or lost: to be asked again
        num_missing = max(num_private, 0) + sum(node.num_blocks for node in to_load)
        if not self._can_have(lease, holding, num_missing):
            return False
        to_load = _to_load(unloaded, holding.source)  # which may have been given up
        num_missing = max(num_private, 0) + sum(node.num_blocks for node in to_load)
        if unloaded or (holding.source is not None and holding.source.block_ids is None):
            if not self._tiers.make_room(Tier.DEVICE, num_missing):
                return False
            self._load(lease, holding.source, unloaded, to_load)
        if num_private > 0 and not self._grow(lease, holding, num_private):
            return False  # with something to load there was room made for all
        if holding.plan is not None:
            self._tiers.count_plan(holding.plan)
            holding.plan = None
        if holding.source is not None and lease.pending_copy is None:
            target = lease.block_ids[holding.num_shared]
            lease.pending_copy = RowCopy(arriving_ids(holding.source)[0], target, holding.num_rows)
        return True

    @property
    def has_transfers(self) -> bool:
        return self._tiers.has_transfers

    @property
    def is_room_coming(self) -> bool:
        return self._tiers.is_room_coming

    @property
    def is_saving(self) -> bool:
        return self._tiers.has_transfers or self._tiers.has_unsaved

    def advance(self) -> None:
        self._tiers.advance()

    def copied(self, lease: Lease) -> None:
        holding = self._holding(lease)
        assert lease.pending_copy is not None, "no copy was pending"
        lease.pending_copy = None
        self._drop_source(holding)

    def commit(self, lease: Lease, token_ids: TokenIds, num_computed_tokens: int) -> None:
        holding = self._holding(lease)
        assert holding.source is None, "the matched rows were never copied into their block"
        self._commit(lease, holding, token_ids, num_computed_tokens)

    def release(self, lease: Lease, token_ids: TokenIds, num_computed_tokens: int) -> None:
        holding = self._holding(lease)
        is_unfit = bool(holding.unloaded(lease)) or lease.is_loading or lease.has_failed
        if holding.source is not None or is_unfit:
            # Nothing after the matched blocks can have been computed without the copied rows.
            num_computed_tokens = min(num_computed_tokens, holding.num_shared * self._block_size)
            if holding.source is not None:
                self._drop_source(holding)
            lease.pending_copy = None
        self._commit(lease, holding, token_ids, num_computed_tokens)
        share = holding.share
        private = holding.duplicates + lease.block_ids[holding.num_shared :]
        share.num_private -= len(private)
        end = holding.node
        start = holding.num_shared * self._block_size
        if num_computed_tokens > start:
            assert num_computed_tokens <= len(token_ids), "more tokens computed than there are"
            encoded = encode_tokens(token_ids[start:num_computed_tokens])
            block_id = lease.block_ids[holding.num_shared]
            insertion = self._tree.insert_partial(end, encoded, block_id, share)
            if not insertion.duplicates:
                private.remove(block_id)
                self._stored_total += 1
            end = insertion.node
        if not lease.has_failed:
            self._tree.touch(end, bonus_ns=holding.bonus_ns)
            self._tree.residency.ended(holding.visit, end, holding.bonus_ns)
        self._tree.unlock(holding.node)
        self._pool.free(private)
        self._tiers.save_later(end)
        self._tiers.sweep()
        self._tiers.cut_back(share)
        self._tiers.collect()
        share.num_leases -= 1
        del self._holdings[lease]

    def continuation(self, lease: Lease, token_ids: TokenIds, max_num_tokens: int) -> TokenIds:
        holding = self._holding(lease)
        tail = token_ids[holding.num_shared * self._block_size :]
        return find_continuation(holding.node, tail, max_num_tokens, self._block_size)

    def departed(self, hashes: BlockHashes, first: int) -> DepartedPrefix | None:
        return self._tree.residency.ghosts.find(hashes, first)

    def restore(self, found: Sequence[StoredBlock]) -> list[int | None]:
        """Take up blocks that were found on disk, parents before children; the disk id of each,
        None for what is of no use. Before the first request."""
        return restore_blocks(self._tree, self._tiers.pools[Tier.DISK], found)

    def reset(self) -> int:
        return self._actions.reset()

    def inspect(self, namespace: Namespace, token_ids: TokenIds) -> PrefixReport:
        return self._actions.inspect(namespace, token_ids)

    def prefetch(self, namespace: Namespace, token_ids: TokenIds) -> PrefixReport:
        return self._actions.prefetch(namespace, token_ids)

    def demote(
        self, namespace: Namespace, token_ids: TokenIds, keep_num_tokens: int
    ) -> PrefixReport:
        return self._actions.demote(namespace, token_ids, keep_num_tokens)

    def drop(self, namespace: Namespace, token_ids: TokenIds, keep_num_tokens: int) -> PrefixReport:
        return self._actions.drop(namespace, token_ids, keep_num_tokens)

    def has_room(self, num_blocks: int, tenant: str, *, at_others_cost: bool) -> bool:
        num_free, num_evictable = self._pool.num_free, self._tree.residency.num_evictable
        if num_blocks > num_free + num_evictable or at_others_cost:
            return num_blocks <= num_free + num_evictable
        share = self._shares.of(tenant)
        return num_blocks <= self._shares.num_obtainable(share, num_free, num_evictable)

    def set_tenant_limits(self, limits: Mapping[str, TenantLimits]) -> None:
        self._shares.set_limits(limits)
        for share in self._shares:
            self._tiers.cut_back(share)
        self._tiers.collect()

    def tenant_usage(self) -> Sequence[TenantBlocks]:
        return self._shares.usage()

    def take_events(self) -> Sequence[CacheEvent]:
        return self._tree.residency.take_events()

    def snapshot(self) -> Sequence[CacheEvent]:
        self._tree.residency.take_events()  # the snapshot holds them
        return self._tree.residency.snapshot(self._tree.nodes())

    def stats(self) -> CacheStats:
        num_blocks, num_free = self._pool.num_blocks, self._pool.num_free
        return CacheStats(
            num_blocks=num_blocks,
            num_free=num_free,
            num_evictable=self._tree.residency.num_evictable,
            num_locked=num_blocks - num_free - self._tree.residency.num_evictable,
            num_cached=self._tree.residency.num_cached[Tier.DEVICE],
            num_leases=len(self._holdings),
            num_namespaces=len(self._tree.roots),
            num_free_runs=self._pool.num_free_runs,
            stored_total=self._stored_total,
            evicted_total=sum(counters.dropped for counters in self._tiers.counters.values()),
            num_transfers=self._tiers.num_transfers,
            tiers=self._tiers.stats(),
        )

    def history(self) -> BlockHistory:
        return self._tiers.history()

    def check_integrity(self, leases: Collection[Lease]) -> None:
        """Walks the whole tree: for tests and for an idle server, not for the engine's loop."""
        assert set(leases) == set(self._holdings), "leases lost or used after their release"
        locks: dict[RadixNode, int] = {}
        private: list[int] = []
        charges = []
        for lease, holding in self._holdings.items():
            num_ready = holding.num_shared - sum(n.num_blocks for n in holding.unloaded(lease))
            assert num_ready <= len(lease.block_ids), "shared blocks beyond the table"
            own = holding.duplicates + lease.block_ids[holding.num_shared :]
            private += own
            charges.append((holding.share, len(own)))
            for node in (holding.node, holding.source):
                if node is not None:
                    locks[node] = locks.get(node, 0) + 1
        jobs = self._tiers.jobs()
        for node in (node for job in jobs for node in job.targets):
            locks[node] = locks.get(node, 0) + 1
        owned = check_tree(self._tree, locks)
        check_charges(self._shares, charges)
        for tier, pool in self._tiers.pools.items():
            held = private if tier is Tier.DEVICE else []
            writing = (job.targets.values() for job in jobs if job.order.target is tier)
            arriving = [block_id for targets in writing for ids in targets for block_id in ids]
            check_ownership(pool, owned[tier], [*held, *arriving])

    def _holding(self, lease: Lease) -> Holding:
        holding = self._holdings.get(lease)
        assert holding is not None, "this lease was released, or is another cache's"
        return holding

    def _plan(self, match: PrefixMatch) -> LoadPlan | None:
        num_host = match.num_host_tokens // self._block_size
        num_disk = match.num_disk_tokens // self._block_size
        partial = match.partial
        if partial is not None:
            num_host += partial.tier is Tier.HOST
            num_disk += partial.tier is Tier.DISK
        if num_host + num_disk == 0:
            return None
        return self._tiers.plan(num_host, num_disk)

    def _load(
        self,
        lease: Lease,
        source: RadixNode | None,
        unloaded: Sequence[RadixNode],
        to_load: Sequence[RadixNode],
    ) -> None:
        """Begin the promotion of ``to_load``; the table gets the blocks of what was unloaded."""
        if to_load:
            self._tiers.promote(to_load)
        for node in (*unloaded, *(() if source is None else (source,))):
            job = node.transfer
            if job is not None and node.block_ids is None and job not in lease.loading:
                lease.loading.append(job)
        for node in unloaded:
            lease.block_ids += arriving_ids(node)

    def _grow(self, lease: Lease, holding: Holding, num_blocks: int) -> bool:
        """Add private blocks to the table, or none if not all can be had."""
        holding.share.num_private += num_blocks  # before it is asked who has most
        taken = self._tiers.take(num_blocks, lease.block_ids[-1] if lease.block_ids else None)
        if taken is None:
            holding.share.num_private -= num_blocks
            return False
        lease.block_ids += taken
        return True

    def _can_have(self, lease: Lease, holding: Holding, num_blocks: int) -> bool:
        """Whether ``num_blocks`` blocks are free or can be evicted; False changes nothing."""
        num_available = self._tiers.num_available
        if num_available < num_blocks:
            # The partial block's source is a lock that a lone request could fail on for ever, so
            # it is given up, as long as nobody relies on its rows.
            can_forgo = holding.source is not None and holding.source.lock_ref == 1
            if not can_forgo or lease.pending_copy is not None or num_available + 1 < num_blocks:
                return False
            self._forgo_rows(lease, holding)
        return True

    def _forgo_rows(self, lease: Lease, holding: Holding) -> None:
        assert holding.source is not None
        tier = holding.source.tier
        lease.num_cached_tokens -= holding.num_rows
        lease.num_host_tokens -= holding.num_rows if tier is Tier.HOST else 0
        lease.num_disk_tokens -= holding.num_rows if tier is Tier.DISK else 0
        self._drop_source(holding)

    def _drop_source(self, holding: Holding) -> None:
        assert holding.source is not None
        self._tree.unlock(holding.source)
        holding.source = None
        holding.num_rows = 0

    def _commit(
        self, lease: Lease, holding: Holding, token_ids: TokenIds, num_computed_tokens: int
    ) -> None:
        start, end = holding.num_shared, num_computed_tokens // self._block_size
        if end <= start:
            return
        assert end <= len(lease.block_ids), "more tokens computed than the table has blocks for"
        assert num_computed_tokens <= len(token_ids), "more tokens computed than there are"
        encoded = encode_tokens(token_ids[start * self._block_size : end * self._block_size])
        hashes = lease.block_hashes.joined[start * HASH_BYTES : end * HASH_BYTES]
        share = holding.share
        offered = lease.block_ids[start:end]
        insertion = self._tree.insert(holding.node, encoded, offered, share, hashes)
        holding.node = insertion.node
        holding.num_shared = end
        holding.duplicates += insertion.duplicates
        num_stored = end - start - len(insertion.duplicates)
        share.num_private -= num_stored
        self._stored_total += num_stored
        self._tiers.cut_back(share)
        self._tiers.collect()


def _to_load(unloaded: Sequence[RadixNode], source: RadixNode | None) -> list[RadixNode]:
    """What has to be promoted for a lease and is not being promoted yet, parents first."""
    nodes = [*unloaded, *(() if source is None else (source,))]
    return [node for node in nodes if node.block_ids is None and not is_arriving(node)]
