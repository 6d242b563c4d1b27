"""One prompt beside an earlier one that the client names: which part of the request is another.

Owns the words of that. They are coarser than those of an explanation, as other APIs have them, and
need no text. Knows nothing of how these APIs write them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from service.conversation import Conversation
from service.diagnostics.comparison import num_common
from service.diagnostics.trace import TracedPrompt
from service.schemas.chat import DeveloperMessage, Message, SystemMessage

__all__ = ["Changed", "PromptComparison", "compare_prompts"]


class Changed(StrEnum):
    """The first that is true."""

    NOT_FOUND = "not_found"  # nothing is known of the earlier one, or not any more
    MODEL = "model"
    UNKNOWN = "unknown"  # nothing that could be named
    TOOLS = "tools"
    SYSTEM = "system"
    MESSAGES = "messages"  # an earlier one differs: more than some were appended
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class PromptComparison:
    """``num_common`` tokens are the same; ``num_missed`` of the earlier prompt's come no more."""

    changed: Changed
    num_common: int = 0
    num_missed: int = 0


def compare_prompts(prompt: TracedPrompt, earlier: TracedPrompt | None) -> PromptComparison:
    if earlier is None:
        return PromptComparison(Changed.NOT_FOUND)
    common = num_common(prompt.token_ids, earlier.token_ids)
    num_missed = len(earlier.token_ids) - common
    if prompt.fingerprint != earlier.fingerprint:
        return PromptComparison(Changed.MODEL, 0, len(earlier.token_ids))
    mine, theirs = prompt.source.conversation, earlier.source.conversation
    if mine is None or theirs is None or prompt.cache_salt != earlier.cache_salt:
        return PromptComparison(Changed.UNKNOWN, common, num_missed)
    return PromptComparison(_changed(mine, theirs), common, num_missed)


def _changed(mine: Conversation, theirs: Conversation) -> Changed:
    if _written(mine.tools) != _written(theirs.tools):
        return Changed.TOOLS
    if _told(mine.messages) != _told(theirs.messages):
        return Changed.SYSTEM
    if list(mine.messages[: len(theirs.messages)]) != list(theirs.messages):
        return Changed.MESSAGES
    return Changed.NOTHING if mine.variables == theirs.variables else Changed.UNKNOWN


def _written(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    return [json.dumps(tool) for tool in tools]


def _told(messages: Sequence[Message]) -> list[Message]:
    """What is said before the conversation proper."""
    told: list[Message] = []
    for message in messages:
        if not isinstance(message, SystemMessage | DeveloperMessage):
            break
        told.append(message)
    return told
