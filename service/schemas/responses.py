"""The body of POST /v1/responses: https://platform.openai.com/docs/api-reference/responses.

Owns its types, and the items that a conversation consists of, given and answered alike. Knows
nothing of how they are stored, nor of what becomes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import msgspec

from service.dialects.response_fields import RESPONSE_FIELDS
from service.errors import InvalidRequest
from service.request_fields import FieldTable
from service.schemas.parsing import convert, parse_object
from service.schemas.prompt_cache import (
    PromptCacheBreakpoint,
    PromptCacheRetention,
    ResponseCacheOptions,
)
from service.schemas.sampling import Priority, Retention

__all__ = [
    "MAX_PAGE",
    "FunctionCallItem",
    "FunctionCallOutputItem",
    "FunctionTool",
    "Item",
    "JsonObjectFormat",
    "JsonSchemaFormat",
    "MessageItem",
    "NamedFunction",
    "Order",
    "OutputTextPart",
    "PageLimit",
    "ResponsesRequest",
    "TextConfig",
    "parse_responses_request",
    "texts_of",
]

_FIELDS = FieldTable(RESPONSE_FIELDS)
MAX_PAGE = 100  # items
PageLimit = Annotated[int, msgspec.Meta(ge=1, le=MAX_PAGE)]
Order = Literal["asc", "desc"]
_ITEM_TYPES = ("message", "function_call", "function_call_output")
_PART_TYPES = ("input_text", "output_text", "refusal")
_LOGPROBS = "message.output_text.logprobs"
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
_Key = Annotated[str, msgspec.Meta(max_length=64)]
_Value = Annotated[str, msgspec.Meta(max_length=512)]


class InputTextPart(
    msgspec.Struct, frozen=True, tag="input_text", forbid_unknown_fields=True, omit_defaults=True
):
    text: str
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class OutputTextPart(msgspec.Struct, frozen=True, tag="output_text", forbid_unknown_fields=True):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class RefusalPart(msgspec.Struct, frozen=True, tag="refusal", forbid_unknown_fields=True):
    refusal: str


class _Item(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: str | None = None
    status: str | None = None


class MessageItem(_Item, frozen=True, kw_only=True, tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputTextPart | OutputTextPart | RefusalPart]
    phase: str | None = None


class FunctionCallItem(_Item, frozen=True, kw_only=True, tag="function_call"):
    call_id: str
    name: _Name
    arguments: str


class FunctionCallOutputItem(_Item, frozen=True, kw_only=True, tag="function_call_output"):
    call_id: str
    output: str | list[InputTextPart]


Item = MessageItem | FunctionCallItem | FunctionCallOutputItem


class FunctionTool(msgspec.Struct, frozen=True, tag="function", forbid_unknown_fields=True):
    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(msgspec.Struct, frozen=True, tag="function", forbid_unknown_fields=True):
    name: _Name


class TextFormat(msgspec.Struct, frozen=True, tag="text", forbid_unknown_fields=True):
    pass


class JsonObjectFormat(msgspec.Struct, frozen=True, tag="json_object", forbid_unknown_fields=True):
    pass


class JsonSchemaFormat(msgspec.Struct, frozen=True, tag="json_schema", forbid_unknown_fields=True):
    name: _Name
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: TextFormat | JsonObjectFormat | JsonSchemaFormat = TextFormat()
    verbosity: Literal["medium"] = "medium"


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str
    input: str | Annotated[list[Item], msgspec.Meta(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    stream: bool = False
    max_output_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    tools: list[FunctionTool] = []
    tool_choice: Literal["auto", "none", "required"] | NamedFunction = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] = 0
    include: list[
        Literal[
            "message.output_text.logprobs",
            "reasoning.encrypted_content",
            "file_search_call.results",
            "web_search_call.results",
            "web_search_call.action.sources",
            "code_interpreter_call.outputs",
            "computer_call_output.output.image_url",
            "message.input_image.image_url",
        ]
    ] = []
    metadata: Annotated[dict[_Key, _Value], msgspec.Meta(max_length=16)] = {}
    cache_salt: str | None = None
    priority: Priority | None = None
    retention: Retention | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: ResponseCacheOptions | None = None
    prompt_cache_retention: PromptCacheRetention | None = None
    explain_cache: bool = False
    top_k: int = 0
    seed: int | None = None
    ignore_eos: bool = False

    @property
    def items(self) -> Sequence[Item]:
        if isinstance(self.input, str):
            return (MessageItem(role="user", content=[InputTextPart(self.input)]),)
        return self.input

    @property
    def cache_breakpoints(self) -> list[PromptCacheBreakpoint]:
        """Those that parts of the input bear."""
        return [
            part.prompt_cache_breakpoint
            for item in self.items
            if isinstance(item, MessageItem) and not isinstance(item.content, str)
            for part in item.content
            if isinstance(part, InputTextPart) and part.prompt_cache_breakpoint is not None
        ]

    @property
    def has_logprobs(self) -> bool:
        return _LOGPROBS in self.include or self.top_logprobs > 0


def texts_of(content: str | Sequence[InputTextPart | OutputTextPart | RefusalPart]) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part.refusal if isinstance(part, RefusalPart) else part.text for part in content]


def parse_responses_request(body: bytes) -> ResponsesRequest:
    """Raises InvalidRequest naming the field at fault by its path."""
    fields = _FIELDS.keep_acting(parse_object(body))
    _each(fields, "input", "input", _item)
    _each(fields, "tools", "tools", _tool)
    choice = fields.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") != "function":
        raise _unsupported("tool_choice.type", choice.get("type"), ("function",))
    if isinstance(fields.get("text"), dict):
        fields["text"] = _without_nulls(fields["text"])
    return convert(fields, ResponsesRequest)


def _item(item: Any, path: str) -> Any:
    """With a type, which messages may leave out. Answers sent back as input carry nulls."""
    if not isinstance(item, dict):
        return item
    plain = _without_nulls(item)
    if "role" in plain:
        plain.setdefault("type", "message")
    _check_type(plain, path, _ITEM_TYPES)
    for name in ("content", "output"):
        _each(plain, name, f"{path}.{name}", _part)
    return plain


def _part(part: Any, path: str) -> Any:
    if not isinstance(part, dict):
        return part
    plain = _without_nulls(part)
    _check_type(plain, path, _PART_TYPES)
    return plain


def _tool(tool: Any, path: str) -> Any:
    if not isinstance(tool, dict):
        return tool
    _check_type(tool, path, ("function",))
    return tool


def _check_type(fields: dict[str, Any], path: str, known: Sequence[str]) -> None:
    kind = fields.get("type")
    if isinstance(kind, str) and kind not in known:
        raise _unsupported(f"{path}.type", kind, known)


def _unsupported(path: str, kind: Any, known: Sequence[str]) -> InvalidRequest:
    return InvalidRequest(
        f"{path}: '{str(kind)[:64]}' is not supported, only {', '.join(known)}.",
        param=path,
        code="unsupported_parameter",
    )


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _each(fields: dict[str, Any], name: str, path: str, change: Callable[[Any, str], Any]) -> None:
    items = fields.get(name)
    if isinstance(items, list):
        fields[name] = [change(item, f"{path}[{index}]") for index, item in enumerate(items)]
