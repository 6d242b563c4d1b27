"""What happened that a chart should show: starts, losses, resets, other models, other templates.

Owns a bounded list of marks, and how a change of a worker reads. Knows nothing of charts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from service.workers.base import StateChange, WorkerState
from service.workers.registry import WorkerRegistry, card_differences

__all__ = ["Mark", "MarkKind", "MarkLog", "WorkerMarks"]

_MAX_MARKS = 200


class MarkKind(StrEnum):
    START = "start"  # of the gateway, or of a worker that was not there before
    RESTART = "restart"
    LOST = "lost"
    RESET = "reset"
    MODEL = "model"
    TEMPLATE = "template"


@dataclass(frozen=True, slots=True)
class Mark:
    at: float  # seconds since 1970
    kind: MarkKind
    text: str  # one line for a person; no prompt, no id of a client's


class MarkLog:
    """``clock`` gives seconds since 1970. Used from the event loop alone."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._marks: deque[Mark] = deque(maxlen=_MAX_MARKS)

    def add(self, kind: MarkKind, text: str) -> None:
        self._marks.append(Mark(self._clock(), kind, text))

    @property
    def marks(self) -> tuple[Mark, ...]:
        """The latest 200, the oldest first."""
        return tuple(self._marks)


class WorkerMarks:
    """Writes down what becomes of the workers of a registry."""

    def __init__(self, registry: WorkerRegistry, log: MarkLog) -> None:
        self._registry = registry
        self._log = log
        self._lives: dict[str, int] = {}  # the epoch that each worker was ready in
        self._gone: set[str] = set()  # said to be lost already
        registry.add_state_listener(self._take)

    def _take(self, change: StateChange) -> None:
        if change.state is WorkerState.READY:
            self._ready(change.worker_id)
        elif change.state is WorkerState.FAILED and (differences := self._differences(change)):
            is_template = all("chat_template" in item for item in differences)
            kind = MarkKind.TEMPLATE if is_template else MarkKind.MODEL
            what = "another chat template" if is_template else "another model"
            self._log.add(kind, f"worker {change.worker_id} came with {what} and is refused")
        elif change.state in (WorkerState.LOST, WorkerState.FAILED):
            self._gone_now(change)

    def _ready(self, worker_id: str) -> None:
        worker = self._registry.get(worker_id)
        epoch = 0 if worker is None else worker.epoch
        before = self._lives.get(worker_id)
        is_back = worker_id in self._gone
        self._lives[worker_id] = epoch
        self._gone.discard(worker_id)
        if before is None:
            self._log.add(MarkKind.START, f"worker {worker_id} is ready")
        elif before != epoch:
            self._log.add(MarkKind.RESTART, f"worker {worker_id} has started again")
        elif is_back:
            self._log.add(MarkKind.START, f"worker {worker_id} is back")

    def _gone_now(self, change: StateChange) -> None:
        if change.worker_id in self._gone or change.worker_id not in self._lives:
            return
        self._gone.add(change.worker_id)
        detail = f": {change.detail}" if change.detail else ""
        self._log.add(MarkKind.LOST, f"worker {change.worker_id} is {change.state}{detail}")

    def _differences(self, change: StateChange) -> tuple[str, ...]:
        """To the model served here, of a worker that is refused."""
        worker, served = self._registry.get(change.worker_id), self._registry.card
        if worker is None or worker.card is None or served is None:
            return ()
        return card_differences(served, worker.card)
