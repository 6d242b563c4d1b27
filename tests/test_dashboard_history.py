"""The course of the metrics: readings, rings, what is made of two readings, and quantiles."""

from __future__ import annotations

import math

import numpy as np
import pytest

from model_worker.protocol import WorkerStats
from service.dashboard.history import SPANS, MetricHistory
from service.dashboard.quantiles import quantiles
from service.dashboard.readings import HISTOGRAMS, SCALARS, MetricReader, Reading
from service.life_counters import WorkerReading
from service.metrics import GatewayMetrics
from service.request_series import FIRST_TOKEN_BUCKETS, INTERVAL_BUCKETS
from service.running_totals import RunningTotals
from service.worker_metrics import QueueReading

FIRST, INTERVAL = len(FIRST_TOKEN_BUCKETS) + 1, len(INTERVAL_BUCKETS) + 1


def reading(at: float, *, num_hits: float = 0, **scalars: float) -> Reading:
    """``num_hits`` first tokens came within the first bucket."""
    row = np.array([scalars.get(name, 0.0) for name in SCALARS])
    buckets = (np.full(FIRST, float(num_hits)), np.zeros(FIRST), np.zeros(INTERVAL))
    return Reading(at, row, buckets)


def history_of(*readings: Reading) -> MetricHistory:
    history = MetricHistory()
    for item in readings:
        history.add(item)
    return history


# ---------------------------------------------------------------- readings


def a_worker(**counters: int) -> WorkerReading:
    return WorkerReading("w", 1, True, WorkerStats(**counters))


def test_the_totals_are_those_of_the_metrics() -> None:
    now = [0.0]
    metrics = GatewayMetrics(
        lambda: (), lambda: QueueReading(0, 0), lambda: now[0], tenant_label=lambda tenant: tenant
    )
    for tenant, cached, seconds in (("a", 0, 0.3), ("b", 40, 0.02), ("b", 30, 200.0)):
        recorder = metrics.record(50, now[0], tenant=tenant)
        recorder.admitted(cached, 0.0, cached // 2, cached // 4, prefill_token_s=0.5)
        now[0] += seconds
        recorder.text()
        recorder.tokens(1)
        now[0] += 0.09
        recorder.tokens(3)
        recorder.end("stop")
    taken = MetricReader(metrics.totals, lambda: (), lambda: QueueReading(0, 0)).read(1.0)
    scalars = dict(zip(SCALARS, taken.scalars.tolist(), strict=True))
    assert scalars["queried"] == metrics.total("prefix_cache_queries_total") == 150
    for source in ("device", "host", "disk"):
        exported = metrics.total("prompt_tokens_cached_total", {"source": source})
        assert scalars[source] == exported > 0
    assert sum(scalars[name] for name in ("device", "host", "disk")) == metrics.total(
        "prefix_cache_hits_total"
    )
    assert scalars["generated"] == metrics.total("generation_tokens_total") == 12
    assert scalars["saved_s"] == metrics.total("prefill_seconds_saved_total") == 35.0
    for (name, bounds), counts in zip(HISTOGRAMS.items(), taken.buckets, strict=True):
        exported_name, labels = EXPORTED[name]
        for bound, count in zip(bounds.tolist(), counts.tolist(), strict=True):
            le = {"le": "+Inf" if math.isinf(bound) else str(bound)}
            assert count == metrics.total(exported_name, labels | le), (name, bound)
    assert [counts[-1] for counts in taken.buckets] == [2, 1, 9]


EXPORTED: dict[str, tuple[str, dict[str, str]]] = {
    "ttft_hit": ("time_to_first_token_seconds_bucket", {"cache": "hit"}),
    "ttft_miss": ("time_to_first_token_seconds_bucket", {"cache": "miss"}),
    "itl": ("inter_token_latency_seconds_bucket", {}),
}


def test_what_workers_have_computed_outlasts_their_lives() -> None:
    lives = [WorkerReading("w", 1, True, WorkerStats(prompt_tokens_computed_total=10))]
    reader = MetricReader(RunningTotals(), lambda: lives, lambda: QueueReading(0, 0))
    assert reader.read(1.0).scalars[SCALARS.index("computed")] == 10
    lives[0] = WorkerReading("w", 2, True, WorkerStats(prompt_tokens_computed_total=3))
    assert reader.read(2.0).scalars[SCALARS.index("computed")] == 13


def test_a_gauge_is_read_as_its_integral() -> None:
    workers = [a_worker(num_running=2), a_worker(num_running=2)]
    reader = MetricReader(RunningTotals(), lambda: workers, lambda: QueueReading(0, 0))
    values = []
    for at in (10.0, 11.0, 13.0):
        values.append(reader.read(at).scalars[SCALARS.index("running")])
        workers[1] = a_worker()
    # From 4 to 2 within a second, then 2 for two seconds.
    assert values == [0.0, 3.0, 7.0]


# ---------------------------------------------------------------- quantiles


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.25, 0.5), (0.5, 1.0), (0.625, 2.0), (0.75, 3.0), (0.95, 3.8), (1.0, 4.0)],
)
def test_a_quantile_is_interpolated_within_its_bucket(share: float, expected: float) -> None:
    bounds = np.array([1.0, 3.0, 4.0, math.inf])
    found = quantiles(bounds, np.array([[2.0, 3.0, 4.0, 4.0], [0.0, 0.0, 0.0, 0.0]]), share)
    assert found[0] == pytest.approx(expected)
    assert math.isnan(found[1])


def test_beyond_the_largest_bound_it_is_that_bound() -> None:
    assert quantiles(np.array([1.0, 2.0, math.inf]), np.array([[0.0, 0.0, 5.0]]), 0.5) == [2.0]


def test_without_buckets_there_is_no_quantile() -> None:
    assert np.isnan(quantiles(np.empty(0), np.zeros((3, 0)), 0.5)).all()


# ---------------------------------------------------------------- series


def test_a_point_is_what_grew_over_its_window() -> None:
    # 100 tokens are asked for each second; from the tenth second on 50 of them are found.
    found = [50.0 * max(0, i - 10) for i in range(31)]
    readings = [
        reading(1000.0 + i, queried=100.0 * i, device=found[i], computed=7.0 * i) for i in range(31)
    ]
    series = history_of(*readings).series("10m")
    assert series.times.tolist() == [1000.0 + i for i in range(1, 31)]
    by_time = dict(zip(series.times.tolist(), series.columns["hit_rate"].tolist(), strict=True))
    assert by_time[1001.0] == 0.0
    assert by_time[1015.0] == pytest.approx(0.25)  # five of the ten seconds before
    assert by_time[1020.0] == by_time[1030.0] == pytest.approx(0.5)
    assert series.columns["hit_device"].tolist() == series.columns["hit_rate"].tolist()
    assert series.columns["hit_disk"][-1] == 0.0
    assert series.columns["computed_per_s"].tolist() == pytest.approx([7.0] * 30)
    assert series.columns["hit_per_s"][-1] == pytest.approx(50.0)


def test_where_nothing_was_asked_for_there_is_no_rate() -> None:
    series = history_of(reading(1.0), reading(2.0)).series("10m")
    assert math.isnan(series.columns["hit_rate"][0])
    assert math.isnan(series.columns["ttft_hit_p50"][0])
    assert series.columns["computed_per_s"].tolist() == [0.0]


def test_a_gauge_is_its_mean_over_one_step() -> None:
    series = history_of(
        reading(1.0, running=0.0), reading(2.0, running=4.0), reading(4.0, running=10.0)
    ).series("10m")
    assert series.columns["running"].tolist() == [4.0, 3.0]


def test_quantiles_are_of_the_window_alone() -> None:
    readings = [reading(0.0), reading(1.0, num_hits=10)]
    readings += [reading(2.0 + i, num_hits=10) for i in range(12)]
    readings.append(reading(14.0, num_hits=12))
    column = history_of(*readings).series("10m").columns["ttft_hit_p50"]
    assert column[0] == pytest.approx(0.0005)
    assert math.isnan(column[-2])  # the first ten are longer ago than a window
    assert column[-1] == pytest.approx(0.0005)


def test_only_later_points_are_given_and_they_are_the_same() -> None:
    readings = [reading(float(i), queried=10.0 * i, host=float(i * i % 7)) for i in range(60)]
    history = history_of(*readings)
    whole, later = history.series("10m"), history.series("10m", after=50.0)
    assert later.times.tolist() == whole.times[-9:].tolist() == [51.0 + i for i in range(9)]
    for name, column in later.columns.items():
        assert column.tolist() == pytest.approx(whole.columns[name][-9:].tolist(), nan_ok=True)
    assert len(history.series("10m", after=59.0).times) == 0
    assert len(MetricHistory().series("1d").times) == 0


def test_each_ring_is_bounded_and_takes_its_own_steps() -> None:
    history = history_of(*(reading(float(i), queried=float(i)) for i in range(3_000)))
    for name, span in SPANS.items():
        times = history.series(name, after=0.5).times
        assert len(times) <= span.num_points
        assert np.diff(times).tolist() == [span.step_s] * (len(times) - 1)
    assert len(history.series("10m").times) == 600
    assert history.series("10m").times[-1] == 2999.0
    with pytest.raises(KeyError):
        history.series("1w")


def test_timers_that_are_a_little_early_leave_no_gap() -> None:
    history = history_of(*(reading(i * 0.999) for i in range(101)))
    assert len(history.series("10m").times) == 100
    assert len(history.series("2h", after=0.5).times) == 10


def test_a_coarse_span_ends_with_now_and_goes_on_with_its_own_steps() -> None:
    history = history_of(*(reading(100.0 + i, queried=float(i), device=i / 4) for i in range(26)))
    series = history.series("2h")
    assert series.times.tolist() == [110.0, 120.0, 125.0]
    assert series.columns["hit_rate"].tolist() == [0.25] * 3
    assert history.series("1d").times.tolist() == [125.0]
    history.add(reading(131.0, queried=31.0, device=31 / 4))
    assert history.series("2h", after=125.0).times.tolist() == [131.0]
