"""The sessions of one gateway: begun by requests, and created, forked and deleted by their owners.

Owns how the parts are put together, and which turns are under way. Knows nothing of HTTP, of
templates or of how a request is generated.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from cache_store.metadata.base import MetadataError, MetadataStore, SessionRecord
from service.sessions.blocks import SessionBlocks, TierBlocks
from service.sessions.book import SessionBook, SessionLimits
from service.sessions.branches import num_common_tokens
from service.sessions.history import History
from service.sessions.identity import SessionKey
from service.sessions.metrics import SessionMetrics
from service.sessions.reaper import SessionReaper
from service.sessions.records import SessionRecords, ends_at, key_of, touched, ttl_of
from service.sessions.turn import ModelView, SessionBranch, Turn, TurnStart
from service.tenants.directory import TenantDirectory
from service.workers.base import Worker

__all__ = ["SessionSettings", "Sessions"]

TokenIds = NDArray[np.int32]  # 1-D


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """What a session is created with. Times in seconds; None is the gateway's default.
    ``cache_salt`` is the client's own."""

    ttl: float | None = None
    retention: float = 0.0
    priority: int = 0
    cache_salt: str = ""


class Sessions:
    """``store`` is started before and closed after. ``workers`` gives all that are known.
    ``clock`` gives seconds since 1970. ``on_deleted`` is told the tenant and the id of a session
    that is deleted, None for all of the tenant's."""

    def __init__(
        self,
        store: MetadataStore,
        limits: SessionLimits,
        metrics: SessionMetrics,
        workers: Callable[[], Sequence[Worker]],
        tenants: TenantDirectory,
        clock: Callable[[], float],
        on_deleted: Callable[[str, str | None], None] = lambda tenant, session_id: None,
    ) -> None:
        self._on_deleted = on_deleted
        self._limits = limits
        self._metrics = metrics
        self._tenants = tenants
        self._taken_up: set[str] = set()
        self._book = SessionBook(limits, lambda tenant: tenants.tenant(tenant).caps.max_sessions)
        self.records = SessionRecords(store, self._book, metrics, clock)
        self.blocks = SessionBlocks(workers, clock, metrics.drops_given_up.inc)
        self._turns: dict[SessionKey, set[Turn]] = {}
        self._reaper = SessionReaper(
            self._book,
            self.records,
            self.blocks,
            metrics,
            is_busy=lambda key: key in self._turns,
            delete=self.delete,
        )
        self.take_up()
        self._running: asyncio.Task[None] | None = None

    def take_up(self) -> None:
        """See to the stored sessions of tenants that were not there before."""
        for tenant in self._tenants.tenants:
            if tenant.tenant_id not in self._taken_up:
                self._taken_up.add(tenant.tenant_id)
                self._reaper.take_up(tenant.tenant_id)

    def start(self) -> None:
        self._running = asyncio.create_task(self._reaper.run(), name="headstart-session-reaper")

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self.blocks.close()

    # ------------------------------------------------------------ turns

    async def begin_turn(
        self,
        key: SessionKey,
        model: ModelView,
        cache_salt: str | None,
        branch: SessionBranch | None = None,
    ) -> Turn:
        """A request of ``key`` has come, of a session that is new where it is a ``branch``, with
        the client's own ``cache_salt``, else the session's stands. Its stored prefix is called back
        at once, long before the request itself is ready. Never raises for the store's sake."""
        tenant = self._tenants.tenant(key.tenant)
        record, is_read = None, True
        try:
            record = await self.records.get_ended(key) if branch is None else None
            if record is not None and ends_at(record) <= self.records.clock():
                record = await self._unless_over(record)
        except MetadataError:
            is_read = False
        source = record if branch is None else branch.origin
        stored_salt = "" if source is None else tenant.client_salt(source.cache_salt)
        salt = tenant.namespace_salt(cache_salt or stored_salt)
        turn = Turn(
            key,
            TurnStart(
                record=record,
                is_read=is_read,
                cache_salt=salt,
                ttl=self._limits.ttl,
                caps=tenant.caps,
                branch=branch,
            ),
            model,
            self.records,
            drop=self.blocks.drop,
            in_background=self.blocks.in_background,
            on_conflict=self._metrics.conflicts.inc,
            on_end=self._end_turn,
        )
        self._turns.setdefault(key, set()).add(turn)
        if source is not None and len(turn.stored_ids) and source.cache_salt == salt:
            self.blocks.prefetch(source.worker_id, turn.stored_ids, salt)
        return turn

    async def _unless_over(self, record: SessionRecord) -> SessionRecord | None:
        """Of a session whose time ran out: it is over, unless a request of it still runs."""
        key = key_of(record)
        if key in self._turns:
            return record
        await self.delete(key)
        return None

    def count_turn(self, turn: Turn) -> None:
        self._metrics.turn(turn.history)

    def _end_turn(self, turn: Turn) -> None:
        turns = self._turns.get(turn.key, set())
        turns.discard(turn)
        if not turns:
            self._turns.pop(turn.key, None)

    # ------------------------------------------------------------ what owners ask for
    # All of these raise MetadataError while the store does not answer.

    async def create(
        self, tenant: str, session_id: str | None, settings: SessionSettings
    ) -> SessionRecord | None:
        """None if there is one of that id."""
        now = self.records.clock()
        key = SessionKey(tenant, session_id or f"s-{secrets.token_hex(12)}")
        blank = SessionRecord(
            tenant=tenant,
            session_id=key.session_id,
            version=0,
            created_at=now,
            last_active_at=now,
            expires_at=now,
            priority=settings.priority,
            retention_s=settings.retention,
            cache_salt=self._tenants.tenant(tenant).namespace_salt(settings.cache_salt),
        )
        record = touched(blank, now, settings.ttl or self._limits.ttl)
        return await self._put_new(record)

    async def fork(
        self, record: SessionRecord, session_id: str | None, model: ModelView
    ) -> SessionRecord | None:
        """A session with the same history and settings; None if there is one of that id."""
        now = self.records.clock()
        key = SessionKey(record.tenant, session_id or f"s-{secrets.token_hex(12)}")
        content = b""
        history = History.decode(record.history, model.fingerprint)
        if history is not None:
            content = history.forked(record.session_id).encode()
        forked = await self._put_new(
            touched(
                msgspec.structs.replace(
                    record, session_id=key.session_id, created_at=now, history=content
                ),
                now,
                ttl_of(record),
            )
        )
        if forked is not None and history is not None:
            await self.relate(record, key.session_id, model)
        return forked

    async def relate(self, record: SessionRecord, session_id: str, model: ModelView) -> None:
        """Another session goes on with what ``record`` has: its deletion leaves that alone."""
        await self.records.change(key_of(record), _with_relative(session_id, model))

    async def _put_new(self, record: SessionRecord) -> SessionRecord | None:
        key = key_of(record)
        replaced = await self.records.get_ended(key)
        if replaced is not None:
            if await self.records.get(key) is not None:
                return None
            await self.delete(key)  # its time had run out
        record = msgspec.structs.replace(record, version=0)
        if not await self.records.put(record, None):
            return None
        return msgspec.structs.replace(record, version=1)

    async def touch(self, key: SessionKey) -> None:
        now = self.records.clock()
        await self.records.change(key, lambda record: touched(record, now))

    async def delete(self, key: SessionKey) -> bool:
        """Whether there was one. What workers hold for it alone is removed soon after; a request
        under way is answered, and not remembered."""
        self._on_deleted(key.tenant, key.session_id)
        turns = tuple(self._turns.get(key, ()))
        for turn in turns:
            turn.forget()
        record = await self.records.delete(key)
        if record is not None:
            await self._drop_blocks(record)
        return record is not None or bool(turns)

    def latest(self) -> list[SessionKey]:
        """All that this gateway knows, the most recently active first."""
        return self._book.latest()

    async def evict(self, key: SessionKey) -> bool:
        """Whether there is one. What workers hold for it alone is removed soon after; the session
        goes on, and its next turn is computed anew."""
        record = await self.records.get(key)
        if record is not None:
            await self._drop_blocks(record)
        return record is not None

    async def delete_all(self, tenant: str) -> int:
        """How many of the tenant's sessions there were."""
        num_deleted, cursor, is_last = 0, "", False
        keys = [key for key in self._turns if key.tenant == tenant]
        while True:
            for key in keys:
                num_deleted += await self.delete(key)
            if is_last:
                self._on_deleted(tenant, None)
                return num_deleted
            page, cursor = await self.records.page(tenant, cursor, 200, has_ended=True)
            keys, is_last = [key_of(record) for record in page], not cursor

    async def tiers_of(self, record: SessionRecord, model: ModelView) -> TierBlocks:
        history = History.decode(record.history, model.fingerprint)
        if history is None or not history.ids:
            return TierBlocks()
        return await self.blocks.inspect(history.token_ids, record.cache_salt, model.block_size)

    # ------------------------------------------------------------ deletion

    async def _drop_blocks(self, record: SessionRecord) -> None:
        """All it was ever served with, except what a fork of it goes on with."""
        history = History.decode(record.history, None)
        if history is None:
            return
        others = await self._relatives(record, history)
        for token_ids in history.sequences():
            keep = max((num_common_tokens(token_ids, other) for other in others), default=0)
            self.blocks.drop(token_ids, record.cache_salt, keep)

    async def _relatives(self, record: SessionRecord, history: History) -> list[TokenIds]:
        """What its forks go on with in the same namespace."""
        found = []
        for session_id in history.relatives:
            try:
                relative = await self.records.get(SessionKey(record.tenant, session_id))
            except MetadataError:
                break
            if relative is None or relative.cache_salt != record.cache_salt:
                continue
            other = History.decode(relative.history, history.model)
            if other is not None:
                found.append(other.token_ids)
        return found


def _with_relative(
    session_id: str, model: ModelView
) -> Callable[[SessionRecord], SessionRecord | None]:
    def change(record: SessionRecord) -> SessionRecord | None:
        history = History.decode(record.history, model.fingerprint)
        if history is None:
            return None
        changed = history.with_relative(session_id)
        return msgspec.structs.replace(record, history=changed.encode())

    return change
