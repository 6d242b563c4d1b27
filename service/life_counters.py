"""Counters of workers that are kept from falling when a worker starts again.

Owns what a worker's earlier lives came to. Knows nothing of what is counted.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from model_worker.protocol import WorkerStats

__all__ = ["LifeCounters", "WorkerReading"]


@dataclass(frozen=True, slots=True)
class WorkerReading:
    worker_id: str
    epoch: int  # of the worker's life that the counters are of
    is_ready: bool
    stats: WorkerStats


class _LifeCounter:
    """One counter of one worker, over all of its lives."""

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


class LifeCounters:
    def __init__(self) -> None:
        self._counters: defaultdict[tuple[str, ...], _LifeCounter] = defaultdict(_LifeCounter)

    def total(self, worker: WorkerReading, value: float, *name: str) -> float:
        """What the counter ``name`` of this worker comes to over all of its lives."""
        return self._counters[worker.worker_id, *name].take(worker.epoch, value)
