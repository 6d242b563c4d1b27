"""Carries what workers' caches tell into the metadata store, off the path of requests.

Owns the queue between the two: in order for each worker, bounded, emptied by a task of its own, and
tried again while the store is out of reach. On overflow all that the store has of that worker is
given up, since what is missing would be taken for true. Also renews the leases of the workers that
do not announce themselves. Knows nothing of where the store is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cache_store.events import AllBlocksCleared, CacheEvent
from cache_store.metadata.base import MetadataError, MetadataStore, WorkerRecord
from service.workers.base import Worker
from service.workers.cache_news import CacheNews

__all__ = ["LEASE_S", "LocationFeed", "record_of"]

LEASE_S = 15.0
RENEW_S = 5.0
_RETRY_S = 1.0
_EVENT_BYTES = 100  # beside its hashes, roughly
_MAX_PENDING_BYTES = 8 * 2**20  # for each worker
_EVENTS_PER_CALL = 256


@dataclass(slots=True)
class _Pending:
    """What a worker told in one life and the store has not been told yet."""

    record: WorkerRecord
    is_announced: bool
    events: list[CacheEvent] = field(default_factory=list)
    num_bytes: int = 0

    def add(self, event: CacheEvent) -> None:
        if isinstance(event, AllBlocksCleared):  # what came before makes no difference now
            self.clear()
        else:
            self.events.append(event)
            self.num_bytes += _size(event)

    def clear(self) -> None:
        self.events = [AllBlocksCleared()]
        self.num_bytes = _EVENT_BYTES

    def take_all(self) -> list[CacheEvent]:
        events, self.events, self.num_bytes = self.events, [], 0
        return events

    def put_back(self, events: list[CacheEvent]) -> None:
        """In front of what has come since."""
        if self.events and isinstance(self.events[0], AllBlocksCleared):
            return
        self.events = events + self.events
        self.num_bytes = sum(map(_size, self.events))


class LocationFeed:
    """``workers`` gives the present ones; ``announces_itself`` tells of a worker's id whether that
    worker renews its own lease. Belongs to one event loop."""

    def __init__(
        self,
        store: MetadataStore,
        workers: Callable[[], Sequence[Worker]],
        announces_itself: Callable[[str], bool] = lambda worker_id: False,
        *,
        max_pending_bytes: int = _MAX_PENDING_BYTES,
        retry_s: float = _RETRY_S,
    ) -> None:
        self._store = store
        self._workers = workers
        self._announces_itself = announces_itself
        self._max_pending_bytes = max_pending_bytes
        self._retry_s = retry_s
        self._pending: dict[str, _Pending] = {}
        self._has_pending = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.num_overflows = 0

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._tell()), asyncio.create_task(self._renew())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def take(self, news: CacheNews) -> None:
        """Never waits. News of a worker that is not known any more are dropped."""
        pending = self._pending.get(news.worker_id)
        if pending is None or pending.record.epoch != news.epoch:
            record = self._record(news.worker_id)
            if record is None or record.epoch != news.epoch:
                return
            pending = _Pending(record, is_announced=self._announces_itself(record.worker_id))
            self._pending[news.worker_id] = pending
        for event in news.events:
            pending.add(event)
        if pending.num_bytes > self._max_pending_bytes:
            pending.clear()
            self.num_overflows += 1
        self._has_pending.set()

    def _record(self, worker_id: str) -> WorkerRecord | None:
        worker = next((w for w in self._workers() if w.worker_id == worker_id), None)
        return None if worker is None else record_of(worker)

    async def _tell(self) -> None:
        while True:
            await self._has_pending.wait()
            self._has_pending.clear()
            known = {worker.worker_id for worker in self._workers()}
            for worker_id in self._pending.keys() - known:
                del self._pending[worker_id]
            results = [await self._tell_of(each) for each in tuple(self._pending.values())]
            if not all(results):
                await asyncio.sleep(self._retry_s)
                self._has_pending.set()

    async def _tell_of(self, pending: _Pending) -> bool:
        """Whether all was told."""
        events = pending.take_all()
        try:
            if not pending.is_announced:  # ahead of the next renewal
                await self._store.renew_worker(pending.record, LEASE_S)
                pending.is_announced = True
            while events:
                await self._store.apply_events(pending.record, events[:_EVENTS_PER_CALL], LEASE_S)
                del events[:_EVENTS_PER_CALL]
        except MetadataError:
            pending.put_back(events)
            return False
        return True

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            for worker in self._workers():
                record = record_of(worker)
                if record is not None and not self._announces_itself(worker.worker_id):
                    with contextlib.suppress(MetadataError):
                        await self._store.renew_worker(record, LEASE_S)


def record_of(worker: Worker) -> WorkerRecord | None:
    """A worker as its gateway knows it; without an endpoint, since that is the gateway's own way
    to it. None before its first Welcome."""
    if worker.card is None:
        return None
    return WorkerRecord(
        worker_id=worker.worker_id,
        epoch=worker.epoch,
        endpoint="",
        fingerprint=worker.card.fingerprint,
    )


def _size(event: CacheEvent) -> int:
    hashes = b"" if isinstance(event, AllBlocksCleared) else event.block_hashes
    return _EVENT_BYTES + len(hashes)
