"""The bodies of /v1/cache/explain.

Owns their fields. Knows nothing of how a reason is found.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from service.schemas.bodies import CachedTokens
from service.schemas.cache_explanation import CacheExplanation

__all__ = [
    "MAX_LISTED",
    "BreakerView",
    "CacheExplanationList",
    "ExplainedRequest",
    "ListLimit",
    "TimelineView",
]

MAX_LISTED = 1000  # requests
ListLimit = Annotated[int, msgspec.Meta(ge=1, le=MAX_LISTED)]


class TimelineView(msgspec.Struct, frozen=True):
    """Seconds; null while not known."""

    queue: float | None
    load: float | None
    prefill: float | None
    decode: float | None
    ttft: float | None


class ExplainedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``started_at`` is in seconds since 1970. ``explanation`` is null before its admission, and of
    a request that was none."""

    id: str
    started_at: float
    tenant: str
    session_id: str | None
    model: str
    outcome: str
    prompt_tokens: int
    cached_tokens: int
    cached_tokens_by_tier: CachedTokens
    completion_tokens: int
    timeline: TimelineView
    explanation: CacheExplanation | None
    object: str = "cache.explanation"


class BreakerView(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of divergence in one field; ``share`` is of the tenant's requests, ``example`` the
    latest request that it befell."""

    tenant: str
    kind: str
    field: str
    requests: int
    share: float
    tokens_lost: int
    tokens_per_request: int
    last_at: float
    example: str
    suggestion: str


class CacheExplanationList(msgspec.Struct, frozen=True):
    """The latest request first, what breaks most first."""

    data: tuple[ExplainedRequest, ...]
    breakers: tuple[BreakerView, ...]
    object: str = "list"
