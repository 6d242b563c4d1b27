"""The top line: what state the server is in, why, and since when.

Owns the words for it and the moment of the last change. Measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from service.workers.base import WorkerState
from service.workers.registry import WorkerReport

__all__ = ["Condition", "Status", "StatusLine", "condition_of"]


@dataclass(frozen=True, slots=True)
class Condition:
    """``state`` is ready, degraded, draining, or that of the worker that is waited for."""

    state: str
    cause: str  # one line for a person


@dataclass(frozen=True, slots=True)
class Status:
    state: str
    cause: str
    since: float  # seconds since 1970


class StatusLine:
    """``condition`` tells how things are now, ``clock`` gives seconds since 1970."""

    def __init__(self, condition: Callable[[], Condition], clock: Callable[[], float]) -> None:
        self._condition = condition
        self._clock = clock
        self._status: Status | None = None

    def look(self) -> Status:
        """A cause that changes within one state, such as how much is loaded, is no new state."""
        now = self._condition()
        known = self._status
        since = known.since if known and known.state == now.state else self._clock()
        self._status = Status(now.state, now.cause, since)
        return self._status


def condition_of(
    unready_reason: str, degraded_reason: str, *, is_draining: bool, workers: Sequence[WorkerReport]
) -> Condition:
    """Reasons are empty where there is none. What keeps a server from being ready goes before what
    is missing, and that before workers that others stand in for."""
    if is_draining:
        return Condition("draining", "no new request is taken; those that run are finished")
    if unready_reason:
        states = [worker.state for worker in workers if worker.state is not WorkerState.READY]
        return Condition(states[0].value if states else "loading", unready_reason)
    if degraded_reason:
        return Condition("degraded", degraded_reason)
    others = [worker for worker in workers if worker.state is not WorkerState.READY]
    num_ready = len(workers) - len(others)
    if not others:
        noun = "worker takes" if num_ready == 1 else "workers take"
        return Condition("ready", f"{num_ready} {noun} requests")
    missing = "; ".join(
        f"{worker.worker_id} is {worker.state}" + (f": {worker.detail}" if worker.detail else "")
        for worker in others
    )
    return Condition("degraded", f"{num_ready} of {len(workers)} workers take requests; {missing}")
