"""Counts of a cache at one moment. Owns their names; knows nothing of how they are reported."""

from __future__ import annotations

from dataclasses import dataclass

from cache_store.events import Tier


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier: blocks now, and counters of blocks and of decisions since the start.

    ``loads_total`` and ``recomputes_total`` count hits in this tier by what was decided for them;
    the two ``*_s_total`` are the seconds that loading and computing were estimated to take, over
    all of these hits. ``load_block_s`` is the estimate for one block now, None before the first.
    """

    tier: Tier
    num_blocks: int
    num_cached: int
    promoted_total: int  # came back to the device from here
    stored_total: int  # were copied into this tier
    dropped_total: int  # left this tier for none
    failed_total: int  # could not be read or written here
    loads_total: int
    recomputes_total: int
    load_s_total: float
    recompute_s_total: float
    load_block_s: float | None


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Blocks of the device by state, and counters since the cache was made (``*_total``).

    ``num_blocks`` = ``num_free`` + ``num_evictable`` + ``num_locked``; what is locked is either
    private to a lease, owned by the tree on the path of one, or the end of a transfer. ``tiers``
    are those below the device.
    """

    num_blocks: int
    num_free: int
    num_evictable: int
    num_locked: int
    num_cached: int  # owned by the tree, evictable or locked
    num_leases: int
    num_namespaces: int
    num_free_runs: int
    stored_total: int  # blocks that entered the tree
    evicted_total: int  # blocks dropped to make room
    num_transfers: int = 0
    tiers: tuple[TierStats, ...] = ()


@dataclass(slots=True)
class TierCounters:
    """Blocks since the start, by what became of them."""

    promoted: int = 0  # came back from this tier
    stored: int = 0  # were copied into this tier
    dropped: int = 0  # left this tier and are in no lower one
    failed: int = 0  # did not come back, or could not be stored
    loads: int = 0  # hits, decided for loading
    recomputes: int = 0  # hits, decided for computing
    load_s: float = 0.0  # estimated for the hits of both kinds
    recompute_s: float = 0.0
