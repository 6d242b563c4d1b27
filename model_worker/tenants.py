"""What the worker's parts are told of tenants, and what is told of them.

Owns the step from policies in bytes to limits in blocks, and the report of who has what. Knows
nothing of turns or of whose blocks go.
"""

from __future__ import annotations

from collections.abc import Mapping

from cache_store.cache import Cache
from cache_store.events import Tier
from cache_store.tenant_shares import TenantLimits
from model_worker.fair_queue import FairQueue
from model_worker.protocol import MAX_REPORTED_TENANTS, TenantPolicy, TenantUsage

REPORT_STEPS = 16  # it is made anew after so many, since a step is not to pay for all tenants


def tenant_limits(policy: TenantPolicy, block_bytes: Mapping[Tier, int]) -> TenantLimits:
    """Whole blocks, in the tiers that there are."""
    caps = {
        Tier.DEVICE: policy.max_device_bytes,
        Tier.HOST: policy.max_host_bytes,
        Tier.DISK: policy.max_disk_bytes,
    }
    max_blocks = {
        tier: max(cap, 0) // block_bytes[tier]
        for tier, cap in caps.items()
        if cap is not None and tier in block_bytes
    }
    return TenantLimits(policy.weight, max_blocks)


class TenantReport:
    def __init__(self, fair: FairQueue, cache: Cache) -> None:
        self._fair = fair
        self._cache = cache
        self._usage: tuple[TenantUsage, ...] = ()
        self._next_step = 0

    def usage(self, num_steps: int) -> tuple[TenantUsage, ...]:
        """The tenants that hold most, at most MAX_REPORTED_TENANTS, as of some steps ago; none
        where no tenant has a name. ``num_steps``: made so far."""
        if num_steps >= self._next_step:
            self._next_step = num_steps + REPORT_STEPS
            self._usage = self._make()
        return self._usage

    def _make(self) -> tuple[TenantUsage, ...]:
        blocks = {each.tenant: each.num_blocks for each in self._cache.tenant_usage()}
        requests = {each.tenant: each for each in self._fair.accounts()}
        tenants = blocks.keys() | requests.keys()
        if tenants <= {""}:
            return ()
        usage = [
            TenantUsage(
                tenant,
                requests[tenant].num_running if tenant in requests else 0,
                requests[tenant].num_waiting if tenant in requests else 0,
                *(blocks.get(tenant, {}).get(tier, 0) for tier in Tier),
            )
            for tenant in tenants
        ]
        usage.sort(key=_size, reverse=True)
        return tuple(usage[:MAX_REPORTED_TENANTS])


def _size(usage: TenantUsage) -> tuple[int, int, str]:
    num_blocks = usage.num_device_blocks + usage.num_host_blocks + usage.num_disk_blocks
    return num_blocks, usage.num_running + usage.num_waiting, usage.tenant
