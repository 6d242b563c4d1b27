"""Metadata within one process: for a gateway that shares it with nobody.

Owns workers, locations and sessions in plain dictionaries, all bounded. With a file, sessions are
read from it at start and written to it when they have changed. Never out of reach.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from cache_store.events import CacheEvent, Tier
from cache_store.metadata.base import BlockLocation, SessionRecord, WorkerRecord
from cache_store.metadata.chunk_changes import fold_events, split_hashes
from cache_store.metadata.session_file import SessionFile
from cache_store.metadata.stats import MetadataStats

__all__ = ["MemoryMetadataStore"]

_RECORD_BYTES = 1_000  # what a record takes beside its history, roughly
_MAX_SAVE_SHARE = 0.05  # of the time
_SAVE_PAUSE_S = 0.001


@dataclass(slots=True)
class _Chunks:
    """What one epoch of a worker holds, the latest told last."""

    ends_at: float
    tiers: OrderedDict[bytes, Tier] = field(default_factory=OrderedDict)


class MemoryMetadataStore:
    """``max_session_bytes`` counts histories and some 1,000 bytes for each record; beyond it and
    beyond ``max_sessions`` the one that was stored longest ago is forgotten. ``file`` is saved at
    most every ``save_s`` seconds and on close. ``clock`` gives seconds since 1970."""

    def __init__(
        self,
        *,
        file: SessionFile | None = None,
        max_sessions: int = 100_000,
        max_session_bytes: int = 256 * 2**20,
        max_chunks: int = 1_000_000,
        save_s: float = 5.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._file = file
        self._max_sessions = max_sessions
        self._max_session_bytes = max_session_bytes
        self._max_chunks = max_chunks
        self._save_s = save_s
        self._clock = clock
        self._workers: dict[str, tuple[WorkerRecord, float]] = {}
        self._chunks: dict[tuple[str, int, str], _Chunks] = {}  # worker id, epoch, fingerprint
        self._sessions: OrderedDict[tuple[str, str], SessionRecord] = OrderedDict()
        self._session_bytes = 0
        self._ids_of: dict[str, list[str]] = {}  # by tenant, in order
        self._expiries: list[tuple[float, str, str]] = []  # a heap; may hold what was changed
        self._num_calls = 0
        self._num_dropped = 0
        self._changed = asyncio.Event()
        self._saver: asyncio.Task[None] | None = None

    @property
    def is_degraded(self) -> bool:
        return False

    @property
    def stats(self) -> MetadataStats:
        return MetadataStats(calls_total=self._num_calls, dropped_total=self._num_dropped)

    async def start(self) -> None:
        if self._file is None:
            return
        for record in await asyncio.to_thread(self._file.load):
            self._store(record)
        self._changed.clear()
        self._saver = asyncio.create_task(self._save_when_changed())

    async def close(self) -> None:
        if self._saver is None or self._file is None:
            return
        self._saver.cancel()
        await asyncio.gather(self._saver, return_exceptions=True)
        self._saver = None
        if self._changed.is_set():
            self._changed.clear()
            await asyncio.to_thread(self._file.save, self._snapshot())

    # ------------------------------------------------------------ workers

    async def renew_worker(self, worker: WorkerRecord, lease_s: float) -> None:
        self._num_calls += 1
        now = self._clock()
        self._workers[worker.worker_id] = (worker, now + lease_s)
        own = (worker.worker_id, worker.epoch, worker.fingerprint)
        for key, chunks in list(self._chunks.items()):
            if key == own:
                chunks.ends_at = now + lease_s
            elif key[0] == worker.worker_id or chunks.ends_at <= now:
                del self._chunks[key]
        for worker_id, (_, ends_at) in list(self._workers.items()):
            if ends_at <= now:
                del self._workers[worker_id]

    async def remove_worker(self, worker_id: str) -> None:
        self._num_calls += 1
        self._workers.pop(worker_id, None)
        for key in [key for key in self._chunks if key[0] == worker_id]:
            del self._chunks[key]

    async def workers(self, fingerprint: str) -> Sequence[WorkerRecord]:
        return [each for each in await self.all_workers() if each.fingerprint == fingerprint]

    async def all_workers(self) -> Sequence[WorkerRecord]:
        self._num_calls += 1
        now = self._clock()
        return [worker for _, (worker, ends_at) in sorted(self._workers.items()) if ends_at > now]

    # ------------------------------------------------------------ locations

    async def apply_events(
        self, worker: WorkerRecord, events: Sequence[CacheEvent], lease_s: float
    ) -> None:
        self._num_calls += 1
        key = (worker.worker_id, worker.epoch, worker.fingerprint)
        chunks = self._chunks.setdefault(key, _Chunks(0.0))
        chunks.ends_at = self._clock() + lease_s
        changes = fold_events(events)
        if changes.is_cleared:
            chunks.tiers.clear()
        for chunk in changes.removed:
            chunks.tiers.pop(chunk, None)
        for chunk, tier in changes.stored.items():
            chunks.tiers[chunk] = tier
            chunks.tiers.move_to_end(chunk)
        while len(chunks.tiers) > self._max_chunks:
            chunks.tiers.popitem(last=False)

    async def locate(self, fingerprint: str, chunk_hashes: bytes) -> Sequence[BlockLocation]:
        now = self._clock()
        found = []
        for worker in await self.workers(fingerprint):
            chunks = self._chunks.get((worker.worker_id, worker.epoch, fingerprint))
            if chunks is None or chunks.ends_at <= now:
                continue
            tiers = []
            for chunk in split_hashes(chunk_hashes):
                tier = chunks.tiers.get(chunk)
                if tier is None:
                    break
                tiers.append(tier)
            if tiers:
                found.append(BlockLocation(worker.worker_id, worker.epoch, tuple(tiers)))
        return found

    # ------------------------------------------------------------ sessions

    async def get_session(self, tenant: str, session_id: str) -> SessionRecord | None:
        self._num_calls += 1
        return self._live(tenant, session_id)

    async def put_session(self, record: SessionRecord, expected_version: int) -> bool:
        self._num_calls += 1
        self._drop_expired()
        stored = self._sessions.get((record.tenant, record.session_id))
        if (stored.version if stored else 0) != expected_version:
            return False
        self._store(msgspec.structs.replace(record, version=expected_version + 1))
        self._changed.set()
        return True

    async def delete_session(self, tenant: str, session_id: str) -> SessionRecord | None:
        self._num_calls += 1
        record = self._live(tenant, session_id)
        self._forget(tenant, session_id)
        self._changed.set()
        return record

    async def list_sessions(
        self, tenant: str, *, cursor: str = "", limit: int = 100
    ) -> tuple[Sequence[SessionRecord], str]:
        self._num_calls += 1
        ids = self._ids_of.get(tenant, [])
        start = bisect.bisect_right(ids, cursor) if cursor else 0
        page = ids[start : start + limit]
        live = (self._live(tenant, session_id) for session_id in page)
        records = [msgspec.structs.replace(record, history=b"") for record in live if record]
        return records, page[-1] if len(page) == limit else ""

    async def num_sessions(self) -> int:
        self._num_calls += 1
        self._drop_expired()
        return len(self._sessions)

    def _live(self, tenant: str, session_id: str) -> SessionRecord | None:
        record = self._sessions.get((tenant, session_id))
        return record if record is not None and record.expires_at > self._clock() else None

    def _store(self, record: SessionRecord) -> None:
        tenant, session_id = key = (record.tenant, record.session_id)
        self._forget(tenant, session_id)
        self._sessions[key] = record
        self._session_bytes += _size(record)
        bisect.insort(self._ids_of.setdefault(tenant, []), session_id)
        heapq.heappush(self._expiries, (record.expires_at, tenant, session_id))
        while (
            len(self._sessions) > self._max_sessions
            or self._session_bytes > self._max_session_bytes
        ):
            self._forget(*next(iter(self._sessions)))
            self._num_dropped += 1
        if len(self._expiries) > 2 * len(self._sessions) + 1_000:
            self._expiries = [(r.expires_at, *key) for key, r in self._sessions.items()]
            heapq.heapify(self._expiries)

    def _forget(self, tenant: str, session_id: str) -> None:
        record = self._sessions.pop((tenant, session_id), None)
        if record is None:
            return
        self._session_bytes -= _size(record)
        ids = self._ids_of[tenant]
        del ids[bisect.bisect_left(ids, session_id)]
        if not ids:
            del self._ids_of[tenant]

    def _drop_expired(self) -> None:
        now = self._clock()
        while self._expiries and self._expiries[0][0] <= now:
            _, tenant, session_id = heapq.heappop(self._expiries)
            if self._live(tenant, session_id) is None:
                self._forget(tenant, session_id)
                self._changed.set()

    # ------------------------------------------------------------ file

    def _snapshot(self) -> list[SessionRecord]:
        self._drop_expired()
        return list(self._sessions.values())

    async def _save_when_changed(self) -> None:
        assert self._file is not None
        while True:
            with contextlib.suppress(TimeoutError):  # sessions run out without any call
                await asyncio.wait_for(self._changed.wait(), timeout=30.0)
            await asyncio.sleep(self._save_s)
            self._drop_expired()
            if not self._changed.is_set():
                continue
            self._changed.clear()
            began = time.monotonic()
            await asyncio.to_thread(self._file.save, self._snapshot(), pause_s=_SAVE_PAUSE_S)
            await asyncio.sleep(min((time.monotonic() - began) / _MAX_SAVE_SHARE, 25.0))


def _size(record: SessionRecord) -> int:
    return _RECORD_BYTES + len(record.history)
