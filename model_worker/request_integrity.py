"""Assertions over the requests of a scheduler: those that run and those that wait.

Owns no state. For idle moments and tests.
"""

from __future__ import annotations

from collections.abc import Sequence

from model_worker.request import Request, RequestStatus


def check_queues(running: Sequence[Request], waiting: Sequence[Request]) -> None:
    """Raises AssertionError where a queue is out of order, or a request is not what it should be
    in it."""
    for queue in (running, waiting):
        ages = [request.order for request in queue]
        assert ages == sorted(ages), "a queue out of order"
    for request in running:
        assert request.status is RequestStatus.RUNNING
        assert request.lease is not None
        assert request.num_computed_tokens < request.num_tokens
        assert request.num_computed_tokens >= request.lease.num_cached_tokens
    for request in waiting:
        assert request.status is RequestStatus.WAITING
        assert request.lease is None
        assert request.num_computed_tokens == 0
