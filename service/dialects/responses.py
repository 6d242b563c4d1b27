"""From the body of /v1/responses, and what it goes on from, to the chat request that says the same.

Owns which items become which messages. Knows nothing of templates, of where earlier items were
kept, or of how answers are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from service.dialects.retelling import Retelling
from service.request_fields import Endpoint, keep_acting
from service.schemas.chat import ChatRequest, chat_request
from service.schemas.prompt_cache import longest_ttl
from service.schemas.responses import (
    FunctionCallItem,
    FunctionCallOutputItem,
    FunctionTool,
    Item,
    JsonObjectFormat,
    JsonSchemaFormat,
    MessageItem,
    NamedFunction,
    ResponsesRequest,
    texts_of,
)

__all__ = ["ResponseChat", "chat_of_response"]

_NAMES: Mapping[str, str] = MappingProxyType(
    {
        r"tools\[(\d+)\]\.function": r"tools[\1]",
        r"tool_choice\.function\.name": "tool_choice.name",
        r"response_format\.json_schema": "text.format",
        "response_format": "text.format",
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "logprobs": "top_logprobs",
    }
)


@dataclass(frozen=True, slots=True)
class ResponseChat:
    request: ChatRequest
    retelling: Retelling


def chat_of_response(request: ResponsesRequest, earlier: Sequence[Item]) -> ResponseChat:
    """``earlier`` items are what a previous response leaves. Raises InvalidRequest."""
    fields: dict[str, Any] = {
        "model": request.model,
        "max_tokens": request.max_output_tokens,
        "stream": request.stream,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "seed": request.seed,
        "explain_cache": request.explain_cache,
        "ignore_eos": request.ignore_eos,
        "cache_salt": request.cache_salt,
        "priority": request.priority,
        "retention": request.retention,
        "prompt_cache_key": request.prompt_cache_key,
        "prompt_cache_retention": request.prompt_cache_retention,
        "add_generation_prompt": True,  # an answer at the end of the input is an earlier one
        **dict(_optional(request)),
    }
    turns = _Turns()
    if request.instructions:
        turns.turns.append(_Turn("system", "instructions", [request.instructions]))
    for item in earlier:
        turns.add(item, "previous_response_id")
    for index, item in enumerate(request.items):
        turns.add(item, "input" if isinstance(request.input, str) else f"input[{index}]")
    fields["messages"] = [turn.as_message() for turn in turns.turns]
    retelling = Retelling([turn.path for turn in turns.turns], _NAMES)
    with retelling.of_refusals():
        return ResponseChat(chat_request(keep_acting(fields, Endpoint.CHAT)), retelling)


def _optional(request: ResponsesRequest) -> Iterator[tuple[str, Any]]:
    """What is left out where it asks for nothing."""
    if request.tools:
        yield "tools", [_function(tool) for tool in request.tools]
    choice = request.tool_choice
    if isinstance(choice, NamedFunction):
        yield "tool_choice", {"type": "function", "function": {"name": choice.name}}
    elif choice != "auto":
        yield "tool_choice", choice
    if not request.parallel_tool_calls:
        yield "parallel_tool_calls", False
    form = request.text.format
    if isinstance(form, JsonObjectFormat):
        yield "response_format", {"type": "json_object"}
    elif isinstance(form, JsonSchemaFormat):
        schema = {"name": form.name, "schema": form.schema, "strict": form.strict}
        if form.description is not None:
            schema["description"] = form.description
        yield "response_format", {"type": "json_schema", "json_schema": schema}
    if (ttl := longest_ttl(request.prompt_cache_options, request.cache_breakpoints)) is not None:
        yield "prompt_cache_options", {"ttl": ttl}
    if request.has_logprobs:
        yield "logprobs", True
        yield "top_logprobs", request.top_logprobs


def _function(tool: FunctionTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.parameters is not None:
        function["parameters"] = tool.parameters
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


@dataclass(slots=True)
class _Turn:
    """One message of the chat. ``path`` is where it began."""

    role: str
    path: str
    texts: list[str]
    calls: list[dict[str, Any]] = field(default_factory=list)
    call_id: str = ""

    def as_message(self) -> dict[str, Any]:
        # What an answer says before and after its calls was said in one go.
        between = "" if self.calls else "\n"
        message: dict[str, Any] = {"role": self.role, "content": between.join(self.texts)}
        if self.calls:
            message["tool_calls"] = self.calls
        if self.role == "tool":
            message["tool_call_id"] = self.call_id
        return message


class _Turns:
    """The conversation as it is put together. The calls of an answer, and what it says around them,
    are one message."""

    def __init__(self) -> None:
        self.turns: list[_Turn] = []

    def add(self, item: Item, path: str) -> None:
        match item:
            case MessageItem():
                self._add_message(item, path)
            case FunctionCallItem():
                self._add_call(item, path)
            case FunctionCallOutputItem():
                texts = texts_of(item.output)
                self.turns.append(_Turn("tool", path, texts, call_id=item.call_id))

    def _add_message(self, item: MessageItem, path: str) -> None:
        last = self.turns[-1] if self.turns else None
        if item.role == "assistant" and last is not None and last.calls:
            last.texts += texts_of(item.content)
        else:
            self.turns.append(_Turn(item.role, path, texts_of(item.content)))

    def _add_call(self, item: FunctionCallItem, path: str) -> None:
        if not self.turns or self.turns[-1].role != "assistant":
            self.turns.append(_Turn("assistant", path, []))
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        self.turns[-1].calls.append(call)
