"""From the body of /v1/messages to the chat request that says the same.

Owns which of Anthropic's fields and blocks becomes what of a chat. Turns of one role that follow
each other are one turn, as in that API. Knows nothing of templates or of how answers are written.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec

from service.dialects.retelling import Retelling
from service.request_fields import Endpoint, keep_acting
from service.schemas.chat import ChatRequest, chat_request
from service.schemas.messages import (
    CacheControl,
    InputMessage,
    MessagesRequest,
    TextBlock,
    Tool,
    ToolResultBlock,
    ToolUseBlock,
)

__all__ = ["Chat", "Marks", "chat_of"]

_NAMES: Mapping[str, str] = MappingProxyType(
    {
        r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
        r"tools\[(\d+)\]\.function": r"tools[\1]",
        r"tool_choice\.function\.name": "tool_choice.name",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
        "response_format": "output_config.format",
        "stop": "stop_sequences",
    }
)
_CHOICES: Mapping[str, str] = MappingProxyType({"auto": "auto", "any": "required", "none": "none"})


class Marks:
    """Strings that stand for the breakpoints, and that no conversation has in it by chance."""

    def __init__(self) -> None:
        self._nonce = secrets.token_hex(8)
        self.written: list[tuple[str, CacheControl]] = []

    def after(self, control: CacheControl | None) -> str:
        """What to write after a block; empty for one without a breakpoint."""
        if control is None:
            return ""
        self.written.append((f"~{self._nonce}{len(self.written)}x", control))
        return self.written[-1][0]


class _NoMarks(Marks):
    def after(self, control: CacheControl | None) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class Chat:
    request: ChatRequest
    retelling: Retelling


def chat_of(
    request: MessagesRequest, marks: Marks | None = None, *, most_retention: float | None = None
) -> Chat:
    """With ``marks`` its breakpoints are written into the texts. ``most_retention`` is the longest
    that the caller may have. Raises InvalidRequest."""
    marks = _NoMarks() if marks is None else marks
    fields: dict[str, Any] = {
        "model": request.model,
        "max_tokens": request.max_tokens,
        "stream": request.stream,
        "stop": request.stop_sequences,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "seed": request.seed,
        "explain_cache": request.explain_cache,
        "ignore_eos": request.ignore_eos,
        "cache_salt": request.cache_salt,
        "session_id": request.session_id,
        "priority": request.priority,
        "retention": request.retention_s(most_retention),
        "prompt_cache_key": request.prompt_cache_key,
        **dict(_tool_fields(request, marks)),
    }
    if request.output_config is not None and request.output_config.format is not None:
        schema = {"name": "answer", "schema": request.output_config.format.schema, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    turns = _Turns(marks, request.cache_control)
    turns.add_system(request.system)
    turns.add_messages(request.messages)
    fields["messages"] = [turn.as_message() for turn in turns.turns]
    retelling = Retelling([turn.path for turn in turns.turns], _NAMES)
    with retelling.of_refusals():
        return Chat(chat_request(keep_acting(fields, Endpoint.CHAT)), retelling)


def _tool_fields(request: MessagesRequest, marks: Marks) -> Iterator[tuple[str, Any]]:
    if request.tools:
        yield "tools", [_function(tool, marks) for tool in request.tools]
    choice = request.tool_choice
    if choice is None:
        return
    if choice.type == "tool":
        yield "tool_choice", {"type": "function", "function": {"name": choice.name}}
    else:
        yield "tool_choice", _CHOICES[choice.type]
    if choice.disable_parallel_tool_use:
        yield "parallel_tool_calls", False


def _function(tool: Tool, marks: Marks) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = _marked(tool.input_schema, marks.after(tool.cache_control))
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _marked(value: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """With the mark as its last key: what is written in JSON ends soon after it."""
    return {**value, mark: 1} if mark else dict(value)


@dataclass(slots=True)
class _Turn:
    """One message of the chat. ``path`` is where it began in the body."""

    role: str
    path: str
    texts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    call_id: str = ""

    def as_message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": self.role, "content": "\n".join(self.texts)}
        if self.calls:
            message["tool_calls"] = self.calls
        if self.role == "tool":
            message["tool_call_id"] = self.call_id
        return message


class _Turns:
    """The conversation as it is put together; ``at_end`` is a breakpoint after its last block."""

    def __init__(self, marks: Marks, at_end: CacheControl | None) -> None:
        self._marks = marks
        self._at_end = at_end
        self.turns: list[_Turn] = []

    def add_system(self, system: str | Sequence[TextBlock]) -> None:
        if system:
            blocks = _blocks(system)
            texts = [block.text + self._marks.after(block.cache_control) for block in blocks]
            self.turns.append(_Turn("system", "system", texts))

    def add_messages(self, messages: Sequence[InputMessage]) -> None:
        for index, message in enumerate(messages):
            path = f"messages[{index}]"
            blocks = _blocks(message.content)
            ends = {len(blocks) - 1: self._at_end} if index == len(messages) - 1 else {}
            if message.role == "assistant":
                self._add_answer(blocks, path, ends)
            else:
                self._add_said(message.role, blocks, path, ends)

    def _add_said(
        self,
        role: str,
        blocks: Sequence[TextBlock | ToolUseBlock | ToolResultBlock],
        path: str,
        ends: Mapping[int, CacheControl | None],
    ) -> None:
        for number, block in enumerate(blocks):
            if isinstance(block, ToolResultBlock):
                at = f"{path}.content[{number}]"
                turn = _Turn("tool", at, self._result_texts(block), call_id=block.tool_use_id)
                self.turns.append(turn)
            else:
                assert isinstance(block, TextBlock)
                turn = self._turn(role, path)
                turn.texts.append(block.text)
            mark = self._marks.after(block.cache_control) + self._marks.after(ends.get(number))
            turn.texts[-1] += mark

    def _result_texts(self, block: ToolResultBlock) -> list[str]:
        texts = [
            item.text + self._marks.after(item.cache_control) for item in _blocks(block.content)
        ] or [""]
        if block.is_error:
            texts[0] = f"Error: {texts[0]}"
        return texts

    def _add_answer(
        self,
        blocks: Sequence[TextBlock | ToolUseBlock | ToolResultBlock],
        path: str,
        ends: Mapping[int, CacheControl | None],
    ) -> None:
        """Its texts were said in one go, and stand together without anything between."""
        turn = self._turn("assistant", path)
        said = ""
        for number, block in enumerate(blocks):
            mark = self._marks.after(block.cache_control) + self._marks.after(ends.get(number))
            if isinstance(block, ToolUseBlock):
                arguments = msgspec.json.encode(_marked(block.input, mark)).decode()
                function = {"name": block.name, "arguments": arguments}
                turn.calls.append({"id": block.id, "type": "function", "function": function})
            else:
                assert isinstance(block, TextBlock)
                said += block.text + mark
        if said or not turn.calls:
            turn.texts.append(said)

    def _turn(self, role: str, path: str) -> _Turn:
        """The one that a message goes on with, or a new one."""
        if not self.turns or self.turns[-1].role != role:
            self.turns.append(_Turn(role, path))
        return self.turns[-1]


def _blocks(content: Any) -> Sequence[Any]:
    return (TextBlock(text=content),) if isinstance(content, str) else content
