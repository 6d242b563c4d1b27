"""Steps between their launch and their result, and how many of them there may be.

Owns the queue in front of the device: how far the engine runs ahead, and what becomes of the steps
behind one that fails. Knows nothing of requests.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from model_worker.batch import ScheduledBatch
from model_worker.model_runner import PendingStep, Runner


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """``started_s``: when it began to be scheduled."""

    batch: ScheduledBatch
    pending: PendingStep
    started_s: float


@dataclass(frozen=True, slots=True)
class _NeverLaunched:
    """Whose failure is known already; it is told of when its turn has come, since the steps before
    it are not to blame."""

    error: Exception

    def result(self) -> NoReturn:
        raise self.error


class LaunchedSteps:
    """Oldest first."""

    def __init__(self, runner: Runner, max_open: int) -> None:
        """``max_open``: how many may be left without their result when one was launched."""
        self._runner = runner
        self._max_open = max_open
        self._steps: deque[LaunchedStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def launch(self, batch: ScheduledBatch, started_s: float) -> int:
        """How many steps may be left without their result now: none where this one has failed."""
        pending: PendingStep
        num_open = self._max_open
        try:
            pending = self._runner.launch(batch)
        except Exception as error:
            pending = _NeverLaunched(error)
            num_open = 0
        self._steps.append(LaunchedStep(batch, pending, started_s))
        return num_open

    def take(self) -> LaunchedStep:
        return self._steps.popleft()

    def abandon(self) -> list[ScheduledBatch]:
        """The steps left, once they are done and use no block any more, whatever they came to."""
        batches = []
        while self._steps:
            step = self._steps.popleft()
            batches.append(step.batch)
            with suppress(Exception):
                step.pending.result()
        return batches
