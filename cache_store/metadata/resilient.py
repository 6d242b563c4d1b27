"""A metadata store that goes on while its Redis is out of reach.

Owns the sessions that could not be written: they are kept in memory, within bounds, read from
there, and written once Redis answers again, with compare-and-set. Where another gateway has changed
a session meanwhile the stored one stays, and the conflict is counted. Everything else passes on
to the Redis store, and fails as that does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from cache_store.events import CacheEvent
from cache_store.metadata.base import BlockLocation, MetadataError, SessionRecord, WorkerRecord
from cache_store.metadata.redis import RedisMetadataStore, new_write_id
from cache_store.metadata.stats import MetadataStats

__all__ = ["ResilientMetadataStore"]

_log = logging.getLogger("headstart.metadata")
_RECORD_BYTES = 1_000  # what a record takes beside its history, roughly
_RETRY_S = 1.0
_MAX_WRITE_IDS = 64


@dataclass(slots=True)
class _Kept:
    """The latest of a session, and the version that Redis has if none of the writes got there."""

    record: SessionRecord
    stored_version: int
    write_ids: list[bytes] = field(default_factory=list)  # the latest first
    is_deleted: bool = False

    @property
    def num_bytes(self) -> int:
        return _RECORD_BYTES + len(self.record.history)


class ResilientMetadataStore:
    """``store`` is started and closed with it. ``clock`` gives seconds since 1970."""

    def __init__(
        self,
        store: RedisMetadataStore,
        *,
        max_kept: int = 10_000,
        max_kept_bytes: int = 64 * 2**20,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._max_kept = max_kept
        self._max_kept_bytes = max_kept_bytes
        self._clock = clock
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()
        self._kept_bytes = 0
        self._num_dropped = 0
        self._num_conflicts = 0
        self._has_kept = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None

    @property
    def is_degraded(self) -> bool:
        return self._store.is_degraded

    @property
    def stats(self) -> MetadataStats:
        return replace(
            self._store.stats,
            num_kept=len(self._kept),
            kept_bytes=self._kept_bytes,
            dropped_total=self._num_dropped,
            conflicts_total=self._num_conflicts,
        )

    async def start(self) -> None:
        self._store.link.on_recovery(self._write_kept)
        await self._store.start()
        self._writer = asyncio.create_task(self._retry())

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
        if self._kept and not self.is_degraded:
            await self._write_kept()
        if self._kept:
            _log.warning("%d sessions could not be written to Redis", len(self._kept))
        await self._store.close()

    # ------------------------------------------------------------ passed through

    async def renew_worker(self, worker: WorkerRecord, lease_s: float) -> None:
        await self._store.renew_worker(worker, lease_s)

    async def remove_worker(self, worker_id: str) -> None:
        await self._store.remove_worker(worker_id)

    async def workers(self, fingerprint: str) -> Sequence[WorkerRecord]:
        return await self._store.workers(fingerprint)

    async def all_workers(self) -> Sequence[WorkerRecord]:
        return await self._store.all_workers()

    async def apply_events(
        self, worker: WorkerRecord, events: Sequence[CacheEvent], lease_s: float
    ) -> None:
        await self._store.apply_events(worker, events, lease_s)

    async def locate(self, fingerprint: str, chunk_hashes: bytes) -> Sequence[BlockLocation]:
        return await self._store.locate(fingerprint, chunk_hashes)

    async def list_sessions(
        self, tenant: str, *, cursor: str = "", limit: int = 100
    ) -> tuple[Sequence[SessionRecord], str]:
        return await self._store.list_sessions(tenant, cursor=cursor, limit=limit)

    async def num_sessions(self) -> int:
        return await self._store.num_sessions()

    # ------------------------------------------------------------ sessions

    async def get_session(self, tenant: str, session_id: str) -> SessionRecord | None:
        kept = self._kept.get((tenant, session_id))
        if kept is not None:
            return kept.record if kept.record.expires_at > self._clock() else None
        return await self._store.get_session(tenant, session_id)

    async def put_session(self, record: SessionRecord, expected_version: int) -> bool:
        """True also for one that is kept; whether Redis agrees shows when it answers again."""
        key = (record.tenant, record.session_id)
        write_id = new_write_id()
        if key not in self._kept:
            try:
                return await self._store.write_session(
                    record, expected_version, expected_version + 1, (write_id,)
                )
            except MetadataError:
                pass
        return self._keep(record, expected_version, write_id)

    async def delete_session(self, tenant: str, session_id: str) -> SessionRecord | None:
        """Raises MetadataError while Redis is out of reach: then the session is not deleted
        there, and whoever asked has to ask again."""
        kept = self._kept.get((tenant, session_id))
        if kept is not None:
            kept.is_deleted = True
            self._forget((tenant, session_id))
        stored = await self._store.delete_session(tenant, session_id)
        return kept.record if kept is not None else stored

    # ------------------------------------------------------------ what is kept

    def _keep(self, record: SessionRecord, expected_version: int, write_id: bytes) -> bool:
        key = (record.tenant, record.session_id)
        kept = self._kept.get(key)
        if kept is not None and kept.record.version != expected_version:
            return False
        if _RECORD_BYTES + len(record.history) > self._max_kept_bytes:
            self._num_dropped += 1  # rather than all the others
            raise MetadataError("Redis is out of reach, and the session is too large to be kept")
        latest = msgspec.structs.replace(record, version=expected_version + 1)
        if kept is None:
            kept = self._kept[key] = _Kept(latest, expected_version)
        else:
            self._kept_bytes -= kept.num_bytes
            kept.record = latest
        kept.write_ids = [write_id, *kept.write_ids][:_MAX_WRITE_IDS]
        self._kept_bytes += kept.num_bytes
        self._kept.move_to_end(key)
        self._has_kept.set()
        while len(self._kept) > self._max_kept or self._kept_bytes > self._max_kept_bytes:
            self._forget(next(iter(self._kept)))
            self._num_dropped += 1
        return True

    def _forget(self, key: tuple[str, str]) -> None:
        kept = self._kept.pop(key)
        self._kept_bytes -= kept.num_bytes

    async def _retry(self) -> None:
        """A call may fail without opening the breaker; nobody tells when that is over."""
        while True:
            await self._has_kept.wait()
            await asyncio.sleep(_RETRY_S)
            if not self.is_degraded:
                await self._write_kept()
            if not self._kept:
                self._has_kept.clear()

    async def _write_kept(self) -> None:
        """The oldest first, until all are written or Redis fails again."""
        for key, kept in list(self._kept.items()):
            if self._kept.get(key) is not kept:
                continue  # given up or written meanwhile
            if kept.record.expires_at <= self._clock():
                self._forget(key)
                self._num_dropped += 1
                continue
            try:
                await self._write(key, kept)
            except MetadataError:
                return

    async def _write(self, key: tuple[str, str], kept: _Kept) -> None:
        record = kept.record
        is_stored = await self._store.write_session(
            record, kept.stored_version, record.version, tuple(kept.write_ids)
        )
        if kept.is_deleted:  # while it was being written
            await self._store.delete_session(*key)
        if self._kept.get(key) is not kept:
            return
        if not is_stored:
            self._num_conflicts += 1
            self._forget(key)
        elif kept.record.version == record.version:
            self._forget(key)
        else:  # it has gone on meanwhile
            kept.stored_version = record.version
