"""One look at what is measured, as a row of numbers that only ever grow.

Owns which figures the charts are drawn from, over all workers and tenants. Knows nothing of time
beyond the moment it is told, and keeps nothing but the integrals of gauges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.life_counters import LifeCounters, WorkerReading
from service.request_series import FIRST_TOKEN_BUCKETS, INTERVAL_BUCKETS
from service.running_totals import RunningTotals
from service.worker_metrics import QueueReading

__all__ = ["GAUGES", "HISTOGRAMS", "SCALARS", "MetricReader", "Reading"]

Row = NDArray[np.float64]  # 1-D

_COUNTERS = ("queried", "device", "host", "disk", "generated", "saved_s", "computed")
GAUGES = ("running", "waiting", "queued")
SCALARS = (*_COUNTERS, *GAUGES)
HISTOGRAMS = {  # upper bounds in seconds
    "ttft_hit": np.array([*FIRST_TOKEN_BUCKETS, math.inf]),
    "ttft_miss": np.array([*FIRST_TOKEN_BUCKETS, math.inf]),
    "itl": np.array([*INTERVAL_BUCKETS, math.inf]),
}


@dataclass(frozen=True, slots=True)
class Reading:
    """``at`` is seconds since 1970. ``scalars`` are in the order of SCALARS, gauges as their
    integrals over time; ``buckets`` in that of HISTOGRAMS, counts that are cumulative over the
    bounds."""

    at: float
    scalars: Row
    buckets: tuple[Row, ...]


class MetricReader:
    """Used from the event loop alone."""

    def __init__(
        self,
        totals: RunningTotals,
        workers: Callable[[], Sequence[WorkerReading]],
        queue: Callable[[], QueueReading],
    ) -> None:
        self._totals = totals
        self._workers = workers
        self._queue = queue
        self._lives = LifeCounters()
        self._last_at: float | None = None
        self._gauges = np.zeros(len(GAUGES))  # as read last
        self._integrals = np.zeros(len(GAUGES))

    def read(self, at: float) -> Reading:
        """``at`` never falls."""
        totals, workers = self._totals, self._workers()
        gauges = np.array(
            [
                sum(worker.stats.num_running for worker in workers),
                sum(worker.stats.num_waiting for worker in workers),
                self._queue().num_queued,
            ],
            dtype=np.float64,
        )
        if self._last_at is not None:
            self._integrals = self._integrals + (at - self._last_at) * (gauges + self._gauges) / 2
        self._last_at, self._gauges = at, gauges
        computed = sum(
            self._lives.total(worker, worker.stats.prompt_tokens_computed_total)
            for worker in workers
        )
        counters = [*(getattr(totals, name) for name in _COUNTERS[:-1]), computed]
        buckets = (totals.ttft_hit, totals.ttft_miss, totals.itl)
        return Reading(
            at,
            np.concatenate((counters, self._integrals)),
            tuple(np.cumsum(item.counts, dtype=np.float64) for item in buckets),
        )
