"""A prefix cache in which prompts may stand in two namespaces, one behind the other.

Owns the pairs of leases that stand for one, and their adding up. Where a prompt is divided is
shared_prefixes' rule; all that is stored, found and evicted is the inner cache's doing, which
sees two ordinary leases. Not thread-safe: owned by the engine thread.

The tail's match counts only behind a head that is there whole. A tail may outlive its head: then it
is found again once the head was computed anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cache_store.block_hash import HASH_BYTES, NO_HASHES, BlockHashes, Namespace
from cache_store.cache import Lease, PrefixReport
from cache_store.events import CacheEvent
from cache_store.ghosts import DepartedPrefix
from cache_store.prefix_cache import PrefixCache
from cache_store.prefix_match import PrefixMatch
from cache_store.shared_prefixes import Place, SharedPrefixes
from cache_store.stats import BlockHistory, CacheStats
from cache_store.tenant_shares import TenantBlocks, TenantLimits
from cache_store.token_bytes import TokenIds


@dataclass(frozen=True, slots=True)
class DividedMatch(PrefixMatch):
    """The sums of two matches. ``num_head_tokens`` is where the tail begins."""

    num_head_tokens: int = 0
    head: PrefixMatch | None = field(default=None, repr=False)
    tail: PrefixMatch | None = field(default=None, repr=False)


@dataclass(slots=True)
class _Pair:
    num_head_tokens: int
    head: Lease
    tail: Lease

    def show(self, lease: Lease) -> None:
        """Have ``lease`` say what the two come to."""
        head, tail = self.head, self.tail
        num_blocks = len(head.block_ids) + len(tail.block_ids)
        if len(lease.block_ids) != num_blocks or lease.block_ids[-1:] != tail.block_ids[-1:]:
            lease.block_ids = head.block_ids + tail.block_ids
        lease.num_cached_tokens = head.num_cached_tokens + tail.num_cached_tokens
        lease.num_host_tokens = head.num_host_tokens + tail.num_host_tokens
        lease.num_disk_tokens = head.num_disk_tokens + tail.num_disk_tokens
        lease.pending_copy = head.pending_copy or tail.pending_copy
        if len(lease.loading) != len(head.loading) + len(tail.loading):
            lease.loading = head.loading + tail.loading


class DividedCache:
    """See :class:`cache_store.cache.Cache` for the contract. In one point it gives less: an
    allocation that comes to nothing may have taken blocks for the head, which the next one uses."""

    def __init__(self, inner: PrefixCache, prefixes: SharedPrefixes) -> None:
        self.inner = inner
        self.prefixes = prefixes
        self._pairs: dict[Lease, _Pair] = {}

    @property
    def block_size(self) -> int:
        return self.inner.block_size

    # ------------------------------------------------------------ leases

    def match(self, place: Place, token_ids: TokenIds) -> PrefixMatch:
        if isinstance(place, Namespace):
            return self.inner.match(place, token_ids)
        cut = place.num_head_tokens
        head = self.inner.match(place.head, token_ids[:cut])
        tail = PrefixMatch(place.tail, token_ids[:0])
        if head.num_block_tokens == cut:
            tail = self.inner.match(place.tail, token_ids[cut:])
        return DividedMatch(
            place.tail,
            token_ids,
            head.num_block_tokens + tail.num_block_tokens,
            head.partial or tail.partial,
            None,
            head.num_host_tokens + tail.num_host_tokens,
            head.num_disk_tokens + tail.num_disk_tokens,
            cut,
            head,
            tail,
        )

    def acquire(self, match: PrefixMatch, bonus_s: float = 0.0, tenant: str = "") -> Lease:
        if not isinstance(match, DividedMatch):
            return self.inner.acquire(match, bonus_s, tenant)
        assert match.head is not None
        assert match.tail is not None
        # What all have in common is nobody's own.
        head = self.inner.acquire(match.head, bonus_s)
        found = match.tail
        if head.num_cached_tokens < match.num_head_tokens:  # as loading it would not have paid
            found = PrefixMatch(found.namespace, match.token_ids[:0])
        tail = self.inner.acquire(found, bonus_s, tenant)
        lease = Lease(tail.namespace)
        pair = self._pairs[lease] = _Pair(match.num_head_tokens, head, tail)
        pair.show(lease)
        return lease

    def allocate(self, lease: Lease, num_tokens: int, num_lookahead_tokens: int = 0) -> bool:
        pair = self._pairs.get(lease)
        if pair is None:
            return self.inner.allocate(lease, num_tokens, num_lookahead_tokens)
        cut = pair.num_head_tokens
        num_wanted = num_tokens + num_lookahead_tokens
        is_there = self.inner.allocate(pair.head, min(num_wanted, cut))
        if is_there and num_wanted > cut:
            in_tail = max(num_tokens - cut, 0)
            is_there = self.inner.allocate(pair.tail, in_tail, num_wanted - cut - in_tail)
        pair.show(lease)
        return is_there

    def copied(self, lease: Lease) -> None:
        pair = self._pairs.get(lease)
        if pair is None:
            self.inner.copied(lease)
            return
        self.inner.copied(pair.tail if pair.head.pending_copy is None else pair.head)
        pair.show(lease)

    def commit(self, lease: Lease, token_ids: TokenIds, num_computed_tokens: int) -> None:
        pair = self._pairs.get(lease)
        if pair is None:
            self.inner.commit(lease, token_ids, num_computed_tokens)
            return
        self._hand_on_hashes(lease, pair)
        cut = pair.num_head_tokens
        self.inner.commit(pair.head, token_ids[:cut], min(num_computed_tokens, cut))
        if num_computed_tokens > cut:
            self.inner.commit(pair.tail, token_ids[cut:], num_computed_tokens - cut)

    def release(self, lease: Lease, token_ids: TokenIds, num_computed_tokens: int) -> None:
        pair = self._pairs.pop(lease, None)
        if pair is None:
            self.inner.release(lease, token_ids, num_computed_tokens)
            return
        self._hand_on_hashes(lease, pair)
        cut = pair.num_head_tokens
        # The tail first, so that it is the first to be evicted.
        self.inner.release(pair.tail, token_ids[cut:], max(num_computed_tokens - cut, 0))
        self.inner.release(pair.head, token_ids[:cut], min(num_computed_tokens, cut))

    def continuation(self, lease: Lease, token_ids: TokenIds, max_num_tokens: int) -> TokenIds:
        pair = self._pairs.get(lease)
        if pair is None:
            return self.inner.continuation(lease, token_ids, max_num_tokens)
        tail = token_ids[pair.num_head_tokens :]
        return self.inner.continuation(pair.tail, tail, max_num_tokens)

    def _hand_on_hashes(self, lease: Lease, pair: _Pair) -> None:
        if lease.block_hashes is NO_HASHES or pair.head.block_hashes is not NO_HASHES:
            return
        cut = pair.num_head_tokens // self.block_size * HASH_BYTES
        pair.head.block_hashes = BlockHashes(lease.block_hashes.joined[:cut])
        pair.tail.block_hashes = BlockHashes(lease.block_hashes.joined[cut:])

    # ------------------------------------------------------------ stored prefixes

    def inspect(self, namespace: Namespace, token_ids: TokenIds) -> PrefixReport:
        return _sum(
            self.inner.inspect(part, tokens) for part, tokens in self._parts(namespace, token_ids)
        )

    def prefetch(self, namespace: Namespace, token_ids: TokenIds) -> PrefixReport:
        return _sum(
            self.inner.prefetch(part, tokens) for part, tokens in self._parts(namespace, token_ids)
        )

    def demote(
        self, namespace: Namespace, token_ids: TokenIds, keep_num_tokens: int
    ) -> PrefixReport:
        """Of what is behind a shared prefix: that itself is not one request's to move."""
        return _sum(
            self.inner.demote(part, token_ids[cut:], max(keep_num_tokens - cut, 0))
            for part, cut in self._own_parts(namespace, token_ids)
        )

    def drop(self, namespace: Namespace, token_ids: TokenIds, keep_num_tokens: int) -> PrefixReport:
        """As :meth:`demote`; also what was stored while other prefixes were shared."""
        return _sum(
            self.inner.drop(part, token_ids[cut:], max(keep_num_tokens - cut, 0))
            for part, cut in self._own_parts(namespace, token_ids)
        )

    def _parts(
        self, namespace: Namespace, token_ids: TokenIds
    ) -> Sequence[tuple[Namespace, TokenIds]]:
        place = self.prefixes.divide(namespace, token_ids)
        if isinstance(place, Namespace):
            return ((place, token_ids),)
        cut = place.num_head_tokens
        return ((place.head, token_ids[:cut]), (place.tail, token_ids[cut:]))

    def _own_parts(
        self, namespace: Namespace, token_ids: TokenIds
    ) -> Iterable[tuple[Namespace, int]]:
        for place in self.prefixes.all_places(namespace, token_ids):
            if isinstance(place, Namespace):
                yield place, 0
            else:
                yield place.tail, place.num_head_tokens

    # ------------------------------------------------------------ handed on

    def departed(self, hashes: BlockHashes, first: int) -> DepartedPrefix | None:
        return self.inner.departed(hashes, first)

    def has_room(self, num_blocks: int, tenant: str, *, at_others_cost: bool) -> bool:
        return self.inner.has_room(num_blocks, tenant, at_others_cost=at_others_cost)

    def set_tenant_limits(self, limits: Mapping[str, TenantLimits]) -> None:
        self.inner.set_tenant_limits(limits)

    def tenant_usage(self) -> Sequence[TenantBlocks]:
        return self.inner.tenant_usage()

    @property
    def has_transfers(self) -> bool:
        return self.inner.has_transfers

    @property
    def is_room_coming(self) -> bool:
        return self.inner.is_room_coming

    @property
    def is_saving(self) -> bool:
        return self.inner.is_saving

    def advance(self) -> None:
        self.inner.advance()

    def reset(self) -> int:
        return self.inner.reset()

    def take_events(self) -> Sequence[CacheEvent]:
        return self.inner.take_events()

    def snapshot(self) -> Sequence[CacheEvent]:
        return self.inner.snapshot()

    def stats(self) -> CacheStats:
        stats = self.inner.stats()
        if not self._pairs:
            return stats
        return replace(stats, num_leases=stats.num_leases - len(self._pairs))

    def history(self) -> BlockHistory:
        return self.inner.history()

    def check_integrity(self, leases: Collection[Lease]) -> None:
        inner: list[Lease] = []
        for lease in leases:
            pair = self._pairs.get(lease)
            inner += (lease,) if pair is None else (pair.head, pair.tail)
        assert self._pairs.keys() <= set(leases), "leases lost or used after their release"
        self.inner.check_integrity(inner)


def _sum(reports: Iterable[PrefixReport]) -> PrefixReport:
    found = list(reports)
    return PrefixReport(
        sum(report.num_device_tokens for report in found),
        sum(report.num_host_tokens for report in found),
        sum(report.num_disk_tokens for report in found),
        sum(report.num_blocks_changed for report in found),
        sum(report.num_blocks_left for report in found),
    )
