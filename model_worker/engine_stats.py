"""What the engine reports of itself with every step.

Owns what is read at each step, which is a handful of counters, and what is read now and then
because it takes longer. Knows nothing of how it travels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cache_store.cache import Cache
from cache_store.events import Tier
from cache_store.stats import AgeCounts, BlockHistory, TierStats
from model_worker.protocol import Ages, BlockReport, TierReport, WorkerStats
from model_worker.scheduler import Scheduler
from model_worker.step_costs import StepCosts
from model_worker.tenants import TenantReport

# What takes longer is read anew after so many steps, and when there is nothing left to do.
REPORT_STEPS = 16


class EngineStats:
    def __init__(
        self,
        scheduler: Scheduler,
        cache: Cache,
        costs: StepCosts,
        block_bytes: Mapping[Tier, int],
        num_preparing: Callable[[], int],
    ) -> None:
        """``block_bytes`` of the tiers that there are. ``num_preparing`` tells of requests that no
        scheduler knows of yet."""
        self._scheduler = scheduler
        self._cache = cache
        self._costs = costs
        self._block_bytes = block_bytes
        self._num_preparing = num_preparing
        self._tenants = TenantReport(scheduler.fair, cache)
        self._blocks = BlockReport()
        self._next_step = 0

    def read(self, num_steps: int, step_s: float, *, is_idle: bool) -> WorkerStats:
        """After ``num_steps`` steps, of which the last took ``step_s`` seconds."""
        blocks = self._cache.stats()
        counters = self._scheduler.counters
        if is_idle or num_steps >= self._next_step:
            self._next_step = num_steps + REPORT_STEPS
            self._blocks = self._block_report(self._cache.history())
        return WorkerStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting + self._num_preparing(),
            num_blocks=blocks.num_blocks,
            num_free_blocks=blocks.num_free,
            num_evictable_blocks=blocks.num_evictable,
            num_locked_blocks=blocks.num_locked,
            prompt_tokens_computed_total=counters.prompt_tokens_computed,
            generated_tokens_total=counters.generated_tokens,
            preemptions_total=counters.preemptions,
            coalesced_requests_total=counters.coalesced_requests,
            evicted_blocks_total=blocks.evicted_total,
            steps_total=num_steps,
            step_s=step_s,
            num_transfers=blocks.num_transfers,
            tiers=tuple(self._tier_report(tier) for tier in blocks.tiers),
            num_draft_tokens_total=counters.draft_tokens,
            num_accepted_tokens_total=counters.accepted_tokens,
            tenants=self._tenants.usage(num_steps),
            prefill_token_s=self._costs.prefill_token_s,
            blocks=self._blocks,
        )

    def _tier_report(self, tier: TierStats) -> TierReport:
        named = {name: getattr(tier, name) for name in _TIER_FIELDS}
        return TierReport(**named, block_bytes=self._block_bytes.get(tier.tier, 0))

    def _block_report(self, history: BlockHistory) -> BlockReport:
        return BlockReport(
            block_bytes=self._block_bytes.get(Tier.DEVICE, 0),
            dropped_total=history.dropped_total,
            demoted_total=history.demoted_total,
            demoted_s_total=history.demoted_s_total,
            eviction_s_total=history.eviction_s_total,
            lifetime=_ages(history.lifetime),
            idle=_ages(history.idle),
            reuse_gap=_ages(history.reuse_gap),
        )


_TIER_FIELDS = tuple(name for name in TierReport.__struct_fields__ if name != "block_bytes")


def _ages(ages: AgeCounts) -> Ages:
    return Ages(ages.counts, ages.sum_s)
