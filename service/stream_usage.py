"""When a stream of OpenAI's form says what was used."""

from __future__ import annotations

from enum import Enum, auto

from msgspec import UNSET, UnsetType

from service.schemas.bodies import Usage

__all__ = ["StreamUsage"]


class StreamUsage(Enum):
    NEVER = auto()
    LAST = auto()  # in a chunk of its own at the end; null in those before
    ALWAYS = auto()  # and in each chunk, so far

    def shown(self, usage: Usage) -> Usage | UnsetType | None:
        """What a chunk before the end says of it."""
        match self:
            case StreamUsage.NEVER:
                return UNSET
            case StreamUsage.LAST:
                return None
            case StreamUsage.ALWAYS:
                return usage
