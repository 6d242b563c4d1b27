"""Why a request found no more in the cache, as it is told in an answer and by the routes.

Owns the form. Knows nothing of how a reason is found.
"""

from __future__ import annotations

import msgspec

__all__ = ["CacheExplanation", "DepartedView", "TextsView"]


class DepartedView(msgspec.Struct, frozen=True):
    """``at`` is in seconds since 1970, null where it is not known; ``tier`` is where the blocks
    were last, empty where that is not known."""

    cause: str
    tier: str
    at: float | None


class TextsView(msgspec.Struct, frozen=True):
    """Before the first divergent token, and from there on: earlier, and now."""

    before: str
    earlier: str
    now: str


class CacheExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """``first_divergent_token`` is an index into the prompt; ``texts`` are null where the caller
    may not see them."""

    request_id: str
    reason: str
    kind: str | None
    prompt_tokens: int
    matched_tokens: int
    first_divergent_token: int | None
    field: str | None
    tokens_lost: int
    compared_with: str | None
    evicted: DepartedView | None
    texts: TextsView | None
    suggestion: str | None

    @property
    def header(self) -> str:
        """The same in one line of ASCII, without texts."""
        parts = [self.reason]
        for name, value in (
            ("kind", self.kind),
            ("field", self.field),
            ("token", self.first_divergent_token),
            ("lost", self.tokens_lost or None),
        ):
            if value is not None:
                parts.append(f"{name}={value}")
        return "; ".join(parts)
