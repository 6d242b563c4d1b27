"""Which worker a request goes to: what is known of the workers, put before the router.

Owns the count of what this gateway has sent to each, the look-up of the prompt, and how often each
reason decided. The choice itself is service.router's. Knows nothing of what becomes of a request.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from service.errors import Unavailable
from service.router import Affinity, WorkerLoad, choose_worker
from service.workers.base import Worker

__all__ = ["LocatePrefix", "Routing", "RoutingCollector"]

_log = logging.getLogger("headstart.requests")

LocatePrefix = Callable[[NDArray[np.int32], str], Awaitable[Mapping[tuple[str, int], int]]]
"""Prompt and cache salt to the tokens held, by worker id and epoch; never raises or waits long."""


class Routing:
    """``workers`` gives those that take requests now. Belongs to one event loop."""

    def __init__(
        self, workers: Callable[[], Sequence[Worker]], locate: LocatePrefix | None = None
    ) -> None:
        self._workers = workers
        self._locate = locate
        self._num_sent: Counter[str] = Counter()  # and not ended, by worker
        self.reasons: Counter[str] = Counter()

    async def choose(
        self, prompt_token_ids: NDArray[np.int32], cache_salt: str, affinity: Affinity
    ) -> Worker:
        """Raises Unavailable when there is none."""
        held: Mapping[tuple[str, int], int] = {}
        if self._locate is not None and len(self._workers()) > 1:
            held = await self._locate(prompt_token_ids, cache_salt)
        workers = {worker.worker_id: worker for worker in self._workers()}
        locations = {
            worker_id: num_tokens
            for (worker_id, epoch), num_tokens in held.items()
            if worker_id in workers and workers[worker_id].epoch == epoch
        }
        loads = [WorkerLoad(worker_id, self._load(worker)) for worker_id, worker in workers.items()]
        route = choose_worker(locations, loads, affinity)
        if route is None:
            raise Unavailable("No worker is ready.", code="no_worker", retry_after=5)
        self.reasons[route.reason] += 1
        _log.debug("routed to worker %s: %s", route.worker_id, route.reason)
        return workers[route.worker_id]

    def sent(self, worker_id: str) -> None:
        self._num_sent[worker_id] += 1

    def ended(self, worker_id: str) -> None:
        """Once for each that was sent."""
        self._num_sent[worker_id] -= 1
        if not self._num_sent[worker_id]:
            del self._num_sent[worker_id]  # workers come and go

    def _load(self, worker: Worker) -> int:
        # What this gateway has sent is known at once; a worker's own count comes with its next
        # step, and holds what other gateways have sent.
        reported = worker.stats.num_running + worker.stats.num_waiting
        return max(self._num_sent[worker.worker_id], reported)


class RoutingCollector(Collector):
    """``reasons`` and ``lookups`` are how often each came up, ``overflows`` how often a worker's
    locations were given up."""

    def __init__(
        self,
        reasons: Mapping[str, int],
        lookups: Mapping[str, int],
        overflows: Callable[[], int],
    ) -> None:
        self._reasons = reasons
        self._lookups = lookups
        self._overflows = overflows

    def collect(self) -> Iterator[CounterMetricFamily]:
        routed = CounterMetricFamily(
            "headstart_routed_requests",
            "Requests by why their worker was chosen.",
            labels=["reason"],
        )
        for reason in ("only_worker", "session", "longest_prefix", "least_loaded"):
            routed.add_metric([reason], self._reasons.get(reason, 0))
        yield routed
        lookups = CounterMetricFamily(
            "headstart_location_lookups",
            "Prompts looked up in the metadata store, where there are several workers.",
            labels=["outcome"],
        )
        for outcome in ("found", "none", "late", "failed"):
            lookups.add_metric([outcome], self._lookups.get(outcome, 0))
        yield lookups
        yield CounterMetricFamily(
            "headstart_location_overflows",
            "Times that a worker's locations were given up: too many to tell the metadata store.",
            value=self._overflows(),
        )
