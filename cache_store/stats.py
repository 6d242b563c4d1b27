"""Counts of a cache at one moment. Owns their names; knows nothing of how they are reported."""

from __future__ import annotations

from dataclasses import dataclass

from cache_store.events import Tier

# Upper bounds of the ages of blocks that are counted together, in seconds.
AGE_BOUNDS_S = (0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 14400, 86400)


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
    demoted_total: int = 0  # left this tier for a lower one
    corrupt_total: int = 0  # of the failed ones, those that were not what had been written
    promoted_s_total: float = 0.0  # from the order to its end, of all transfers of that kind
    stored_s_total: float = 0.0
    demoted_s_total: float = 0.0
    eviction_s_total: float = 0.0  # of the engine's own time, to make room here


@dataclass(frozen=True, slots=True)
class AgeCounts:
    """How many blocks were how old: one count for each of AGE_BOUNDS_S, and one for what is
    older than all of them; and the sum of their ages in seconds."""

    counts: tuple[int, ...] = ()
    sum_s: float = 0.0


@dataclass(frozen=True, slots=True)
class BlockHistory:
    """What became of blocks since the cache was made: of those on the device how many left it, and
    how old they came to be, whichever tier they were in last."""

    dropped_total: int = 0  # left the device for none
    demoted_total: int = 0  # left the device for a lower tier
    demoted_s_total: float = 0.0
    eviction_s_total: float = 0.0
    lifetime: AgeCounts = AgeCounts()  # from storing to eviction
    idle: AgeCounts = AgeCounts()  # from the last use to eviction
    reuse_gap: AgeCounts = AgeCounts()  # between two uses


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
    """Blocks since the start, by what became of them, and the time that it took."""

    promoted: int = 0  # came back from this tier
    stored: int = 0  # were copied into this tier
    dropped: int = 0  # left this tier and are in no lower one
    failed: int = 0  # did not come back, or could not be stored
    loads: int = 0  # hits, decided for loading
    recomputes: int = 0  # hits, decided for computing
    load_s: float = 0.0  # estimated for the hits of both kinds
    recompute_s: float = 0.0
    demoted: int = 0  # left this tier for a lower one
    corrupt: int = 0  # of the failed ones, those that were not what had been written
    promoted_s: float = 0.0  # of transfers from here to the device
    stored_s: float = 0.0  # of transfers to here
    demoted_s: float = 0.0  # of transfers from here that make room
    eviction_ns: int = 0  # of the engine's own time, to make room here
