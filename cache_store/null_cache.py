"""A cache that stores nothing: the same contract, for ``--cache none`` and for comparison.

Owns the block tables of its leases. Never matches, so each request computes all its tokens. Not
thread-safe: owned by the engine thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from cache_store.block import num_blocks_for
from cache_store.block_hash import BlockHashes, Namespace
from cache_store.block_pool import BlockPool
from cache_store.cache import Lease, PrefixReport
from cache_store.events import CacheEvent
from cache_store.ghosts import DepartedPrefix
from cache_store.integrity import check_ownership
from cache_store.prefix_match import PrefixMatch
from cache_store.shared_prefixes import Place
from cache_store.stats import BlockHistory, CacheStats
from cache_store.tenant_shares import TenantBlocks, TenantLimits
from cache_store.token_bytes import TokenIds


class NullCache:
    """See :class:`cache_store.cache.Cache` for the contract."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """``block_size`` in tokens. Raises ValueError if either size is below 1."""
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1 token, not {block_size}")
        self._block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._leases: set[Lease] = set()

    @property
    def block_size(self) -> int:
        return self._block_size

    def match(self, place: Place, token_ids: TokenIds) -> PrefixMatch:
        return PrefixMatch(place if isinstance(place, Namespace) else place.tail, token_ids)

    def acquire(self, match: PrefixMatch, bonus_s: float = 0.0, tenant: str = "") -> Lease:
        lease = Lease(match.namespace)
        self._leases.add(lease)
        return lease

    def allocate(self, lease: Lease, num_tokens: int, num_lookahead_tokens: int = 0) -> bool:
        self._check_lease(lease)
        num_needed = num_blocks_for(num_tokens + num_lookahead_tokens, self._block_size)
        num_missing = num_needed - len(lease.block_ids)
        if num_missing > self._pool.num_free:
            return False
        if num_missing > 0:
            after = lease.block_ids[-1] if lease.block_ids else None
            lease.block_ids.extend(self._pool.allocate(num_missing, after))
        return True

    def copied(self, lease: Lease) -> None:
        self._check_lease(lease)
        raise AssertionError("no copy was pending")

    def commit(self, lease: Lease, token_ids: TokenIds, num_computed_tokens: int) -> None:
        self._check_lease(lease)

    def release(self, lease: Lease, token_ids: TokenIds, num_computed_tokens: int) -> None:
        self._check_lease(lease)
        self._leases.remove(lease)
        self._pool.free(lease.block_ids)

    def continuation(self, lease: Lease, token_ids: TokenIds, max_num_tokens: int) -> TokenIds:
        self._check_lease(lease)
        return token_ids[:0]

    def has_room(self, num_blocks: int, tenant: str, *, at_others_cost: bool) -> bool:
        return num_blocks <= self._pool.num_free

    @property
    def has_transfers(self) -> bool:
        return False

    @property
    def is_room_coming(self) -> bool:
        return False

    @property
    def is_saving(self) -> bool:
        return False

    def advance(self) -> None:
        pass

    def departed(self, hashes: BlockHashes, first: int) -> DepartedPrefix | None:
        return None

    def reset(self) -> int:
        return 0

    def inspect(self, namespace: Namespace, token_ids: TokenIds) -> PrefixReport:
        return PrefixReport()

    def prefetch(self, namespace: Namespace, token_ids: TokenIds) -> PrefixReport:
        return PrefixReport()

    def demote(
        self, namespace: Namespace, token_ids: TokenIds, keep_num_tokens: int
    ) -> PrefixReport:
        return PrefixReport()

    def drop(self, namespace: Namespace, token_ids: TokenIds, keep_num_tokens: int) -> PrefixReport:
        return PrefixReport()

    def set_tenant_limits(self, limits: Mapping[str, TenantLimits]) -> None:
        pass

    def tenant_usage(self) -> Sequence[TenantBlocks]:
        return ()

    def take_events(self) -> Sequence[CacheEvent]:
        return ()

    def snapshot(self) -> Sequence[CacheEvent]:
        return ()

    def stats(self) -> CacheStats:
        num_blocks, num_free = self._pool.num_blocks, self._pool.num_free
        return CacheStats(
            num_blocks=num_blocks,
            num_free=num_free,
            num_evictable=0,
            num_locked=num_blocks - num_free,
            num_cached=0,
            num_leases=len(self._leases),
            num_namespaces=0,
            num_free_runs=self._pool.num_free_runs,
            stored_total=0,
            evicted_total=0,
        )

    def history(self) -> BlockHistory:
        return BlockHistory()

    def check_integrity(self, leases: Collection[Lease]) -> None:
        assert set(leases) == self._leases, "leases lost or used after their release"
        private = [block_id for lease in self._leases for block_id in lease.block_ids]
        check_ownership(self._pool, [], private)

    def _check_lease(self, lease: Lease) -> None:
        assert lease in self._leases, "this lease was released, or is another cache's"
