"""The course of the metrics over the last day, for charts.

Owns the rings of readings, finer for what was just now, and what is made of two of them: rates,
shares and quantiles. Lives in memory and ends with the process. Knows nothing of where readings
come from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from service.dashboard.quantiles import quantiles
from service.dashboard.readings import GAUGES, HISTOGRAMS, SCALARS, Reading

__all__ = ["SPANS", "MetricHistory", "Series", "Span"]

_Column = NDArray[np.float64]
_EARLY_S = 0.5
_SOURCES = ("device", "host", "disk")


@dataclass(frozen=True, slots=True)
class Span:
    """A chart's extent: points at ``step_s`` seconds, each drawn over the ``window_s`` before it,
    since few requests end within a second."""

    step_s: float
    num_points: int
    window_s: float


SPANS = {"10m": Span(1.0, 600, 10.0), "2h": Span(10.0, 720, 60.0), "1d": Span(60.0, 1440, 300.0)}


@dataclass(frozen=True, slots=True)
class Series:
    """``times`` are seconds since 1970; every column has as many numbers, nan where there is
    nothing to say."""

    times: _Column
    columns: dict[str, _Column]


class MetricHistory:
    """Readings are taken about once a second; a ring takes those that its step asks for."""

    def __init__(self) -> None:
        self._latest: Reading | None = None
        self._rings: dict[str, deque[Reading]] = {
            name: deque(maxlen=_num_kept(span)) for name, span in SPANS.items()
        }

    def add(self, reading: Reading) -> None:
        self._latest = reading
        for name, ring in self._rings.items():
            # A reading that is a little early is that of its step: timers are not exact.
            if not ring or reading.at >= ring[-1].at + SPANS[name].step_s - _EARLY_S:
                ring.append(reading)

    def series(self, span_name: str, after: float = 0.0) -> Series:
        """The points later than ``after``; of all, the last is of now, whatever the step. KeyError
        for an unknown span."""
        span, ring = SPANS[span_name], self._rings[span_name]
        num_new = len(_newest(ring, after))
        num_lead = round(span.window_s / span.step_s)
        readings = list(islice(ring, max(0, len(ring) - num_new - num_lead), None))
        if not after and self._latest is not None and self._latest is not readings[-1]:
            readings.append(self._latest)
            num_new += 1
        first = max(1, len(readings) - min(num_new, span.num_points))
        later = np.arange(first, len(readings))
        if not len(later):
            return Series(np.empty(0), {})
        return _series(readings, later, np.maximum(later - num_lead, 0))


def _num_kept(span: Span) -> int:
    return span.num_points + round(span.window_s / span.step_s)


def _newest(ring: deque[Reading], after: float) -> Sequence[Reading]:
    newest = []
    for reading in reversed(ring):
        if reading.at <= after:
            break
        newest.append(reading)
    return newest


def _series(readings: list[Reading], later: NDArray[np.intp], earlier: NDArray[np.intp]) -> Series:
    times = np.array([reading.at for reading in readings])
    rows = np.array([reading.scalars for reading in readings])
    grown = dict(zip(SCALARS, (rows[later] - rows[earlier]).T, strict=True))
    seconds = times[later] - times[earlier]
    columns = {f"hit_{source}": _ratio(grown[source], grown["queried"]) for source in _SOURCES}
    hit = grown["device"] + grown["host"] + grown["disk"]
    columns["hit_rate"] = _ratio(hit, grown["queried"])
    columns["hit_per_s"] = hit / seconds
    for name in ("computed", "generated"):
        columns[f"{name}_per_s"] = grown[name] / seconds
    columns["saved_s"] = rows[later, SCALARS.index("saved_s")]
    last_step = dict(zip(SCALARS, (rows[later] - rows[later - 1]).T, strict=True))
    for name in GAUGES:
        columns[name] = last_step[name] / (times[later] - times[later - 1])
    for index, (name, bounds) in enumerate(HISTOGRAMS.items()):
        counts = np.array([reading.buckets[index] for reading in readings])
        grown_counts = counts[later] - counts[earlier]
        for share in (50, 95):
            columns[f"{name}_p{share}"] = quantiles(bounds, grown_counts, share / 100)
    return Series(times[later], columns)


def _ratio(part: _Column, whole: _Column) -> _Column:
    return np.divide(part, whole, out=np.full_like(part, np.nan), where=whole > 0)
