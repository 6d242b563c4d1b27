"""Finds the workers that have announced themselves, and lets go of those that are gone.

Owns the comparison of what the metadata store lists with what the registry has. A store that is out
of reach changes nothing; nor does a lease that ran out while the worker's link is up. Knows nothing
of how a worker is connected to.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from cache_store.metadata.base import MetadataError, MetadataStore, WorkerRecord
from service.workers.base import Worker, WorkerState
from service.workers.registry import WorkerRegistry

__all__ = ["WorkerDiscovery"]

_log = logging.getLogger("headstart.workers")
_POLL_S = 1.0
_CONNECTED = (WorkerState.READY, WorkerState.DRAINING)

WorkerMaker = Callable[[WorkerRecord], Worker]
"""A worker that has not been started. Raises ValueError, one line, if it cannot be connected to."""


class WorkerDiscovery:
    """Only workers that it added are removed again. Belongs to one event loop."""

    def __init__(
        self,
        store: MetadataStore,
        registry: WorkerRegistry,
        make: WorkerMaker,
        *,
        poll_s: float = _POLL_S,
    ) -> None:
        self._store = store
        self._registry = registry
        self._make = make
        self._poll_s = poll_s
        self._found: dict[str, str] = {}  # endpoint by worker id
        self._refused: set[tuple[str, str]] = set()
        self._task: asyncio.Task[None] | None = None

    def announces_itself(self, worker_id: str) -> bool:
        return worker_id in self._found

    def start(self) -> None:
        self._task = asyncio.create_task(self._poll())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def look(self) -> None:
        """Compare once."""
        try:
            records = await self._store.all_workers()
        except MetadataError:
            return
        self._refused &= {(record.worker_id, record.endpoint) for record in records}
        listed = {record.worker_id: record for record in records if record.endpoint}
        endpoints = {record.endpoint for record in listed.values()}
        for worker_id, endpoint in tuple(self._found.items()):
            record = listed.get(worker_id)
            # Another worker at its place, or itself at another: there is no waiting for it.
            is_replaced = endpoint in endpoints if record is None else record.endpoint != endpoint
            if is_replaced or (record is None and not self._is_connected(worker_id)):
                del self._found[worker_id]
                await self._registry.remove(worker_id)
                _log.info("worker %s is gone", worker_id)
        for record in listed.values():
            if self._registry.get(record.worker_id) is None:
                await self._add(record)

    def _is_connected(self, worker_id: str) -> bool:
        worker = self._registry.get(worker_id)
        return worker is not None and worker.state in _CONNECTED

    async def _add(self, record: WorkerRecord) -> None:
        try:
            worker = self._make(record)
        except ValueError as error:
            if (record.worker_id, record.endpoint) not in self._refused:
                self._refused.add((record.worker_id, record.endpoint))
                _log.warning("worker %s cannot be used: %s", record.worker_id, error)
            return
        self._found[record.worker_id] = record.endpoint
        await self._registry.add(worker)
        _log.info("worker %s was found at %s", record.worker_id, record.endpoint)

    async def _poll(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:  # the next look may fare better
                _log.exception("looking for workers failed")
            await asyncio.sleep(self._poll_s)
