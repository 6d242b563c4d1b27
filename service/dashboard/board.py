"""What the dashboard remembers of one gateway: the course of its metrics, marks, and its state.

Owns the look that is taken at everything once a second, and its clock. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from service.dashboard.history import MetricHistory
from service.dashboard.marks import MarkKind, MarkLog, WorkerMarks
from service.dashboard.readings import MetricReader
from service.dashboard.status import Condition, StatusLine
from service.workers.base import StateChange
from service.workers.registry import WorkerRegistry

__all__ = ["Board"]

_STEP_S = 1.0
_log = logging.getLogger("headstart.dashboard")


class Board:
    """``reader`` reads what is measured, ``condition`` tells how the gateway is now. Used from the
    event loop alone."""

    def __init__(
        self, workers: WorkerRegistry, reader: MetricReader, condition: Callable[[], Condition]
    ) -> None:
        # Of the wall's time only the beginning: charts need a clock that is never set back.
        began_at, began = time.time(), time.monotonic()
        self.clock: Callable[[], float] = lambda: began_at + time.monotonic() - began
        self.started_at = began_at
        self.history = MetricHistory()
        self.marks = MarkLog(self.clock)
        self.status = StatusLine(condition, self.clock)
        self._reader = reader
        self._worker_marks = WorkerMarks(workers, self.marks)
        workers.add_state_listener(self._on_change)
        self.marks.add(MarkKind.START, "the gateway has started")

    def _on_change(self, _: StateChange) -> None:
        self.status.look()

    def look(self) -> None:
        self.status.look()
        self.history.add(self._reader.read(self.clock()))

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                self.look()
            except Exception:  # a chart with a gap is better than none
                _log.exception("the metrics could not be read for the dashboard")
            await asyncio.sleep(_STEP_S)
