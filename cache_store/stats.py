"""Counts of a cache at one moment. Owns their names; knows nothing of how they are reported."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Blocks by state, and counters since the cache was made (``*_total``).

    ``num_blocks`` = ``num_free`` + ``num_evictable`` + ``num_locked``; what is locked is either
    private to a lease or owned by the tree on the path of one.
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
