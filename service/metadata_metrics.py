"""What a metadata store counts of itself, as metrics read when they are scraped.

Owns the metric names. Knows nothing of what is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from cache_store.metadata.stats import MetadataStats

__all__ = ["MetadataCollector"]

_GAUGES = (
    ("degraded", "is_degraded", "1 while the metadata store is out of reach."),
    ("kept_sessions", "num_kept", "Sessions kept in memory until the store answers again."),
    ("kept_bytes", "kept_bytes", "Bytes of the sessions kept in memory."),
)
_COUNTERS = (
    ("degraded_seconds", "degraded_s", "Time that the metadata store was out of reach."),
    ("calls", "calls_total", "Calls to the metadata store."),
    ("failures", "failures_total", "Calls that the metadata store did not answer sensibly."),
    ("unreadable_records", "unreadable_total", "Stored sessions that did not open or decode."),
    ("dropped_sessions", "dropped_total", "Sessions given up for want of room or time."),
    ("conflicts", "conflicts_total", "Kept sessions that another gateway had changed meanwhile."),
)


class MetadataCollector(Collector):
    def __init__(self, read: Callable[[], MetadataStats]) -> None:
        self._read = read

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        stats = self._read()
        for name, field, text in _GAUGES:
            value = float(getattr(stats, field))
            yield GaugeMetricFamily(f"headstart_metadata_{name}", text, value=value)
        for name, field, text in _COUNTERS:
            value = float(getattr(stats, field))
            yield CounterMetricFamily(f"headstart_metadata_{name}", text, value=value)
