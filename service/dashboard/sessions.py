"""The table of sessions: pages of it, searched and put in order here, and what may be done to one.

Owns the form of /dashboard/data/sessions. It is the operator's: it knows no tenant's walls. How
sessions live is service.sessions' knowledge.
"""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec

from cache_store.metadata.base import MetadataError
from service.errors import NotFound
from service.gateway import Gateway
from service.sessions.history import History
from service.sessions.identity import SessionKey, is_response_session

__all__ = [
    "MAX_ROWS",
    "SessionAction",
    "SessionDone",
    "SessionPage",
    "SessionRow",
    "act_on_session",
    "session_page",
]

MAX_ROWS = 100


class Residency(msgspec.Struct, frozen=True):
    """Blocks of a session's history by tier, over all workers."""

    device: int
    host: int
    disk: int


class SessionRow(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds since 1970. ``num_tokens`` are those of the kept history, which ``blocks``
    would hold whole as ``num_blocks``."""

    tenant: str
    session_id: str
    created_at: float
    last_active_at: float
    num_tokens: int
    num_blocks: int
    residency: Residency
    hit_rate: float | None
    worker_id: str


class SessionPage(msgspec.Struct, frozen=True):
    """``num_found`` sessions match, of ``num_sessions``."""

    num_sessions: int
    num_found: int
    offset: int
    rows: tuple[SessionRow, ...]


class SessionAction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    action: Literal["fork", "evict", "delete"]
    tenant: str
    session_id: str


class SessionDone(msgspec.Struct, frozen=True):
    """``session_id`` is that of the fork, where one was made."""

    action: str
    session_id: str


async def session_page(gateway: Gateway, search: str, offset: int, limit: int) -> SessionPage:
    """Sessions whose id or tenant has ``search`` in it, the most recently active first. Those that
    the metadata store does not find any more, or cannot be asked for, are left out of the rows."""
    everything = gateway.sessions.latest()
    known = [key for key in everything if not is_response_session(key.session_id)]
    wanted = search.casefold()
    found = known if not wanted else await asyncio.to_thread(_matching, known, wanted)
    rows = await asyncio.gather(*(_row(gateway, key) for key in found[offset : offset + limit]))
    present = tuple(row for row in rows if row is not None)
    return SessionPage(len(known), len(found), offset, present)


async def act_on_session(gateway: Gateway, asked: SessionAction) -> SessionDone:
    """Raises NotFound, Unavailable while no model is served, and MetadataError."""
    key = SessionKey(asked.tenant, asked.session_id)
    if is_response_session(key.session_id):
        raise _unknown()
    if asked.action == "delete":
        is_done = await gateway.sessions.delete(key)
    elif asked.action == "evict":
        is_done = await gateway.sessions.evict(key)
    else:
        return await _fork(gateway, key)
    if not is_done:
        raise _unknown()
    return SessionDone(asked.action, key.session_id)


async def _fork(gateway: Gateway, key: SessionKey) -> SessionDone:
    view = gateway.served_model().view
    record = await gateway.sessions.records.get(key)
    if record is None:
        raise _unknown()
    forked = await gateway.sessions.fork(record, None, view)
    assert forked is not None, "a random id is in use already"
    return SessionDone("fork", forked.session_id)


def _matching(keys: list[SessionKey], wanted: str) -> list[SessionKey]:
    return [key for key in keys if wanted in f"{key.session_id}\n{key.tenant}".casefold()]


async def _row(gateway: Gateway, key: SessionKey) -> SessionRow | None:
    try:
        record = await gateway.sessions.records.get(key)
    except MetadataError:
        return None
    if record is None:
        return None
    served = gateway.served
    num_tokens, num_blocks, residency = 0, 0, Residency(0, 0, 0)
    if served is not None:
        history = History.decode(record.history, served.card.fingerprint)
        num_tokens = 0 if history is None else len(history.token_ids)
        num_blocks = -(-num_tokens // served.card.block_size)
        blocks = await gateway.sessions.tiers_of(record, served.view)
        residency = Residency(blocks.device, blocks.host, blocks.disk)
    asked, cached = record.num_prompt_tokens_total, record.num_cached_tokens_total
    return SessionRow(
        tenant=key.tenant,
        session_id=key.session_id,
        created_at=record.created_at,
        last_active_at=record.last_active_at,
        num_tokens=num_tokens,
        num_blocks=num_blocks,
        residency=residency,
        hit_rate=cached / asked if asked else None,
        worker_id=record.worker_id,
    )


def _unknown() -> NotFound:
    return NotFound("There is no such session.", code="session_not_found")
