"""The body of POST /v1/messages, as Anthropic has it: https://docs.anthropic.com/en/api/messages.

Owns its types, what may stand where, and the rules of cache_control. Knows nothing of templates,
nor of what becomes of a conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec

from service.dialects.message_fields import COUNTED_FIELDS, MESSAGE_FIELDS
from service.errors import InvalidRequest
from service.request_fields import FieldTable
from service.schemas.parsing import convert, parse_object
from service.schemas.sampling import MAX_STOP_LENGTH, MAX_STOP_STRINGS, Priority, Retention

__all__ = [
    "MAX_BREAKPOINTS",
    "CacheControl",
    "InputMessage",
    "MessagesRequest",
    "TextBlock",
    "Tool",
    "ToolResultBlock",
    "ToolUseBlock",
    "parse_counted_messages",
    "parse_messages_request",
]

MAX_BREAKPOINTS = 4
_BLOCK_TYPES = ("text", "tool_use", "tool_result")
_BLOCKS_OF: Mapping[str, Sequence[str]] = MappingProxyType(
    {"user": ("text", "tool_result"), "assistant": ("text", "tool_use"), "system": ("text",)}
)
_FIELDS = FieldTable(MESSAGE_FIELDS)
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class CacheControl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A breakpoint: what stands before it is to be kept for so long."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"

    @property
    def seconds(self) -> int:
        return 300 if self.ttl == "5m" else 3600


class _Block(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    cache_control: CacheControl | None = None


class TextBlock(_Block, frozen=True, tag="text", tag_field="type"):
    text: str


class ToolUseBlock(_Block, frozen=True, tag="tool_use", tag_field="type"):
    id: str
    name: _Name
    input: dict[str, Any]


class ToolResultBlock(_Block, frozen=True, tag="tool_result", tag_field="type"):
    tool_use_id: str
    content: str | list[TextBlock] = ""
    is_error: bool = False


class InputMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[TextBlock | ToolUseBlock | ToolResultBlock]


class Tool(_Block, frozen=True):
    name: _Name
    input_schema: dict[str, Any]
    description: str = ""
    type: Literal["custom"] = "custom"
    strict: bool | None = None
    eager_input_streaming: bool = False  # arguments are streamed as they are written in any case


class ToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class OutputFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: OutputFormat | None = None


class MessageDiagnostics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``previous_message_id`` is that of an earlier answer, None for a first turn."""

    previous_message_id: str | None = None


class MessagesRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str
    messages: Annotated[list[InputMessage], msgspec.Meta(min_length=1)]
    max_tokens: Annotated[int, msgspec.Meta(ge=0)]
    system: str | list[TextBlock] = ""
    stream: bool = False
    stop_sequences: list[str] = []
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    top_p: float = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0
    tools: list[Tool] = []
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    priority: Priority | None = None
    retention: Retention | None = None
    prompt_cache_key: str | None = None
    explain_cache: bool = False
    diagnostics: MessageDiagnostics | None = None
    seed: int | None = None
    ignore_eos: bool = False

    def check(self) -> None:
        """Rules across fields. Raises InvalidRequest."""
        self._check_places()
        self._check_stop()
        self._check_breakpoints()
        choice = self.tool_choice
        if choice is not None and (choice.type == "tool") != (choice.name is not None):
            raise InvalidRequest(
                "tool_choice.name: required with type tool, and with no other.",
                param="tool_choice.name",
            )

    def breakpoints(self) -> Iterator[CacheControl]:
        """In the order of the prompt: tools, system, messages, and what stands for their end."""
        blocks: list[_Block] = [*self.tools]
        if not isinstance(self.system, str):
            blocks += self.system
        for message in self.messages:
            for block in () if isinstance(message.content, str) else message.content:
                if isinstance(block, ToolResultBlock) and not isinstance(block.content, str):
                    blocks += block.content
                blocks.append(block)
        yield from (item.cache_control for item in blocks if item.cache_control is not None)
        if self.cache_control is not None:
            yield self.cache_control

    def retention_s(self, most: float | None) -> float | None:
        """The longest of what is asked for. ``most`` is what a ttl may come to: clients name one of
        two, and not what they may have."""
        asked = [float(item.seconds) for item in self.breakpoints()]
        if most is not None:
            asked = [min(item, most) for item in asked]
        if self.retention is not None:
            asked.append(self.retention)
        return max(asked, default=None)

    def _check_places(self) -> None:
        for index, message in enumerate(self.messages):
            content = message.content
            path = f"messages[{index}].content"
            if message.role != "assistant" and content == []:
                raise InvalidRequest(f"{path}: must have at least one block.", param=path)
            for number, block in enumerate(() if isinstance(content, str) else content):
                kind = str(block.__struct_config__.tag)
                if kind not in _BLOCKS_OF[message.role]:
                    raise InvalidRequest(
                        f"{path}[{number}]: a message of the {message.role} has no {kind} blocks.",
                        param=f"{path}[{number}]",
                    )

    def _check_stop(self) -> None:
        problem = ""
        if len(self.stop_sequences) > MAX_STOP_STRINGS:
            problem = f"at most {MAX_STOP_STRINGS} strings, got {len(self.stop_sequences)}"
        elif not all(self.stop_sequences):
            problem = "must not hold an empty string"
        elif any(len(text) > MAX_STOP_LENGTH for text in self.stop_sequences):
            problem = f"at most {MAX_STOP_LENGTH} characters each"
        if problem:
            raise InvalidRequest(f"stop_sequences: {problem}.", param="stop_sequences")

    def _check_breakpoints(self) -> None:
        ttls = [item.seconds for item in self.breakpoints()]
        if len(ttls) > MAX_BREAKPOINTS:
            raise InvalidRequest(
                f"cache_control: at most {MAX_BREAKPOINTS} blocks can have it, found {len(ttls)}.",
                param="cache_control",
            )
        if ttls != sorted(ttls, reverse=True):
            raise InvalidRequest(
                "cache_control: a ttl of 1h must not come after one of 5m, in the order of tools, "
                "system and messages.",
                param="cache_control",
            )


def parse_messages_request(body: bytes) -> MessagesRequest:
    """Raises InvalidRequest naming the field at fault by its path."""
    return _checked(_FIELDS.keep_acting(parse_object(body)))


def parse_counted_messages(body: bytes) -> MessagesRequest:
    """Of a request whose tokens are to be counted."""
    return _checked({**COUNTED_FIELDS.keep_acting(parse_object(body)), "max_tokens": 0})


def _checked(fields: dict[str, Any]) -> MessagesRequest:
    _each(fields, "tools", "tools", _tool)
    _each(fields, "system", "system", _block)
    _each(fields, "messages", "messages", _message)
    request = convert(fields, MessagesRequest)
    request.check()
    return request


def _message(message: Any, path: str) -> Any:
    plain = _without_nulls(message)
    if isinstance(plain, dict):
        _each(plain, "content", f"{path}.content", _block)
    return plain


def _block(block: Any, path: str) -> Any:
    """Answers sent back as history carry nulls."""
    plain = _without_nulls(block)
    if isinstance(plain, dict):
        kind = plain.get("type")
        if isinstance(kind, str) and kind not in _BLOCK_TYPES:
            raise InvalidRequest(
                f"{path}.type: blocks of type '{kind[:64]}' are not supported, only "
                f"{', '.join(_BLOCK_TYPES)}.",
                param=f"{path}.type",
                code="unsupported_parameter",
            )
        if kind == "tool_result":
            _each(plain, "content", f"{path}.content", _block)
    return plain


def _tool(tool: Any, path: str) -> Any:
    plain = _without_nulls(tool)
    kind = plain.get("type", "custom") if isinstance(plain, dict) else None
    if isinstance(kind, str) and kind != "custom":
        raise InvalidRequest(
            f"{path}.type: tools that the server runs, such as '{kind[:64]}', are not supported; "
            "only those of type 'custom' are.",
            param=f"{path}.type",
            code="unsupported_parameter",
        )
    return plain


def _without_nulls(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: item for name, item in value.items() if item is not None}


def _each(fields: dict[str, Any], name: str, path: str, change: Callable[[Any, str], Any]) -> None:
    items = fields.get(name)
    if isinstance(items, list):
        fields[name] = [change(item, f"{path}[{index}]") for index, item in enumerate(items)]
