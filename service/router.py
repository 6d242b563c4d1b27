"""Chooses the worker for a request: a pure function of what is known about the workers.

Owns the choice and its reason. Knows nothing of links, requests or metadata stores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Route", "WorkerLoad", "choose_worker"]


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """``num_requests`` counts running and waiting ones."""

    worker_id: str
    num_requests: int


@dataclass(frozen=True, slots=True)
class Route:
    worker_id: str
    reason: str  # only_worker | longest_prefix | least_loaded


def choose_worker(
    locations: Mapping[str, int], loads: Sequence[WorkerLoad], session: str | None = None
) -> Route | None:
    """None without any worker.

    ``locations`` are hints: worker id to the number of prompt tokens it is thought to hold. Among
    equally loaded workers the longest prefix decides, then the session (so that one session stays
    together while nothing speaks against it), then the id.
    """
    if not loads:
        return None
    if len(loads) == 1:
        return Route(loads[0].worker_id, "only_worker")
    lowest = min(load.num_requests for load in loads)
    idle = sorted(load.worker_id for load in loads if load.num_requests == lowest)
    longest = max(locations.get(worker_id, 0) for worker_id in idle)
    if longest > 0:
        idle = [worker_id for worker_id in idle if locations.get(worker_id, 0) == longest]
        return Route(idle[0], "longest_prefix")
    # Not hash(): it differs between processes.
    index = sum((session or "").encode()) % len(idle) if session else 0
    return Route(idle[index], "least_loaded")
