"""The bodies of the session and prewarm routes, and how a session is shown.

Owns their fields and limits. Knows nothing of stores or of workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from service.errors import InvalidRequest
from service.schemas.bodies import Usage
from service.schemas.parsing import convert, parse_object
from service.schemas.sampling import Priority, Retention, check_salt

__all__ = [
    "MAX_PAGE",
    "CreateSession",
    "DataDeleted",
    "ForkSession",
    "PageLimit",
    "PrewarmPrefix",
    "PrewarmSession",
    "Prewarmed",
    "SessionDeleted",
    "SessionList",
    "SessionView",
    "TierCounts",
    "parse",
]

MAX_TTL = 30 * 86_400  # seconds
MAX_PAGE = 100  # sessions

_T = TypeVar("_T")
PageLimit = Annotated[int, msgspec.Meta(ge=1, le=MAX_PAGE)]
Ttl = Annotated[float, msgspec.Meta(gt=0, le=MAX_TTL)]


class CreateSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    session_id: str | None = None
    ttl: Ttl | None = None  # seconds without a request until it is over
    retention: Retention = 0.0
    priority: Priority = 0
    cache_salt: str | None = None
    model: str | None = None
    messages: list[Any] | None = None  # to be computed ahead of the first request


class ForkSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    session_id: str | None = None


class PrewarmSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    messages: list[Any] | None = None


class PrewarmPrefix(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One of ``messages`` and ``prompt``; ``tools`` only with the former."""

    model: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    prompt: Any = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: Priority | None = None
    retention: Retention | None = None


def parse(body: bytes, into: type[_T]) -> _T:
    """An empty body is an empty object. Raises InvalidRequest."""
    fields: Mapping[str, Any] = parse_object(body) if body else {}
    given = convert({name: value for name, value in fields.items() if value is not None}, into)
    check_salt(getattr(given, "cache_salt", None))
    if isinstance(given, PrewarmPrefix) and (given.messages is None) == (given.prompt is None):
        raise InvalidRequest("messages: give either messages or prompt.", param="messages")
    return given


class TierCounts(msgspec.Struct, frozen=True):
    """Blocks."""

    device: int
    host: int
    disk: int


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds since 1970. ``num_tokens`` are those of the kept history."""

    id: str
    created_at: float
    last_active_at: float
    expires_at: float
    priority: int
    retention: float
    num_tokens: int
    blocks: TierCounts
    hit_rate: float | None  # by tokens, over all its requests; null before the first
    splicing: str  # "on", or why turns are always encoded anew
    object: str = "session"


class SessionList(msgspec.Struct, frozen=True):
    data: tuple[SessionView, ...]
    next_cursor: str | None
    object: str = "list"


class SessionDeleted(msgspec.Struct, frozen=True):
    id: str
    deleted: bool = True
    object: str = "session.deleted"


class DataDeleted(msgspec.Struct, frozen=True):
    num_sessions: int
    object: str = "tenant.data.deleted"


class Prewarmed(msgspec.Struct, frozen=True):
    usage: Usage
    object: str = "cache.prewarm"
