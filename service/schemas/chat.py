"""The body of POST /v1/chat/completions.

Owns the message types and what each may carry. Knows nothing of templates: whether a model can
express a conversation is service.chat_template's question.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from service.errors import InvalidRequest
from service.request_fields import Endpoint, keep_acting
from service.schemas.parsing import convert, parse_object
from service.schemas.prompt_cache import PromptCacheBreakpoint
from service.schemas.sampling import CommonFields, NumLogprobs
from service.schemas.tools import Calling, Tool, calling_of, check_tools

__all__ = [
    "AssistantMessage",
    "ChatRequest",
    "DeveloperMessage",
    "FunctionCall",
    "Message",
    "SystemMessage",
    "ToolCall",
    "ToolMessage",
    "UserMessage",
    "chat_request",
    "content_text",
    "parse_chat_request",
]

ROLES = ("system", "developer", "user", "assistant", "tool")


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    text: str
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


Content = str | list[TextPart] | None


class SystemMessage(
    msgspec.Struct, frozen=True, tag="system", tag_field="role", forbid_unknown_fields=True
):
    content: Content = None
    name: str | None = None


class DeveloperMessage(
    msgspec.Struct, frozen=True, tag="developer", tag_field="role", forbid_unknown_fields=True
):
    content: Content = None
    name: str | None = None


class UserMessage(
    msgspec.Struct, frozen=True, tag="user", tag_field="role", forbid_unknown_fields=True
):
    content: Content = None
    name: str | None = None


class FunctionCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    arguments: str  # a JSON object, as text


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    function: FunctionCall
    type: str = "function"
    index: int | None = None  # left over by clients that put streamed deltas together


class AssistantMessage(
    msgspec.Struct, frozen=True, tag="assistant", tag_field="role", forbid_unknown_fields=True
):
    content: Content = None
    name: str | None = None
    tool_calls: list[ToolCall] = []


class ToolMessage(
    msgspec.Struct, frozen=True, tag="tool", tag_field="role", forbid_unknown_fields=True
):
    tool_call_id: str
    content: Content = None
    name: str | None = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class ChatRequest(CommonFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    tools: list[Tool] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: NumLogprobs | None = None

    @property
    def cache_breakpoints(self) -> list[PromptCacheBreakpoint]:
        return [
            part.prompt_cache_breakpoint
            for message in self.messages
            if isinstance(message.content, list)
            for part in message.content
            if part.prompt_cache_breakpoint is not None
        ]

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def is_continued(self) -> bool:
        """Whether the answer goes on with the last message, an assistant's that was left open."""
        if self.continue_final_message is not None:
            return self.continue_final_message
        return not self.add_generation_prompt and self._ends_with_an_answer

    @property
    def opens_turn(self) -> bool:
        return not self.is_continued and self.add_generation_prompt is not False

    @property
    def _ends_with_an_answer(self) -> bool:
        last = self.messages[-1]
        is_answer = isinstance(last, AssistantMessage) and not last.tool_calls
        return is_answer and bool(content_text(last.content).strip())

    @property
    def calling(self) -> Calling:
        """What calls of tools the answer may or must hold. Raises InvalidRequest."""
        return calling_of(self.tools, self.tool_choice, is_parallel=self.parallel_tool_calls)

    def check(self) -> None:
        super().check()
        check_tools(self.tools)
        if self.calling.is_forced and self.answer_format is not None:
            raise InvalidRequest(
                "tool_choice: a call that must come leaves no room for an answer of "
                f"{self.answer_format.param}.",
                param="tool_choice",
            )
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest(
                "top_logprobs: only together with logprobs true.", param="top_logprobs"
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message: not together with add_generation_prompt true.",
                param="continue_final_message",
            )
        if self.continue_final_message and not self._ends_with_an_answer:
            raise InvalidRequest(
                "continue_final_message: the last message must be an assistant's, with text and "
                "without tool calls.",
                param="continue_final_message",
            )

    @property
    def requested_max_tokens(self) -> int | None:
        """None asks for the rest of the context."""
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens


def content_text(content: Content) -> str:
    """One string: text parts are joined by a newline; null and absent are the empty string."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content)


def parse_chat_request(body: bytes) -> ChatRequest:
    """Raises InvalidRequest naming the field at fault by its path."""
    return chat_request(keep_acting(parse_object(body), Endpoint.CHAT))


def chat_request(fields: dict[str, Any]) -> ChatRequest:
    """From fields that act. Raises InvalidRequest."""
    if isinstance(fields.get("messages"), list):
        fields["messages"] = [
            _without_empty(message, f"messages[{index}]")
            for index, message in enumerate(fields["messages"])
        ]
    request = convert(fields, ChatRequest)
    request.check()
    if (
        request.max_tokens is not None
        and request.max_completion_tokens is not None
        and request.max_tokens != request.max_completion_tokens
    ):
        raise InvalidRequest(
            "max_completion_tokens: means the same as max_tokens, which has another value.",
            param="max_completion_tokens",
        )
    for index, message in enumerate(request.messages):
        if isinstance(message, AssistantMessage):
            _check_tool_calls(message.tool_calls, f"messages[{index}].tool_calls")
    return request


def _without_empty(message: Any, path: str) -> Any:
    """Without null fields and empty lists: answers sent back as history are full of them."""
    if not isinstance(message, dict):
        return message
    role = message.get("role")
    if isinstance(role, str) and role not in ROLES:
        raise InvalidRequest(
            f"{path}.role: must be one of {', '.join(ROLES)}.", param=f"{path}.role"
        )
    kept = {
        name: value
        for name, value in message.items()
        if value is not None and (value != [] or name == "content")
    }
    _check_parts(kept.get("content"), f"{path}.content")
    return kept


def _check_parts(content: Any, path: str) -> None:
    if not isinstance(content, list):
        return
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise InvalidRequest(
                f"{path}[{index}].type: only text parts are supported.",
                param=f"{path}[{index}].type",
            )


def _check_tool_calls(calls: list[ToolCall], path: str) -> None:
    for index, call in enumerate(calls):
        if call.type != "function":
            raise InvalidRequest(
                f"{path}[{index}].type: must be 'function'.", param=f"{path}[{index}].type"
            )
        at = f"{path}[{index}].function.arguments"
        try:
            arguments = msgspec.json.decode(call.function.arguments or "{}")
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            raise InvalidRequest(f"{at}: must be a JSON object as text.", param=at) from None
        if not isinstance(arguments, dict):
            raise InvalidRequest(f"{at}: must be a JSON object as text.", param=at)
