"""What is counted of a request, once each, and the figures over recent windows."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from cache_store.events import Tier
from model_worker.protocol import TierReport, WorkerStats
from service.metrics import GatewayMetrics
from service.recent import HitRate, Percentiles, RecentSamples, percentiles
from service.worker_metrics import QueueReading, WorkerReading


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Bench:
    """Metrics with a clock and workers to be set."""

    clock: Clock = field(default_factory=Clock)
    workers: list[WorkerReading] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.metrics = GatewayMetrics(lambda: self.workers, lambda: QueueReading(3, 5), self.clock)

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"headstart_{name}", labels)


def test_a_request_from_body_to_end() -> None:
    bench = Bench()
    recorder = bench.metrics.record(40, received_at=100.0)
    recorder.admitted(32, queue_s=0.5)
    recorder.admitted(32, queue_s=0.5)  # again, as after a preemption: not counted
    for seconds in (1.0, 0.1, 0.1):
        bench.clock.now += seconds
        recorder.tokens(1)
        recorder.text()
    recorder.end("length")
    recorder.end("abort")
    assert bench.value("prefix_cache_queries_total") == 40
    assert bench.value("prefix_cache_hits_total") == 32
    assert bench.value("prompt_tokens_cached_total", source="device") == 32
    assert bench.value("prompt_tokens_cached_total", source="host") == 0
    assert bench.value("generation_tokens_total") == 3
    assert bench.value("time_to_first_token_seconds_sum", cache="hit") == pytest.approx(1.0)
    assert bench.value("time_to_first_token_seconds_count", cache="hit") == 1
    assert bench.value("time_to_first_token_seconds_count", cache="miss") == 0
    assert bench.value("inter_token_latency_seconds_count") == 2
    assert bench.value("inter_token_latency_seconds_sum") == pytest.approx(0.2)
    assert bench.value("request_queue_time_seconds_sum") == 0.5
    assert bench.value("e2e_request_latency_seconds_sum") == pytest.approx(1.2)
    assert bench.value("requests_total", outcome="length") == 1
    assert bench.value("requests_total", outcome="abort") == 0


def test_cached_tokens_are_counted_by_the_tier_they_came_from() -> None:
    bench = Bench()
    recorder = bench.metrics.record(100, received_at=100.0)
    recorder.admitted(80, queue_s=0.0, num_host_tokens=30, num_disk_tokens=40)
    recorder.admitted(80, queue_s=0.0, num_host_tokens=80)
    tokens = [
        bench.value("prompt_tokens_cached_total", source=source)
        for source in ("device", "host", "disk")
    ]
    assert tokens == [10, 30, 40]
    assert bench.value("prefix_cache_hits_total") == 80


def test_tokens_that_come_together_count_one_interval_each() -> None:
    bench = Bench()
    recorder = bench.metrics.record(1, received_at=100.0)
    recorder.tokens(2)
    bench.clock.now += 0.3
    recorder.tokens(3)
    assert bench.value("inter_token_latency_seconds_count") == 4
    assert bench.value("inter_token_latency_seconds_sum") == pytest.approx(0.3)


def test_an_aborted_request_has_no_latency() -> None:
    bench = Bench()
    bench.metrics.record(1, received_at=100.0).end("abort")
    assert bench.value("e2e_request_latency_seconds_count") == 0
    assert bench.value("time_to_first_token_seconds_count", cache="miss") == 0


def test_gauges_are_read_when_scraped() -> None:
    bench = Bench()
    stats = WorkerStats(
        num_running=2, num_waiting=1, num_blocks=10, num_free_blocks=3,
        num_evictable_blocks=2, num_locked_blocks=5,
    )  # fmt: skip
    bench.workers = [WorkerReading("w", 1, True, stats)]
    assert bench.value("num_requests_running", worker="w") == 2
    assert bench.value("num_requests_waiting", worker="w") == 1
    assert bench.value("kv_cache_usage_perc", worker="w") == 0.5
    assert bench.value("kv_cache_blocks", worker="w", state="evictable") == 2
    assert bench.value("worker_ready", worker="w") == 1
    assert bench.value("requests_queued") == 3
    assert bench.value("requests_in_flight") == 5


@pytest.mark.parametrize(
    ("readings", "expected"),
    [
        ([(1, 5), (1, 9), (2, 0), (2, 2), (3, 0), (3, 1)], [5, 9, 9, 11, 11, 12]),
        ([(1, 5), (1, 0), (1, 0), (1, 5), (1, 7)], [5, 5, 5, 5, 7]),
        ([(0, 0), (1, 5), (1, 0), (2, 0), (2, 3), (2, 0), (2, 4)], [0, 5, 5, 5, 8, 8, 9]),
        ([(1, 5), (2, 8)], [5, 13]),
    ],
    ids=["restarts", "link loss", "both", "restart between two scrapes"],
)
def test_a_workers_counters_never_fall_and_count_once(
    readings: list[tuple[int, int]], expected: list[int]
) -> None:
    bench = Bench()
    seen = []
    for epoch, total in readings:
        stats = WorkerStats(preemptions_total=total)
        bench.workers = [WorkerReading("w", epoch, True, stats)]
        seen.append(bench.value("num_preemptions_total", worker="w"))
    assert seen == expected


def test_counters_are_kept_apart_by_worker_and_name() -> None:
    bench = Bench()
    for epoch in (1, 2):
        bench.workers = [
            WorkerReading("a", epoch, True, WorkerStats(preemptions_total=2, steps_total=10)),
            WorkerReading("b", 1, True, WorkerStats(preemptions_total=3, steps_total=20)),
        ]
        assert bench.value("engine_steps_total", worker="a") == 10 * epoch
    assert bench.value("num_preemptions_total", worker="a") == 4
    assert bench.value("num_preemptions_total", worker="b") == 3
    assert bench.value("engine_steps_total", worker="b") == 20


def test_what_tiers_report() -> None:
    bench = Bench()
    host = TierReport(
        tier=Tier.HOST, num_blocks=9, num_cached=7, promoted_total=1, stored_total=2,
        dropped_total=3, failed_total=4, loads_total=5, recomputes_total=6, load_s_total=0.5,
        recompute_s_total=2.25, load_block_s=0.125,
    )  # fmt: skip
    stats = WorkerStats(num_transfers=2, tiers=(host, TierReport(tier=Tier.DISK, loads_total=1)))
    bench.workers = [WorkerReading("w", 1, True, stats)]
    labels = {"worker": "w", "tier": "host"}
    assert bench.value("num_transfers", worker="w") == 2
    assert bench.value("tier_blocks", state="cached", **labels) == 7
    assert bench.value("tier_blocks", state="total", **labels) == 9
    assert bench.value("tier_promoted_blocks_total", **labels) == 1
    assert bench.value("tier_stored_blocks_total", **labels) == 2
    assert bench.value("tier_dropped_blocks_total", **labels) == 3
    assert bench.value("tier_failed_blocks_total", **labels) == 4
    assert bench.value("tier_load_decisions_total", decision="load", **labels) == 5
    assert bench.value("tier_load_decisions_total", decision="recompute", **labels) == 6
    assert bench.value("tier_load_estimate_seconds_total", decision="load", **labels) == 0.5
    assert bench.value("tier_load_estimate_seconds_total", decision="recompute", **labels) == 2.25
    assert bench.value("tier_load_block_seconds", **labels) == 0.125
    labels["tier"] = "disk"
    assert bench.value("tier_load_decisions_total", decision="load", **labels) == 1
    assert bench.value("tier_load_block_seconds", **labels) is None


def test_a_tiers_counters_never_fall() -> None:
    bench = Bench()
    seen = []
    for epoch, tiers in (
        (1, (TierReport(tier=Tier.HOST, load_s_total=1.5),)),
        (1, ()),  # the link is lost
        (2, (TierReport(tier=Tier.HOST, load_s_total=0.25),)),
    ):
        bench.workers = [WorkerReading("w", epoch, True, WorkerStats(tiers=tiers))]
        labels = {"worker": "w", "tier": "host", "decision": "load"}
        seen.append(bench.value("tier_load_estimate_seconds_total", **labels))
    assert seen == [1.5, None, 1.75]


def test_two_apps_have_metrics_of_their_own() -> None:
    one, other = Bench(), Bench()
    one.metrics.record(7, received_at=100.0).admitted(0, 0.0)
    assert one.metrics.total("prompt_tokens_total") == 7
    assert other.metrics.total("prompt_tokens_total") == 0


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([], Percentiles(None, None, 0)),
        ([3.0], Percentiles(3.0, 3.0, 1)),
        ([2.0, 1.0], Percentiles(1.0, 2.0, 2)),
        (list(map(float, range(1, 101))), Percentiles(50.0, 95.0, 100)),
    ],
)
def test_percentiles(samples: list[float], expected: Percentiles) -> None:
    assert percentiles(samples) == expected


def test_windows_hold_what_is_recent() -> None:
    recent = RecentSamples()
    recent.add_admission(10.0, 100, 0)
    recent.add_admission(20.0, 100, 80)
    recent.add_first_token(20.0, 0.5, is_hit=True)
    recent.add_first_token(20.0, 2.5, is_hit=False)
    recent.add_interval(10.0, 0.1)
    recent.add_interval(20.0, 0.2)
    assert recent.hit_rate(0.0) == HitRate(200, 80)
    assert recent.hit_rate(15.0).rate == 0.8
    assert recent.hit_rate(30.0).rate is None
    assert recent.first_token(0.0, is_hit=True).p50 == 0.5
    assert recent.first_token(0.0, is_hit=False).p95 == 2.5
    assert recent.intervals(15.0) == Percentiles(0.2, 0.2, 1)
