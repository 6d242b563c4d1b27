"""Stored responses: what a client can ask for again, and go on from, by a response's id.

Owns where they are: each is a session of its own, under a name that no client can give one, so that
its exact token ids are there for what goes on from it, and its life and its deletion are those of
sessions. The texts are sealed with the history. Knows nothing of what is in them.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

import msgspec

from cache_store.metadata.base import MetadataError, SessionRecord
from service.sessions.history import History
from service.sessions.identity import RESPONSE_PREFIX, SessionKey
from service.sessions.sessions import Sessions
from service.sessions.turn import ModelView, SessionBranch

__all__ = ["FoundResponse", "StoredResponse", "StoredResponses"]

_RESPONSE_ID = re.compile(r"resp_[0-9a-f]{32}")
_log = logging.getLogger("headstart.sessions")


class StoredResponse(msgspec.Struct, frozen=True, array_like=True):
    """JSON texts: the response, the items that it was asked with, and those of what it went on
    from, its own left out."""

    body: bytes
    asked: bytes
    earlier: bytes


@dataclass(frozen=True, slots=True)
class FoundResponse:
    record: SessionRecord
    stored: StoredResponse


class StoredResponses:
    """All methods but :meth:`keep` raise MetadataError while the store does not answer."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    @staticmethod
    def key(tenant: str, response_id: str) -> SessionKey:
        return SessionKey(tenant, RESPONSE_PREFIX + response_id)

    async def find(self, tenant: str, response_id: str) -> FoundResponse | None:
        """None for one that is unknown, over, deleted, or not at its end."""
        if not _RESPONSE_ID.fullmatch(response_id):
            return None
        record = await self._sessions.records.get(self.key(tenant, response_id))
        history = None if record is None else History.decode(record.history, None)
        if record is None or history is None or not history.attachment:
            return None
        try:
            stored = msgspec.msgpack.decode(history.attachment, type=StoredResponse)
        except msgspec.DecodeError:
            return None
        return FoundResponse(record, stored)

    async def keep(
        self, key: SessionKey, stored: StoredResponse, branch: SessionBranch, model: ModelView
    ) -> bool:
        """Keep it with the turn that ``key`` names, which has ended; whether it is kept."""
        attachment = msgspec.msgpack.encode(stored)

        def attached(record: SessionRecord) -> SessionRecord | None:
            history = History.decode(record.history, model.fingerprint)
            history = history or History.empty(model.fingerprint, b"")
            changed = msgspec.structs.replace(history, attachment=attachment)
            return msgspec.structs.replace(record, history=changed.encode())

        try:
            record = await self._sessions.records.change(key, attached)
            if branch.origin is not None:
                await self._sessions.relate(branch.origin, key.session_id, model)
        except MetadataError:
            _log.warning("a response was not stored: the metadata store did not answer")
            return False
        return record is not None  # else it was deleted meanwhile, or its turn was not kept

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Whether there was one."""
        if await self.find(tenant, response_id) is None:
            return False
        return await self._sessions.delete(self.key(tenant, response_id))
