"""What workers report of themselves, as metrics: read when scraped, never falling.

Owns the names of these metrics and what a worker's earlier lives came to. Knows nothing of
requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from model_worker.protocol import TierReport, WorkerStats

__all__ = ["QueueReading", "WorkerCollector", "WorkerReading"]

_Families = Iterator[GaugeMetricFamily | CounterMetricFamily]

_COUNTERS = (  # field of WorkerStats, name, what it counts
    ("preemptions_total", "num_preemptions", "Requests preempted under memory pressure."),
    ("prompt_tokens_computed_total", "prompt_tokens_computed", "Prompt tokens prefilled."),
    ("generated_tokens_total", "worker_generated_tokens", "Tokens a worker has sampled."),
    (
        "coalesced_requests_total",
        "coalesced_requests",
        "Requests that waited for another's prefix.",
    ),
    ("evicted_blocks_total", "evicted_blocks", "KV blocks evicted."),
    ("steps_total", "engine_steps", "Steps the engine has made."),
    (
        "num_draft_tokens_total",
        "spec_decode_num_draft_tokens",
        "Guesses of tokens to come that a worker has verified.",
    ),
    (
        "num_accepted_tokens_total",
        "spec_decode_num_accepted_tokens",
        "Guesses that were right and became part of an answer.",
    ),
)
_TIER_COUNTERS = (  # field of TierReport, name, what it counts
    ("promoted_total", "tier_promoted_blocks", "Blocks that came back to the device from a tier."),
    ("stored_total", "tier_stored_blocks", "Blocks that were copied into a tier."),
    ("dropped_total", "tier_dropped_blocks", "Blocks that left a tier and are in no lower one."),
    ("failed_total", "tier_failed_blocks", "Blocks that could not be read from or put in a tier."),
)


@dataclass(frozen=True, slots=True)
class WorkerReading:
    worker_id: str
    epoch: int  # of the worker's life that the counters are of
    is_ready: bool
    stats: WorkerStats


@dataclass(frozen=True, slots=True)
class QueueReading:
    num_queued: int
    num_in_flight: int


class _MonotonicCounter:
    """One counter of one worker, over all of its lives. Kept from falling."""

    def __init__(self) -> None:
        self._epoch = 0
        self._earlier = 0.0  # what the lives before this one came to
        self._current = 0.0

    def take(self, epoch: int, value: float) -> float:
        """The total, given a reading. A lower one of the same life is no reset: while a worker is
        lost, and until its first report on a new link, it reads as zero."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._earlier += self._current
            self._current = 0.0
        self._current = max(self._current, value)
        return self._earlier + self._current


class WorkerCollector(Collector):
    """Gauges read when scraped, and workers' counters kept from falling when one starts again.

    A tier's are there while its worker reports it.
    """

    def __init__(
        self,
        workers: Callable[[], Sequence[WorkerReading]],
        queue: Callable[[], QueueReading],
    ) -> None:
        self._workers = workers
        self._queue = queue
        self._counters: defaultdict[tuple[str, ...], _MonotonicCounter] = defaultdict(
            _MonotonicCounter
        )

    def collect(self) -> _Families:
        workers = self._workers()
        yield from self._gauges(workers)
        for field, name, text in _COUNTERS:
            family = CounterMetricFamily(f"headstart_{name}", text, labels=["worker"])
            for worker in workers:
                total = self._total(worker, getattr(worker.stats, field), field)
                family.add_metric([worker.worker_id], total)
            yield family
        yield from _tier_gauges(workers)
        yield from self._tier_counters(workers)

    def _total(self, worker: WorkerReading, value: float, *field: str) -> float:
        return self._counters[worker.worker_id, *field].take(worker.epoch, value)

    def _gauges(self, workers: Sequence[WorkerReading]) -> _Families:
        queue = self._queue()
        for name, text, value in (
            ("requests_queued", "Requests that wait for their first token.", queue.num_queued),
            ("requests_in_flight", "Requests let in and not ended.", queue.num_in_flight),
        ):
            yield GaugeMetricFamily(f"headstart_{name}", text, value=value)
        blocks = GaugeMetricFamily(
            "headstart_kv_cache_blocks", "KV blocks by state.", labels=["worker", "state"]
        )
        per_worker = [
            GaugeMetricFamily(f"headstart_{name}", text, labels=["worker"])
            for name, text in (
                ("num_requests_running", "Requests the worker computes for."),
                ("num_requests_waiting", "Requests that wait in the worker."),
                ("kv_cache_usage_perc", "Share of KV blocks held by running requests, 0 to 1."),
                ("num_transfers", "Copies between tiers that are under way."),
                ("worker_ready", "1 if the worker takes requests."),
            )
        ]
        for worker in workers:
            stats = worker.stats
            usage = stats.num_locked_blocks / stats.num_blocks if stats.num_blocks else 0.0
            readings = (
                *(stats.num_running, stats.num_waiting, usage),
                *(stats.num_transfers, float(worker.is_ready)),
            )
            for family, reading in zip(per_worker, readings, strict=True):
                family.add_metric([worker.worker_id], reading)
            for state, count in (
                ("free", stats.num_free_blocks),
                ("evictable", stats.num_evictable_blocks),
                ("locked", stats.num_locked_blocks),
                ("total", stats.num_blocks),
            ):
                blocks.add_metric([worker.worker_id, state], count)
        yield from per_worker
        yield blocks

    def _tier_counters(self, workers: Sequence[WorkerReading]) -> _Families:
        for field, name, text in _TIER_COUNTERS:
            family = CounterMetricFamily(f"headstart_{name}", text, labels=["worker", "tier"])
            for worker, tier in _tiers(workers):
                total = self._total(worker, getattr(tier, field), tier.tier.value, field)
                family.add_metric([worker.worker_id, tier.tier.value], total)
            yield family
        for name, text, load, recompute in (
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
        ):
            labels = ["worker", "tier", "decision"]
            family = CounterMetricFamily(f"headstart_{name}", text, labels=labels)
            for worker, tier in _tiers(workers):
                for decision, field in (("load", load), ("recompute", recompute)):
                    total = self._total(worker, getattr(tier, field), tier.tier.value, field)
                    family.add_metric([worker.worker_id, tier.tier.value, decision], total)
            yield family


def _tier_gauges(workers: Sequence[WorkerReading]) -> _Families:
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
    for worker, tier in _tiers(workers):
        labels = [worker.worker_id, tier.tier.value]
        blocks.add_metric([*labels, "cached"], tier.num_cached)
        blocks.add_metric([*labels, "total"], tier.num_blocks)
        if tier.load_block_s is not None:
            speed.add_metric(labels, tier.load_block_s)
    yield blocks
    yield speed


def _tiers(workers: Sequence[WorkerReading]) -> Iterator[tuple[WorkerReading, TierReport]]:
    return ((worker, tier) for worker in workers for tier in worker.stats.tiers)
