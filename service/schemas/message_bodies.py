"""The bodies of Anthropic's answers and of the events of their streams.

Owns the shapes of https://docs.anthropic.com/en/api/messages and .../messages-streaming. Knows
nothing of how an answer came about.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from service.schemas.bodies import CachedTokens
from service.schemas.cache_explanation import CacheExplanation

__all__ = [
    "CacheCreation",
    "CacheMissReason",
    "ContentBlockDelta",
    "ContentBlockStart",
    "ContentBlockStop",
    "Diagnostics",
    "InputJsonDelta",
    "Message",
    "MessageDelta",
    "MessageEnd",
    "MessageStart",
    "MessageStop",
    "MessageUsage",
    "ModelInfo",
    "ModelPage",
    "Ping",
    "TextBlock",
    "TextDelta",
    "TokenCount",
    "ToolUseBlock",
]


class CacheCreation(msgspec.Struct, frozen=True):
    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return self.ephemeral_5m_input_tokens + self.ephemeral_1h_input_tokens


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt's tokens are input_tokens + cache_read_input_tokens +
    cache_creation_input_tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_read_by_tier: CachedTokens
    cache_creation: CacheCreation
    output_tokens: int
    service_tier: str = "standard"


class TextBlock(msgspec.Struct, frozen=True, tag="text", tag_field="type"):
    text: str


class ToolUseBlock(msgspec.Struct, frozen=True, tag="tool_use", tag_field="type"):
    id: str
    name: str
    input: msgspec.Raw


class CacheMissReason(msgspec.Struct, frozen=True):
    """``type`` is model_changed, system_changed, tools_changed, messages_changed,
    previous_message_not_found or unavailable; the tokens are told with the first four."""

    type: str
    cache_missed_input_tokens: int | UnsetType = UNSET


class Diagnostics(msgspec.Struct, frozen=True):
    cache_miss_reason: CacheMissReason


class Message(msgspec.Struct, frozen=True, kw_only=True, tag="message", tag_field="type"):
    id: str
    role: str = "assistant"
    model: str
    content: tuple[TextBlock | ToolUseBlock, ...] = ()
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    history: str | UnsetType = UNSET  # of a session's answers
    diagnostics: Diagnostics | UnsetType | None = UNSET  # where they were asked for
    cache_explanation: CacheExplanation | UnsetType = UNSET  # likewise


class MessageStart(msgspec.Struct, frozen=True, tag="message_start", tag_field="type"):
    message: Message


class Ping(msgspec.Struct, frozen=True, tag="ping", tag_field="type"):
    pass


class ContentBlockStart(msgspec.Struct, frozen=True, tag="content_block_start", tag_field="type"):
    index: int
    content_block: TextBlock | ToolUseBlock


class TextDelta(msgspec.Struct, frozen=True, tag="text_delta", tag_field="type"):
    text: str


class InputJsonDelta(msgspec.Struct, frozen=True, tag="input_json_delta", tag_field="type"):
    partial_json: str


class ContentBlockDelta(msgspec.Struct, frozen=True, tag="content_block_delta", tag_field="type"):
    index: int
    delta: TextDelta | InputJsonDelta


class ContentBlockStop(msgspec.Struct, frozen=True, tag="content_block_stop", tag_field="type"):
    index: int


class MessageEnd(msgspec.Struct, frozen=True):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, tag="message_delta", tag_field="type"):
    delta: MessageEnd
    usage: MessageUsage
    history: str | UnsetType = UNSET


class MessageStop(msgspec.Struct, frozen=True, tag="message_stop", tag_field="type"):
    cache_explanation: CacheExplanation | UnsetType = UNSET


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int


class ModelInfo(msgspec.Struct, frozen=True, tag="model", tag_field="type"):
    """``created_at`` in RFC 3339."""

    id: str
    display_name: str
    created_at: str
    max_input_tokens: int


class ModelPage(msgspec.Struct, frozen=True):
    data: tuple[ModelInfo, ...]
    first_id: str
    last_id: str
    has_more: bool = False
