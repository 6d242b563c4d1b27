"""The contract between a scheduler and a cache, and the lease that passes between them.

Owns no behaviour. A scheduler that keeps to it runs unchanged over PrefixCache and NullCache.

All of it belongs to one thread, the engine's: there is no lock anywhere in this package. What is
said here of "locking" is the protection of blocks from eviction.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cache_store.block_hash import NO_HASHES, BlockHashes, Namespace
from cache_store.events import CacheEvent
from cache_store.ghosts import DepartedPrefix
from cache_store.prefix_match import PrefixMatch
from cache_store.shared_prefixes import Place
from cache_store.stats import BlockHistory, CacheStats
from cache_store.tenant_shares import TenantBlocks, TenantLimits
from cache_store.token_bytes import TokenIds
from cache_store.transfer import TransferJob


@dataclass(frozen=True, slots=True)
class RowCopy:
    """Copy the keys and values of the first ``num_rows`` tokens from block to block."""

    source_block_id: int
    target_block_id: int
    num_rows: int


@dataclass(slots=True, eq=False)
class Lease:
    """What one request holds: read by the scheduler, written by the cache that issued it.

    ``block_ids`` is the block table in token order. ``num_cached_tokens`` tokens need no
    computing; the number is final once the first ``allocate`` has succeeded (the cache gives the
    partial rows up if their source block is itself needed to make room). ``pending_copy`` has to
    be executed before anything else is written to its target, and then reported with ``copied``.

    Of the cached tokens, ``num_host_tokens`` and ``num_disk_tokens`` come from lower tiers: while
    ``is_loading`` nothing of the table may be read or written, and if then ``has_failed`` the lease
    is good for nothing but its release.

    Two fields are the scheduler's to set. ``block_hashes`` are those of the first blocks of the
    tokens that it will commit, if it has them; the cache computes the others. For
    ``num_room_tokens`` it has blocks, so that it asks for more once per block and not at each step.
    """

    namespace: Namespace
    block_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_host_tokens: int = 0
    num_disk_tokens: int = 0
    pending_copy: RowCopy | None = None
    loading: list[TransferJob] = field(default_factory=list)
    block_hashes: BlockHashes = NO_HASHES
    num_room_tokens: int = 0

    # Asked of every request at every step, and hardly one has ever loaded anything.

    @property
    def is_loading(self) -> bool:
        return bool(self.loading) and any(job.is_pending for job in self.loading)

    @property
    def has_failed(self) -> bool:
        return bool(self.loading) and any(job.has_failed for job in self.loading)


@dataclass(frozen=True, slots=True)
class PrefixReport:
    """What was stored of a prefix, in tokens by tier, and what an action on it came to."""

    num_device_tokens: int = 0
    num_host_tokens: int = 0
    num_disk_tokens: int = 0
    num_blocks_changed: int = 0
    num_blocks_left: int = 0  # would have been, but a request or a transfer holds them


class Cache(Protocol):
    """Blocks for requests: match, acquire, allocate, commit, release.

    Every block is free, private to one lease, or owned by the cache; one owned by the cache is
    never written. Token ids are 1-D int32 arrays. A lease is used with the cache that issued it,
    and not after its release (AssertionError).
    """

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        ...

    def match(self, place: Place, token_ids: TokenIds) -> PrefixMatch:
        """The longest stored prefix. Changes nothing, so it may be asked at every step.

        Leave the last prompt token out if it has to be computed in any case.
        """
        ...

    def acquire(self, match: PrefixMatch, bonus_s: float = 0.0, tenant: str = "") -> Lease:
        """Lock exactly the matched blocks (and the partial one); they head the block table.

        A match that is older than the last change of the cache is made afresh first. Blocks of
        lower tiers are left out where computing them again is quicker than loading. ``bonus_s``:
        the blocks of this lease stand as if they were used that many seconds later. What it stores
        is charged to ``tenant``.
        """
        ...

    def allocate(self, lease: Lease, num_tokens: int, num_lookahead_tokens: int = 0) -> bool:
        """Grow the block table to cover ``num_tokens`` + ``num_lookahead_tokens`` tokens.

        Evicts what is missing, never what is locked. All or nothing: False if there is not
        enough, and then the lease has not changed; if ``is_room_coming``, asking again once a
        transfer has ended may succeed. The first success starts the promotion of the matched
        blocks that are not on the device, and sets ``lease.pending_copy`` if the match had a
        partial block.
        """
        ...

    def has_room(self, num_blocks: int, tenant: str, *, at_others_cost: bool) -> bool:
        """Whether so many blocks of the device are free or can be evicted; ``at_others_cost``: even
        if other tenants are left with less than their part. Changes nothing."""
        ...

    @property
    def has_transfers(self) -> bool:
        """Whether copies between tiers are under way."""
        ...

    @property
    def is_room_coming(self) -> bool:
        """Whether some of these will free blocks when they end."""
        ...

    @property
    def is_saving(self) -> bool:
        """Whether transfers are under way, or stored blocks are still to be copied to the disk."""
        ...

    def advance(self) -> None:
        """Take note of transfers that have ended, and begin what is due. Between steps; cheap."""
        ...

    def copied(self, lease: Lease) -> None:
        """``lease.pending_copy`` has been executed; its source need not be kept any longer."""
        ...

    def commit(self, lease: Lease, token_ids: TokenIds, num_computed_tokens: int) -> None:
        """Share the full blocks among the first ``num_computed_tokens`` of ``token_ids``.

        Only after the step that computed them has ended. Cheap when no block has become full
        since the last call. Ownership moves to the cache; a block that another request
        committed first stays private to the lease until its release. A pending copy has to be
        reported with ``copied`` before (AssertionError).
        """
        ...

    def release(self, lease: Lease, token_ids: TokenIds, num_computed_tokens: int) -> None:
        """End the lease: commit, keep the partly filled last block too, unlock, free the rest.

        Of ``token_ids`` only the first ``num_computed_tokens`` count, and if the pending copy was
        never reported, only those of the matched whole blocks.
        """
        ...

    def continuation(self, lease: Lease, token_ids: TokenIds, max_num_tokens: int) -> TokenIds:
        """What is stored behind ``token_ids``, the lease's own tokens: at most ``max_num_tokens``.

        Of the lease's namespace, in whatever tier, and of several paths the most recently used
        one. Changes nothing. Cheap: the lock that a lease holds is where the search begins.
        """
        ...

    def departed(self, hashes: BlockHashes, first: int) -> DepartedPrefix | None:
        """What was stored once of the blocks named ``hashes``, from ``first`` on, and why it went;
        None where that block is not remembered. Changes nothing."""
        ...

    def reset(self) -> int:
        """Drop every block that is not locked, in all tiers; the number dropped."""
        ...

    def inspect(self, namespace: Namespace, token_ids: TokenIds) -> PrefixReport:
        """Where the stored prefix of ``token_ids`` is."""
        ...

    def prefetch(self, namespace: Namespace, token_ids: TokenIds) -> PrefixReport:
        """Begin to promote the stored prefix, if that pays and there is room."""
        ...

    def demote(
        self, namespace: Namespace, token_ids: TokenIds, keep_num_tokens: int
    ) -> PrefixReport:
        """Take the stored prefix beyond ``keep_num_tokens`` off the device, into a lower tier.

        What other prefixes share stays, and all of it where there is no lower tier.
        """
        ...

    def drop(self, namespace: Namespace, token_ids: TokenIds, keep_num_tokens: int) -> PrefixReport:
        """Drop the stored prefix beyond ``keep_num_tokens`` from every tier, but not what other
        prefixes share."""
        ...

    def set_tenant_limits(self, limits: Mapping[str, TenantLimits]) -> None:
        """From now on these hold and no others; what is beyond a cap goes, unless it is locked."""
        ...

    def tenant_usage(self) -> Sequence[TenantBlocks]:
        """Of the tenants that have something."""
        ...

    def take_events(self) -> Sequence[CacheEvent]:
        """What was stored and removed since the last call."""
        ...

    def snapshot(self) -> Sequence[CacheEvent]:
        """Events that tell a new listener all that is stored. Walks the whole tree."""
        ...

    def stats(self) -> CacheStats: ...

    def history(self) -> BlockHistory: ...

    def check_integrity(self, leases: Collection[Lease]) -> None:
        """Assert the ownership of every block, given all the leases in use."""
        ...
