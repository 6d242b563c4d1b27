"""What happens to sessions that nobody uses: put to rest, over, or one too many.

Owns the timed work, a bounded amount at a time. Acts on what the store says at that moment, since
another gateway may have served the session meanwhile. Knows nothing of requests.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import msgspec

from cache_store.metadata.base import MetadataError, SessionRecord
from service.sessions.blocks import SessionBlocks
from service.sessions.book import SessionBook
from service.sessions.branches import num_common_tokens
from service.sessions.history import History
from service.sessions.identity import SessionKey
from service.sessions.metrics import SessionMetrics
from service.sessions.records import SessionRecords, ends_at

__all__ = ["SessionReaper"]

_TICK_S = 1.0
_NUM_PER_TICK = 200  # of each kind of work
_AGAIN_S = 60.0
_log = logging.getLogger("headstart.sessions")


class SessionReaper:
    """``is_busy`` tells of a session with a request under way; ``delete`` removes one."""

    def __init__(
        self,
        book: SessionBook,
        records: SessionRecords,
        blocks: SessionBlocks,
        metrics: SessionMetrics,
        *,
        is_busy: Callable[[SessionKey], bool],
        delete: Callable[[SessionKey], Awaitable[bool]],
    ) -> None:
        self._book = book
        self._records = records
        self._blocks = blocks
        self._metrics = metrics
        self._is_busy = is_busy
        self._delete = delete
        self._to_take_up: list[tuple[str, str]] = []

    def take_up(self, tenant: str) -> None:
        """See to the sessions of ``tenant`` that are in the store already."""
        self._to_take_up.append((tenant, ""))

    async def run(self) -> None:
        while True:
            await self._blocks.wait_for_drops(_TICK_S)
            try:
                await self.tick()
            except MetadataError:
                pass  # counted where it arose, and the work comes up again
            except Exception as error:  # it must not end the deletions that were promised
                _log.error("the upkeep of sessions failed: %s", type(error).__name__)

    async def tick(self) -> None:
        """One round of everything that is due."""
        await self._blocks.work_off_drops()
        now = self._records.clock()
        for key in self._book.take_idle(now, _NUM_PER_TICK):
            await self._put_to_rest(key)  # if it fails, eviction does it in time
        for key in self._book.take_ended(now, _NUM_PER_TICK):
            await self._end(key)
        for key in self._book.excess_sessions(_NUM_PER_TICK):
            await self._delete(key)
        for key in self._book.excess_histories(_NUM_PER_TICK):
            await self._give_up_history(key)
        await self._take_up_page()

    async def _put_to_rest(self, key: SessionKey) -> None:
        """Its blocks leave the device, but for what a fork that is in use shares with it."""
        record = await self._fresh(key)
        if record is None or self._is_busy(key) or self._book.is_awake(key):
            return
        history = History.decode(record.history, None)
        if history is None or not history.ids:
            return
        others = [
            other.token_ids
            for session_id in history.relatives
            if self._book.is_awake(relative := SessionKey(key.tenant, session_id))
            and (stored := await self._records.get(relative)) is not None
            and (other := History.decode(stored.history, history.model)) is not None
        ]
        for token_ids in history.sequences():
            keep = max((num_common_tokens(token_ids, other) for other in others), default=0)
            await self._blocks.demote(record.worker_id, token_ids, record.cache_salt, keep)

    async def _end(self, key: SessionKey) -> None:
        self._book.defer_end(key, self._records.clock() + _AGAIN_S)  # unless all goes well
        record = await self._fresh(key)
        if record is not None and ends_at(record) > self._records.clock():
            self._book.defer_end(key, ends_at(record))
        elif record is not None and not self._is_busy(key):
            await self._delete(key)

    async def _give_up_history(self, key: SessionKey) -> None:
        record = await self._fresh(key)
        if record is None or self._is_busy(key):
            self._book.note_history(key, 0)
            return
        bare = msgspec.structs.replace(record, history=b"")
        if await self._records.put_quietly(bare, record):
            self._metrics.histories_given_up.inc()
            # Nobody could name these blocks any more when the session is deleted.
            history = History.decode(record.history, None)
            for token_ids in history.sequences() if history is not None else ():
                self._blocks.drop(token_ids, record.cache_salt)

    async def _fresh(self, key: SessionKey) -> SessionRecord | None:
        """As it is stored now. One that another gateway served meanwhile is noted as such."""
        record = await self._records.get_ended(key)
        if record is None:
            self._book.forget(key)
        elif self._book.is_older(key, record.last_active_at):
            self._records.note(record)
        return record

    async def _take_up_page(self) -> None:
        """Sessions that were there before this gateway: their time may run out under it."""
        if not self._to_take_up:
            return
        tenant, cursor = self._to_take_up.pop()
        records, following = await self._records.page(tenant, cursor, _NUM_PER_TICK)
        for record in records:
            if not self._book.is_known(SessionKey(tenant, record.session_id)):
                self._records.note(record)
        if following:
            self._to_take_up.append((tenant, following))
