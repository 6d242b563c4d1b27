"""One look at the metrics, as a row of numbers that only ever grow.

Owns which of the metrics the charts are drawn from. Takes them from the very registry that
/metrics is written from, summed over workers and tenants. Knows nothing of time beyond the moment
it is told, and keeps nothing but the integrals of gauges.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry
from prometheus_client.samples import Sample

__all__ = ["GAUGES", "HISTOGRAMS", "SCALARS", "Buckets", "MetricReader", "Reading"]

Row = NDArray[np.float64]  # 1-D


@dataclass(frozen=True, slots=True)
class _Metric:
    name: str  # of its samples, without the prefix
    labels: Mapping[str, str]


_COUNTERS = {
    "queried": _Metric("prefix_cache_queries_total", {}),
    "hit": _Metric("prefix_cache_hits_total", {}),
    "device": _Metric("prompt_tokens_cached_total", {"source": "device"}),
    "host": _Metric("prompt_tokens_cached_total", {"source": "host"}),
    "disk": _Metric("prompt_tokens_cached_total", {"source": "disk"}),
    "remote": _Metric("prompt_tokens_cached_total", {"source": "remote"}),
    "computed": _Metric("prompt_tokens_computed_total", {}),
    "generated": _Metric("generation_tokens_total", {}),
    "saved_s": _Metric("prefill_seconds_saved_total", {}),
}
GAUGES = {
    "running": _Metric("num_requests_running", {}),
    "waiting": _Metric("num_requests_waiting", {}),
    "queued": _Metric("requests_queued", {}),
}
SCALARS = (*_COUNTERS, *GAUGES)
HISTOGRAMS = {
    "ttft_hit": _Metric("time_to_first_token_seconds_bucket", {"cache": "hit"}),
    "ttft_miss": _Metric("time_to_first_token_seconds_bucket", {"cache": "miss"}),
    "itl": _Metric("inter_token_latency_seconds_bucket", {}),
}
_PREFIX = "headstart_"


@dataclass(frozen=True, slots=True)
class Buckets:
    """``bounds`` are upper bounds in seconds, the last one infinite; ``counts`` are cumulative over
    them. Both are empty before the metric has its first child."""

    bounds: Row
    counts: Row


@dataclass(frozen=True, slots=True)
class Reading:
    """``at`` is seconds since 1970. ``scalars`` are in the order of SCALARS, gauges as their
    integrals over time; ``buckets`` in that of HISTOGRAMS."""

    at: float
    scalars: Row
    buckets: tuple[Buckets, ...]


class MetricReader:
    """Used from the event loop alone, as the registry is."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._last_at: float | None = None
        self._gauges = np.zeros(len(GAUGES))  # as read last
        self._integrals = np.zeros(len(GAUGES))

    def read(self, at: float) -> Reading:
        """``at`` never falls."""
        values: dict[str, float] = dict.fromkeys(SCALARS, 0.0)
        counts: dict[str, defaultdict[float, float]] = {
            name: defaultdict(float) for name in HISTOGRAMS
        }
        for family in self._registry.collect():
            for sample in family.samples:
                _add_scalar(values, sample)
                _add_bucket(counts, sample)
        gauges = np.array([values[name] for name in GAUGES])
        if self._last_at is not None:
            self._integrals = self._integrals + (at - self._last_at) * (gauges + self._gauges) / 2
        self._last_at, self._gauges = at, gauges
        scalars = np.concatenate(([values[name] for name in _COUNTERS], self._integrals))
        return Reading(at, scalars, tuple(_buckets(counts[name]) for name in HISTOGRAMS))


def _names_of(metrics: Mapping[str, _Metric]) -> dict[str, tuple[str, ...]]:
    """By name of their samples, which rows they may belong to."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for row, metric in metrics.items():
        found[_PREFIX + metric.name].append(row)
    return {name: tuple(rows) for name, rows in found.items()}


_SCALAR_METRICS = {**_COUNTERS, **GAUGES}
_SCALAR_ROWS = _names_of(_SCALAR_METRICS)
_HISTOGRAM_ROWS = _names_of(HISTOGRAMS)


def _add_scalar(values: dict[str, float], sample: Sample) -> None:
    for row in _SCALAR_ROWS.get(sample.name, ()):
        if _SCALAR_METRICS[row].labels.items() <= sample.labels.items():
            values[row] += sample.value


def _add_bucket(counts: Mapping[str, defaultdict[float, float]], sample: Sample) -> None:
    for row in _HISTOGRAM_ROWS.get(sample.name, ()):
        if HISTOGRAMS[row].labels.items() <= sample.labels.items():
            counts[row][float(sample.labels["le"])] += sample.value


def _buckets(counts: Mapping[float, float]) -> Buckets:
    bounds = sorted(counts)
    return Buckets(np.array(bounds), np.array([counts[bound] for bound in bounds]))
