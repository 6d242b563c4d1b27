"""What workers report of themselves, as metrics: read when scraped, never falling.

Owns the names of these metrics; those of tiers and blocks are service.block_metrics'. Knows nothing
of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from service.block_metrics import block_families
from service.life_counters import LifeCounters, WorkerReading

__all__ = ["QueueReading", "WorkerCollector"]

_Families = Iterator[Metric]

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


@dataclass(frozen=True, slots=True)
class QueueReading:
    num_queued: int
    num_in_flight: int
    limit: int = 0  # as many may wait


class WorkerCollector(Collector):
    """Gauges read when scraped, and workers' counters kept from falling when one starts again."""

    def __init__(
        self,
        workers: Callable[[], Sequence[WorkerReading]],
        queue: Callable[[], QueueReading],
    ) -> None:
        self._workers = workers
        self._queue = queue
        self._counters = LifeCounters()

    def collect(self) -> _Families:
        workers = self._workers()
        yield from self._gauges(workers)
        for field, name, text in _COUNTERS:
            family = CounterMetricFamily(f"headstart_{name}", text, labels=["worker"])
            for worker in workers:
                total = self._counters.total(worker, getattr(worker.stats, field), field)
                family.add_metric([worker.worker_id], total)
            yield family
        yield from block_families(workers, self._counters)

    def _gauges(self, workers: Sequence[WorkerReading]) -> _Families:
        queue = self._queue()
        for name, text, value in (
            ("requests_queued", "Requests that wait for their first token.", queue.num_queued),
            ("requests_in_flight", "Requests let in and not ended.", queue.num_in_flight),
            ("requests_queue_limit", "As many may wait: --max-queue.", queue.limit),
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
        speed = GaugeMetricFamily(
            "headstart_prefill_token_seconds",
            "What a prefill token adds to a step, as measured of late.",
            labels=["worker"],
        )
        for worker in workers:
            stats = worker.stats
            if stats.prefill_token_s is not None:
                speed.add_metric([worker.worker_id], stats.prefill_token_s)
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
        yield speed
