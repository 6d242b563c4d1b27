"""What a worker reports of itself with its frames: gauges, and counters since its epoch began.

Owns their names. Knows nothing of how they are gathered or shown. Exported by
:mod:`model_worker.protocol`, as all that crosses a link.
"""

from __future__ import annotations

import msgspec

from cache_store.events import Tier
from cache_store.stats import AGE_BOUNDS_S

__all__ = [
    "AGE_BOUNDS_S",
    "MAX_REPORTED_TENANTS",
    "Ages",
    "BlockReport",
    "TenantUsage",
    "TierReport",
    "WorkerStats",
]

# The largest by their blocks; a worker of many tenants does not send all of them with each frame.
MAX_REPORTED_TENANTS = 64


class TierReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tier below the device, in blocks; see cache_store.stats.TierStats."""

    tier: Tier
    num_blocks: int = 0
    num_cached: int = 0
    promoted_total: int = 0
    stored_total: int = 0
    dropped_total: int = 0
    failed_total: int = 0
    loads_total: int = 0
    recomputes_total: int = 0
    load_s_total: float = 0.0
    recompute_s_total: float = 0.0
    load_block_s: float | None = None
    block_bytes: int = 0  # what one block takes here
    demoted_total: int = 0
    corrupt_total: int = 0
    promoted_s_total: float = 0.0
    stored_s_total: float = 0.0
    demoted_s_total: float = 0.0
    eviction_s_total: float = 0.0


class Ages(msgspec.Struct, frozen=True, array_like=True):
    """Of blocks: how many were how old, by AGE_BOUNDS_S, and what their ages come to in seconds."""

    counts: tuple[int, ...] = ()
    sum_s: float = 0.0


class BlockReport(msgspec.Struct, frozen=True, array_like=True):
    """What became of blocks, of the device and in all; see cache_store.stats.BlockHistory."""

    block_bytes: int = 0  # what one block takes on the device
    dropped_total: int = 0  # left the device for none
    demoted_total: int = 0  # left it for a lower tier
    demoted_s_total: float = 0.0
    eviction_s_total: float = 0.0
    lifetime: Ages = Ages()  # at eviction
    idle: Ages = Ages()  # since the last use, at eviction
    reuse_gap: Ages = Ages()


class TenantUsage(msgspec.Struct, frozen=True, array_like=True):
    """What one tenant has: requests, and the blocks that are charged to it in each tier."""

    tenant: str
    num_running: int = 0
    num_waiting: int = 0
    num_device_blocks: int = 0
    num_host_blocks: int = 0
    num_disk_blocks: int = 0


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Gauges, and counters since the epoch began (``*_total``)."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_evictable_blocks: int = 0
    num_locked_blocks: int = 0  # held by running requests, tree-owned or private
    prompt_tokens_computed_total: int = 0
    generated_tokens_total: int = 0
    preemptions_total: int = 0
    coalesced_requests_total: int = 0
    evicted_blocks_total: int = 0
    steps_total: int = 0
    step_s: float = 0.0  # duration of the last step
    num_transfers: int = 0  # between tiers, under way
    tiers: tuple[TierReport, ...] = ()  # those below the device that exist
    num_draft_tokens_total: int = 0  # guesses of tokens to come that were verified
    num_accepted_tokens_total: int = 0  # of these, those that became part of an answer
    tenants: tuple[TenantUsage, ...] = ()  # at most MAX_REPORTED_TENANTS; a second old at most
    prefill_token_s: float | None = None  # what a prefill token adds to a step; None: not measured
    blocks: BlockReport = BlockReport()  # some steps old at most
