"""What is counted of a request, once each, and the figures over recent windows."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from cache_store.events import Tier
from model_worker.protocol import AGE_BOUNDS_S, Ages, BlockReport, TierReport, WorkerStats
from service.life_counters import WorkerReading
from service.metrics import GatewayMetrics
from service.recent import HitRate, Percentiles, RecentSamples, percentiles
from service.worker_metrics import QueueReading
from service.workers.base import StateChange, WorkerState


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
    labels: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.metrics = GatewayMetrics(
            lambda: self.workers,
            lambda: QueueReading(3, 5, 8),
            self.clock,
            lambda tenant: self.labels.get(tenant, ""),
        )

    def value(self, name: str, **labels: str) -> float | None:
        """The sum of the samples that carry ``labels``; None if there is none."""
        found = [
            sample.value
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == f"headstart_{name}" and labels.items() <= sample.labels.items()
        ]
        return sum(found) if found else None


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
    assert bench.value("requests_queue_limit") == 8


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


def test_what_the_device_and_the_ages_of_blocks_report() -> None:
    bench = Bench()
    counts = tuple(range(len(AGE_BOUNDS_S) + 1))
    blocks = BlockReport(
        block_bytes=1000, dropped_total=3, demoted_total=2, demoted_s_total=0.5,
        eviction_s_total=0.25, lifetime=Ages(counts, 7.5),
    )  # fmt: skip
    host = TierReport(
        tier=Tier.HOST, block_bytes=500, promoted_total=1, stored_total=4, promoted_s_total=1.5,
        stored_s_total=2.5, corrupt_total=6,
    )  # fmt: skip
    for epoch in (1, 2):
        stats = WorkerStats(blocks=blocks, tiers=(host,), prefill_token_s=0.125)
        bench.workers = [WorkerReading("w", epoch, True, stats)]
        for name, of_device, of_host in (
            ("tier_dropped_blocks_total", 3, 0),
            ("tier_demoted_blocks_total", 2, 0),
            ("tier_eviction_seconds_total", 0.25, 0),
            ("tier_corrupt_blocks_total", None, 6),
            ("tier_promoted_blocks_total", None, 1),
        ):
            found = [bench.value(name, tier=tier) for tier in ("device", "host")]
            assert found == [of_device and of_device * epoch, of_host * epoch]
        for move, tier, num_bytes, seconds in (
            ("dropped", "device", 3000, None),
            ("demoted", "device", 2000, 0.5),
            ("promoted", "device", None, None),
            ("promoted", "host", 500, 1.5),
            ("stored", "host", 2000, 2.5),
        ):
            labels = {"worker": "w", "tier": tier, "move": move}
            moved = bench.value("tier_moved_bytes_total", **labels)
            assert moved == (num_bytes and num_bytes * epoch)
            took = bench.value("tier_move_seconds_total", **labels)
            assert took == (seconds and seconds * epoch)
        assert bench.value("block_lifetime_seconds_count") == sum(counts) * epoch
        assert bench.value("block_lifetime_seconds_sum") == 7.5 * epoch
        assert bench.value("block_lifetime_seconds_bucket", le="0.5") == 1 * epoch
        assert bench.value("block_lifetime_seconds_bucket", le="+Inf") == sum(counts) * epoch
        assert bench.value("block_reuse_gap_seconds_count") == 0
        assert bench.value("prefill_token_seconds") == 0.125


def test_series_of_a_tenant_and_of_hits_and_misses() -> None:
    bench = Bench(labels={"acme": "acme", "globex": "other", "initech": "other"})
    for tenant, num_cached in (("acme", 8), ("acme", 4), ("globex", 5), ("initech", 0)):
        recorder = bench.metrics.record(10, received_at=100.0, tenant=tenant)
        recorder.admitted(num_cached, 0.5, num_host_tokens=num_cached, load_s=0.25)
        recorder.prefilled(0.125)
        recorder.tokens(2)
        recorder.text()
        recorder.end("stop")
    for name in (
        *("time_to_first_token_seconds", "inter_token_latency_seconds"),
        *("e2e_request_latency_seconds", "request_queue_time_seconds"),
        "request_prefill_time_seconds",
    ):
        for cache in ("hit", "miss"):
            for tenant in ("acme", "other"):
                assert bench.value(f"{name}_count", cache=cache, tenant=tenant) == 1, name
    assert bench.value("request_prefill_time_seconds_sum") == 0.5
    assert bench.value("request_load_time_seconds_count", cache="hit") == 2
    assert bench.value("request_load_time_seconds_count", cache="miss") == 1  # less than half
    assert bench.value("prefix_cache_queries_total", tenant="acme") == 20
    assert bench.value("prefix_cache_hits_total", tenant="other") == 5
    assert bench.value("requests_total", tenant="other", outcome="stop") == 2
    assert bench.metrics.total("requests_total", {"outcome": "stop"}) == 4
    assert bench.metrics.total("generation_tokens_total") == 8


def test_seconds_saved_are_hits_at_the_speed_of_prefill() -> None:
    bench = Bench()
    bench.metrics.record(100, 100.0).admitted(80, 0.0, prefill_token_s=0.125)
    bench.metrics.record(100, 100.0).admitted(80, 0.0)  # nothing was measured yet
    bench.metrics.record(100, 100.0).admitted(0, 0.0, prefill_token_s=0.125)
    further = bench.metrics.record(100, 100.0, counts_prompt=False)
    further.admitted(99, 0.0, prefill_token_s=0.125)  # of a prompt that was counted
    assert bench.value("prefill_seconds_saved_total") == 10.0


def test_a_worker_that_is_lost_counts_once_each_time() -> None:
    bench = Bench()
    lost, ready = WorkerState.LOST, WorkerState.READY
    seen = []
    for worker_id, state, detail in (
        *(("a", ready, ""), ("a", lost, "the link broke"), ("a", lost, "it was killed")),
        *(("a", WorkerState.CONNECTING, ""), ("b", lost, ""), ("a", ready, ""), ("a", lost, "")),
    ):
        bench.metrics.worker_changed(StateChange(worker_id, state, detail))
        seen.append(bench.value("worker_losses_total"))
    assert seen == [0, 1, 1, 1, 2, 2, 3]


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
