"""The prefix cache: the radix tree decides, this executes on the pool.

Owns the leases and what each holds in the tree and in the pool. It knows nothing of tensors: row
copies are handed to the scheduler as orders. Not thread-safe: owned by the engine thread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass, field

from cache_store.block import num_blocks_for
from cache_store.block_hash import Namespace
from cache_store.block_pool import BlockPool
from cache_store.cache import Lease, RowCopy
from cache_store.eviction import EvictionPolicy
from cache_store.integrity import check_ownership, check_tree
from cache_store.prefix_match import PrefixMatch
from cache_store.radix_node import RadixNode
from cache_store.radix_tree import RadixTree
from cache_store.stats import CacheStats
from cache_store.token_bytes import TokenIds, encode_tokens


@dataclass(slots=True)
class _Holding:
    """What one lease holds: a locked path, and in its block table the blocks after that path.

    ``block_ids[:num_shared]`` of the lease stand for the locked path. Of these, ``duplicates``
    are the lease's own, because the tree has other blocks in their places.
    """

    node: RadixNode
    num_shared: int
    source: RadixNode | None = None
    num_rows: int = 0
    duplicates: list[int] = field(default_factory=list)


class PrefixCache:
    """See :class:`cache_store.cache.Cache` for the contract."""

    def __init__(self, num_blocks: int, block_size: int, policy: EvictionPolicy) -> None:
        """``block_size`` in tokens. Raises ValueError if either size is below 1."""
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1 token, not {block_size}")
        self._block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._tree = RadixTree(num_blocks, block_size, policy)
        self._holdings: dict[Lease, _Holding] = {}
        self._stored_total = 0
        self._evicted_total = 0

    @property
    def block_size(self) -> int:
        return self._block_size

    def match(self, namespace: Namespace, token_ids: TokenIds) -> PrefixMatch:
        return self._tree.match_prefix(namespace, token_ids)

    def acquire(self, match: PrefixMatch) -> Lease:
        prefix = self._tree.acquire(match)
        num_shared = len(prefix.block_ids)
        num_cached_tokens = num_shared * self._block_size + prefix.num_rows
        lease = Lease(match.namespace, prefix.block_ids, num_cached_tokens)
        self._holdings[lease] = _Holding(prefix.node, num_shared, prefix.source, prefix.num_rows)
        return lease

    def allocate(self, lease: Lease, num_tokens: int, num_lookahead_tokens: int = 0) -> bool:
        holding = self._holding(lease)
        num_needed = num_blocks_for(num_tokens + num_lookahead_tokens, self._block_size)
        num_missing = num_needed - len(lease.block_ids)
        if num_missing <= 0:
            return True
        if not self._can_have(lease, holding, num_missing):
            return False
        after = lease.block_ids[-1] if lease.block_ids else None
        num_evicted = max(0, num_missing - self._pool.num_free)
        evicted = self._tree.evict(num_evicted)
        lease.block_ids += self._pool.allocate(num_missing - num_evicted, after)
        lease.block_ids += _in_order_after(lease.block_ids, evicted)
        self._evicted_total += num_evicted
        if holding.source is not None and lease.pending_copy is None:
            target = lease.block_ids[holding.num_shared]
            lease.pending_copy = RowCopy(holding.source.block_ids[0], target, holding.num_rows)
        return True

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
        if holding.source is not None:
            # Nothing after the matched blocks can have been computed without the copied rows.
            num_computed_tokens = min(num_computed_tokens, holding.num_shared * self._block_size)
            self._drop_source(holding)
            lease.pending_copy = None
        self._commit(lease, holding, token_ids, num_computed_tokens)
        private = holding.duplicates + lease.block_ids[holding.num_shared :]
        end = holding.node
        start = holding.num_shared * self._block_size
        if num_computed_tokens > start:
            assert num_computed_tokens <= len(token_ids), "more tokens computed than there are"
            encoded = encode_tokens(token_ids[start:num_computed_tokens])
            block_id = lease.block_ids[holding.num_shared]
            insertion = self._tree.insert_partial(end, encoded, block_id)
            if not insertion.duplicates:
                private.remove(block_id)
                self._stored_total += 1
            end = insertion.node
            private += insertion.dropped
        self._tree.touch(end)
        self._tree.unlock(holding.node)
        self._pool.free(private)
        del self._holdings[lease]

    def reset(self) -> int:
        dropped = self._tree.evict(self._tree.num_evictable)
        self._pool.free(dropped)
        return len(dropped)

    def stats(self) -> CacheStats:
        num_blocks, num_free = self._pool.num_blocks, self._pool.num_free
        return CacheStats(
            num_blocks=num_blocks,
            num_free=num_free,
            num_evictable=self._tree.num_evictable,
            num_locked=num_blocks - num_free - self._tree.num_evictable,
            num_cached=self._tree.num_cached,
            num_leases=len(self._holdings),
            num_namespaces=len(self._tree.roots),
            num_free_runs=self._pool.num_free_runs,
            stored_total=self._stored_total,
            evicted_total=self._evicted_total,
        )

    def check_integrity(self, leases: Collection[Lease]) -> None:
        """Walks the whole tree: for tests and for an idle server, not for the engine's loop."""
        assert set(leases) == set(self._holdings), "leases lost or used after their release"
        locks: dict[RadixNode, int] = {}
        private: list[int] = []
        for lease, holding in self._holdings.items():
            assert holding.num_shared <= len(lease.block_ids), "shared blocks beyond the table"
            private += holding.duplicates + lease.block_ids[holding.num_shared :]
            for node in (holding.node, holding.source):
                if node is not None:
                    locks[node] = locks.get(node, 0) + 1
        owned = check_tree(self._tree, locks)
        check_ownership(self._pool, owned, private)

    def _holding(self, lease: Lease) -> _Holding:
        holding = self._holdings.get(lease)
        assert holding is not None, "this lease was released, or is another cache's"
        return holding

    def _can_have(self, lease: Lease, holding: _Holding, num_blocks: int) -> bool:
        """Whether ``num_blocks`` blocks are free or can be evicted; False changes nothing."""
        num_available = self._pool.num_free + self._tree.num_evictable
        if num_available < num_blocks:
            # The partial block's source is a lock that a lone request could fail on for ever, so
            # it is given up, as long as nobody relies on its rows.
            if not self._can_forgo_rows(lease, holding) or num_available + 1 < num_blocks:
                return False
            lease.num_cached_tokens -= holding.num_rows
            self._drop_source(holding)
        return True

    def _can_forgo_rows(self, lease: Lease, holding: _Holding) -> bool:
        source = holding.source
        return source is not None and source.lock_ref == 1 and lease.pending_copy is None

    def _drop_source(self, holding: _Holding) -> None:
        assert holding.source is not None
        self._tree.unlock(holding.source)
        holding.source = None
        holding.num_rows = 0

    def _commit(
        self, lease: Lease, holding: _Holding, token_ids: TokenIds, num_computed_tokens: int
    ) -> None:
        start, end = holding.num_shared, num_computed_tokens // self._block_size
        if end <= start:
            return
        assert end <= len(lease.block_ids), "more tokens computed than the table has blocks for"
        assert num_computed_tokens <= len(token_ids), "more tokens computed than there are"
        encoded = encode_tokens(token_ids[start * self._block_size : end * self._block_size])
        insertion = self._tree.insert(holding.node, encoded, lease.block_ids[start:end])
        holding.node = insertion.node
        holding.num_shared = end
        holding.duplicates += insertion.duplicates
        self._stored_total += end - start - len(insertion.duplicates)
        self._pool.free(insertion.dropped)


def _in_order_after(table: list[int], block_ids: list[int]) -> list[int]:
    """The ids in rising order, beginning with the one that best continues the block table."""
    block_ids.sort()
    first = bisect_right(block_ids, table[-1]) if table else 0
    return block_ids[first:] + block_ids[:first]
