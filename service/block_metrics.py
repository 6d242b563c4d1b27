"""What became of workers' blocks, as metrics: by tier, and how old they came to be.

Owns the names of these metrics. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric

from cache_store.events import Tier
from model_worker.protocol import AGE_BOUNDS_S, Ages, TierReport
from service.life_counters import LifeCounters, WorkerReading

__all__ = ["block_families"]

# Of lower tiers and of the device: what happened to blocks, name and text of the counter.
_LOWER, _ANY = ("host", "disk"), ("device", "host", "disk")
_COUNTERS = (  # field of a report, name, what it counts, the tiers that have it
    (
        "promoted_total",
        "tier_promoted_blocks",
        "Blocks that came back to the device from a tier.",
        _LOWER,
    ),
    ("stored_total", "tier_stored_blocks", "Blocks that were copied into a tier.", _LOWER),
    ("demoted_total", "tier_demoted_blocks", "Blocks that left a tier for a lower one.", _ANY),
    (
        "dropped_total",
        "tier_dropped_blocks",
        "Blocks that left a tier and are in no lower one.",
        _ANY,
    ),
    (
        "failed_total",
        "tier_failed_blocks",
        "Blocks that could not be read from or put in a tier.",
        _LOWER,
    ),
    (
        "corrupt_total",
        "tier_corrupt_blocks",
        "Blocks that were not what had been written when they were read.",
        _LOWER,
    ),
    (
        "eviction_s_total",
        "tier_eviction_seconds",
        "The engine's own time to make room in a tier.",
        _ANY,
    ),
)
_MOVES = (  # label, field of blocks, field of seconds, the tiers that have it
    ("promoted", "promoted_total", "promoted_s_total", _LOWER),
    ("stored", "stored_total", "stored_s_total", _LOWER),
    ("demoted", "demoted_total", "demoted_s_total", _ANY),
    ("dropped", "dropped_total", None, _ANY),
)
_DECISIONS = (  # name, what it counts, field of either decision
    (
        "tier_load_decisions",
        "Hits in a tier, by whether their blocks were loaded or computed again.",
        *("loads_total", "recomputes_total"),
    ),
    (
        "tier_load_estimate_seconds",
        "What these hits were estimated to take: all of them loaded, all of them computed.",
        *("load_s_total", "recompute_s_total"),
    ),
)
_AGES = (  # field of BlockReport, name, what it counts
    ("lifetime", "block_lifetime_seconds", "Age of blocks when they were evicted."),
    ("idle", "block_idle_before_evict_seconds", "Time since their last use of evicted blocks."),
    ("reuse_gap", "block_reuse_gap_seconds", "Time between two uses of a block."),
)
_Tiers = Sequence[tuple[WorkerReading, TierReport]]


def block_families(workers: Sequence[WorkerReading], counters: LifeCounters) -> Iterator[Metric]:
    """A lower tier's are there while its worker reports it."""
    lower = [(worker, tier) for worker in workers for tier in worker.stats.tiers]
    every = [(worker, _of_device(worker)) for worker in workers] + lower
    yield from _gauges(lower)
    yield from _counters(every, counters)
    yield from _moves(every, counters)
    yield from _decisions(lower, counters)
    yield from _ages(workers, counters)


def _of_device(worker: WorkerReading) -> TierReport:
    blocks = worker.stats.blocks
    return TierReport(
        tier=Tier.DEVICE,
        block_bytes=blocks.block_bytes,
        dropped_total=blocks.dropped_total,
        demoted_total=blocks.demoted_total,
        demoted_s_total=blocks.demoted_s_total,
        eviction_s_total=blocks.eviction_s_total,
    )


def _gauges(tiers: _Tiers) -> Iterator[Metric]:
    blocks = GaugeMetricFamily(
        "headstart_tier_blocks",
        "Blocks of a tier below the device.",
        labels=["worker", "tier", "state"],
    )
    speed = GaugeMetricFamily(
        "headstart_tier_load_block_seconds",
        "What loading one block from a tier is estimated to take now.",
        labels=["worker", "tier"],
    )
    for worker, tier in tiers:
        labels = [worker.worker_id, tier.tier.value]
        blocks.add_metric([*labels, "cached"], tier.num_cached)
        blocks.add_metric([*labels, "total"], tier.num_blocks)
        if tier.load_block_s is not None:
            speed.add_metric(labels, tier.load_block_s)
    yield blocks
    yield speed


def _counters(tiers: _Tiers, counters: LifeCounters) -> Iterator[Metric]:
    for field, name, text, having in _COUNTERS:
        family = CounterMetricFamily(f"headstart_{name}", text, labels=["worker", "tier"])
        for worker, tier in tiers:
            if tier.tier.value in having:
                total = counters.total(worker, getattr(tier, field), tier.tier.value, field)
                family.add_metric([worker.worker_id, tier.tier.value], total)
        yield family


def _moves(tiers: _Tiers, counters: LifeCounters) -> Iterator[Metric]:
    labels = ["worker", "tier", "move"]
    moved = CounterMetricFamily(
        "headstart_tier_moved_bytes",
        "Bytes of the blocks that moved, by the tier they came from or were copied into.",
        labels=labels,
    )
    took = CounterMetricFamily(
        "headstart_tier_move_seconds", "From the order of these copies to their end.", labels=labels
    )
    for worker, tier in tiers:
        for move, blocks, seconds, having in _MOVES:
            if tier.tier.value not in having:
                continue
            values = [worker.worker_id, tier.tier.value, move]
            num_bytes = getattr(tier, blocks) * tier.block_bytes
            moved.add_metric(values, counters.total(worker, num_bytes, *values[1:], "bytes"))
            if seconds is not None:
                taken = getattr(tier, seconds)
                took.add_metric(values, counters.total(worker, taken, *values[1:], "seconds"))
    yield moved
    yield took


def _decisions(tiers: _Tiers, counters: LifeCounters) -> Iterator[Metric]:
    for name, text, load, recompute in _DECISIONS:
        labels = ["worker", "tier", "decision"]
        family = CounterMetricFamily(f"headstart_{name}", text, labels=labels)
        for worker, tier in tiers:
            for decision, field in (("load", load), ("recompute", recompute)):
                total = counters.total(worker, getattr(tier, field), tier.tier.value, field)
                family.add_metric([worker.worker_id, tier.tier.value, decision], total)
        yield family


def _ages(workers: Sequence[WorkerReading], counters: LifeCounters) -> Iterator[Metric]:
    bounds = [*map(str, map(float, AGE_BOUNDS_S)), "+Inf"]
    for field, name, text in _AGES:
        family = HistogramMetricFamily(f"headstart_{name}", text, labels=["worker"])
        for worker in workers:
            ages: Ages = getattr(worker.stats.blocks, field)
            counts = ages.counts if len(ages.counts) == len(bounds) else (0,) * len(bounds)
            totals = [
                counters.total(worker, count, field, bound)
                for count, bound in zip(counts, bounds, strict=True)
            ]
            sum_s = counters.total(worker, ages.sum_s, field, "sum")
            buckets = list(zip(bounds, accumulate(totals), strict=True))
            family.add_metric([worker.worker_id], buckets, sum_value=sum_s)
        yield family
