"""A conversation as a chat template is asked to write it.

Owns what belongs to one: its messages, the tools on offer, and how its text ends. Knows nothing of
templates or of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from service.schemas.chat import Message

__all__ = ["Conversation", "Ending"]


class Ending(Enum):
    """What stands at the end of the prompt."""

    NEW_TURN = auto()  # the assistant's turn is opened
    CONTINUED = auto()  # the last message, to be gone on with
    CLOSED = auto()  # the last message and its end


@dataclass(frozen=True, slots=True)
class Conversation:
    """``tools`` are function definitions as JSON objects; ``variables`` go to the template."""

    messages: Sequence[Message]
    ending: Ending = Ending.NEW_TURN
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
