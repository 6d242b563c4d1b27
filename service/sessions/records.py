"""Session records in the metadata store, as the rest of the sessions reads and writes them.

Owns the meaning of a record's times, the compare-and-set loop, and that a store out of reach is
counted. Knows nothing of texts, of blocks or of HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from cache_store.metadata.base import MetadataError, MetadataStore, SessionRecord
from service.sessions.book import SessionBook
from service.sessions.identity import SessionKey
from service.sessions.metrics import SessionMetrics

__all__ = ["SessionRecords", "ends_at", "key_of", "touched", "ttl_of"]

# The store keeps a record for so much longer than it is valid, so that whoever finds it expired
# still learns which blocks it leaves behind.
_GRACE_S = 120.0
_MAX_TRIES = 5

Change = Callable[[SessionRecord], SessionRecord | None]
"""What becomes of a record as it is stored; None leaves it as it is."""


def key_of(record: SessionRecord) -> SessionKey:
    return SessionKey(record.tenant, record.session_id)


def ends_at(record: SessionRecord) -> float:
    """When the session is over unless it is used again."""
    return record.expires_at - _GRACE_S


def ttl_of(record: SessionRecord) -> float:
    return ends_at(record) - record.last_active_at


def touched(record: SessionRecord, now: float, ttl: float | None = None) -> SessionRecord:
    """The record of a session that is active now."""
    ttl = ttl_of(record) if ttl is None else ttl
    return msgspec.structs.replace(record, last_active_at=now, expires_at=now + ttl + _GRACE_S)


class SessionRecords:
    """``clock`` gives seconds since 1970. All methods but :meth:`find` raise MetadataError."""

    def __init__(
        self,
        store: MetadataStore,
        book: SessionBook,
        metrics: SessionMetrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._book = book
        self._metrics = metrics
        self.clock = clock

    async def get(self, key: SessionKey) -> SessionRecord | None:
        """None for an unknown session and for one whose time has run out."""
        record = await self.get_ended(key)
        return None if record is None or ends_at(record) <= self.clock() else record

    async def get_ended(self, key: SessionKey) -> SessionRecord | None:
        """Also of one whose time has run out, as long as the store has it."""
        try:
            return await self._store.get_session(key.tenant, key.session_id)
        except MetadataError:
            self._metrics.store_errors.inc()
            raise

    async def put(self, record: SessionRecord, replaced: SessionRecord | None) -> bool:
        """Whether ``record`` was stored: not if ``replaced`` is no longer what is there."""
        is_stored = await self._put(record, replaced)
        if is_stored:
            self.note(record)
        return is_stored

    async def put_quietly(self, record: SessionRecord, replaced: SessionRecord) -> bool:
        """As :meth:`put`, of a change that is no activity of the session's."""
        is_stored = await self._put(record, replaced)
        if is_stored:
            self._book.note_history(key_of(record), len(record.history))
            self._show()
        return is_stored

    async def _put(self, record: SessionRecord, replaced: SessionRecord | None) -> bool:
        version = 0 if replaced is None else replaced.version
        try:
            return await self._store.put_session(record, version)
        except MetadataError:
            self._metrics.store_errors.inc()
            raise

    async def change(self, key: SessionKey, change: Change) -> SessionRecord | None:
        """Apply ``change`` to whatever is stored; None if there is no such session."""
        for _ in range(_MAX_TRIES):
            record = await self.get(key)
            changed = None if record is None else change(record)
            if record is None or changed is None:
                return record
            if await self.put(changed, record):
                return changed
        raise MetadataError("a session changes too quickly")

    async def delete(self, key: SessionKey) -> SessionRecord | None:
        try:
            record = await self._store.delete_session(key.tenant, key.session_id)
        except MetadataError:
            self._metrics.store_errors.inc()
            raise
        self._book.forget(key)
        self._show()
        return record

    async def page(
        self, tenant: str, cursor: str, limit: int, *, has_ended: bool = False
    ) -> tuple[Sequence[SessionRecord], str]:
        """Without histories, and the cursor of the next page ("" at the end); ``has_ended`` adds
        those whose time has run out."""
        try:
            records, following = await self._store.list_sessions(tenant, cursor=cursor, limit=limit)
        except MetadataError:
            self._metrics.store_errors.inc()
            raise
        now = self.clock()
        live = [record for record in records if has_ended or ends_at(record) > now]
        return live, following

    def note(self, record: SessionRecord) -> None:
        """It was seen as it is stored."""
        key = key_of(record)
        self._book.note(key, record.last_active_at, ends_at(record), len(record.history))
        self._show()

    def _show(self) -> None:
        self._metrics.sessions.set(len(self._book))
        self._metrics.history_bytes.set(self._book.history_bytes)
