"""Chooses the worker for a request: a pure function of what is known about the workers.

Owns the choice and its reason. Knows nothing of links, requests or metadata stores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Affinity", "Route", "WorkerLoad", "choose_worker"]

# What a session's own worker may have to do beyond the least loaded one: its prefix is there.
_MIN_SLACK = 2
_SLACK_SHARE = 4
_MIN_GAIN_TOKENS = 256  # so many more must be there for a worker to be worth its queue


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """``num_requests`` counts running and waiting ones."""

    worker_id: str
    num_requests: int


@dataclass(frozen=True, slots=True)
class Affinity:
    """Where a request would like to go: to the worker that served its session last (``worker_id``)
    or else wherever requests of the same ``key`` go."""

    worker_id: str = ""
    key: str = ""


@dataclass(frozen=True, slots=True)
class Route:
    worker_id: str
    reason: str  # only_worker | session | longest_prefix | least_loaded


def choose_worker(
    locations: Mapping[str, int], loads: Sequence[WorkerLoad], affinity: Affinity
) -> Route | None:
    """None without any worker.

    ``locations`` are hints: worker id to the number of prompt tokens it is thought to hold. The
    session's last worker is taken while its load is not much above the lowest, and so is one that
    holds a much longer prefix than the least loaded ones. Else, among those, the longest prefix
    decides, then the key (so that requests of one key stay together while nothing speaks against
    it), then the id.
    """
    if not loads:
        return None
    if len(loads) == 1:
        return Route(loads[0].worker_id, "only_worker")
    lowest = min(load.num_requests for load in loads)
    bound = lowest + max(_MIN_SLACK, lowest // _SLACK_SHARE)
    if any(load.worker_id == affinity.worker_id and load.num_requests <= bound for load in loads):
        return Route(affinity.worker_id, "session")
    idle = sorted(load.worker_id for load in loads if load.num_requests == lowest)
    longest = max(locations.get(worker_id, 0) for worker_id in idle)
    holder = min(
        (load for load in loads if load.num_requests <= bound),
        key=lambda load: (-locations.get(load.worker_id, 0), load.num_requests, load.worker_id),
    )
    if locations.get(holder.worker_id, 0) - longest >= _MIN_GAIN_TOKENS:
        return Route(holder.worker_id, "longest_prefix")
    if longest > 0:
        idle = [worker_id for worker_id in idle if locations.get(worker_id, 0) == longest]
        return Route(idle[0], "longest_prefix")
    # Not hash(): it differs between processes.
    index = sum(affinity.key.encode()) % len(idle)
    return Route(idle[index], "least_loaded")
