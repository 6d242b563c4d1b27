"""From a conversation to the prompt's text, by the model's own template.

Owns what is handed to the template, and the proof that the template dropped nothing: the
conversation is rendered once more with each text replaced by a mark, and every mark must come
out. Knows nothing of HTTP bodies beyond the message structs, and nothing of tokens.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jinja2 import Environment, TemplateError, meta
from jinja2.ext import loopcontrols

from service.conversation import Conversation
from service.errors import InvalidRequest
from service.schemas.chat import (
    AssistantMessage,
    DeveloperMessage,
    FunctionCall,
    Message,
    ToolCall,
    ToolMessage,
    UserMessage,
    content_text,
)

__all__ = ["ChatTemplate"]

Render = Callable[[list[dict[str, Any]], Conversation], str]
"""The messages as the template gets them; of the conversation all but its messages counts."""

# What the template gets from elsewhere, whoever asks.
_OURS = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt"),
        *("raise_exception", "strftime_now", "bos_token", "eos_token", "unk_token", "pad_token"),
    }
)
_MARK = re.compile(r"hsmark\d+(?:x|tool)")


class ChatTemplate:
    """``render`` applies the template in a sandbox; ``source`` is the template's text, or None for
    a model without one."""

    def __init__(self, render: Render, source: str | None) -> None:
        self._render = render
        self._source = source
        self._variables = _variables_of(source or "") - _OURS
        self._is_text_kept: bool | None = None  # of arguments; None until it was tried

    @property
    def source(self) -> str | None:
        """The template's text."""
        return self._source

    def warm_up(self) -> None:
        """Have the template compiled, so that the first request does not wait for it."""
        if self._source is not None:
            with contextlib.suppress(InvalidRequest):
                self._rendered([{"role": "user", "content": ""}], Conversation(()))

    def apply(self, conversation: Conversation) -> str:
        """The prompt's text. Raises InvalidRequest for what the template cannot express."""
        if self._source is None:
            raise InvalidRequest(
                "This model has no chat template; use /v1/completions.", param="messages"
            )
        self._check_variables(conversation)
        try:
            as_text = self._check_expressible(conversation)
            plain = [self._plain(message, as_text) for message in conversation.messages]
            return self._rendered(plain, conversation)
        except RecursionError:  # of tool arguments, read or written
            raise InvalidRequest(
                "messages: the arguments of a tool call are nested too deeply.",
                param="messages",
                code="not_expressible",
            ) from None

    def marked(self, conversation: Conversation) -> tuple[str, list[tuple[str, str]]]:
        """The text of the prompt with a mark in place of each text of a message, and the path and
        the mark of each: so where each of them stands. Raises InvalidRequest as :meth:`apply`."""
        marked, marks = self._marked(conversation.messages, self._check_expressible(conversation))
        return self._rendered(marked, conversation), marks

    def _check_variables(self, conversation: Conversation) -> None:
        """One that the template never looks at would be without effect."""
        for name in conversation.variables:
            if name not in self._variables:
                raise InvalidRequest(
                    f"chat_template_kwargs.{name[:64]}: the model's chat template knows no such "
                    "variable.",
                    param="chat_template_kwargs",
                )

    def _check_expressible(self, conversation: Conversation) -> bool:
        """Whether tool arguments must be handed over as text rather than as an object."""
        messages = conversation.messages
        has_calls = any(isinstance(item, AssistantMessage) and item.tool_calls for item in messages)
        tools, tool_marks = _marked_tools(conversation.tools)
        failure: InvalidRequest | None = None
        for arguments_as_text in self._forms_of_arguments() if has_calls else (False,):
            marked, marks = self._marked(messages, arguments_as_text)
            try:
                text = self._rendered(marked, replace(conversation, tools=tools))
            except InvalidRequest as error:
                failure = failure or error
                continue
            written = set(_MARK.findall(text))  # one pass: there may be very many marks
            if any(mark not in written for mark in tool_marks):
                raise InvalidRequest(
                    "tools: this model's chat template knows no tools, so they cannot be sent.",
                    param="tools",
                    code="not_expressible",
                )
            lost = next((path for path, mark in marks if mark not in written), None)
            if lost is None:
                return arguments_as_text
            failure = failure or InvalidRequest(
                f"{lost}: the model's chat template leaves this out, so it cannot be sent.",
                param=lost,
                code="not_expressible",
            )
        assert failure is not None
        raise failure

    def _forms_of_arguments(self) -> tuple[bool, ...]:
        """Whether as text, in the order to try: text first where the template writes it as it is,
        since a call that comes back is then written as the model wrote it."""
        if self._is_text_kept is None:
            arguments = '{"hsmark0x":1 }'
            call = ToolCall("hscall000", FunctionCall("hsmark1x", arguments))
            messages: list[Message] = [
                UserMessage("hsmark2x"),
                AssistantMessage(tool_calls=[call]),
            ]
            plain = [self._plain(message, True) for message in messages]
            try:
                self._is_text_kept = arguments in self._rendered(plain, Conversation(messages))
            except InvalidRequest:
                self._is_text_kept = False
        return (True, False) if self._is_text_kept else (False, True)

    def _marked(
        self, messages: Sequence[Message], arguments_as_text: bool
    ) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
        """The conversation with marks in place of its texts, and (path, mark) of each."""
        marks: list[tuple[str, str]] = []

        def mark(path: str) -> str:
            marks.append((path, f"hsmark{len(marks)}x"))
            return marks[-1][1]

        marked = []
        for index, message in enumerate(messages):
            plain = self._plain(message, arguments_as_text)
            at = f"messages[{index}]"
            if plain["content"].strip():
                plain["content"] = mark(f"{at}.content")
            for number, call in enumerate(plain.get("tool_calls", ())):
                function = call["function"]
                path = f"{at}.tool_calls[{number}].function"
                function["name"] = mark(f"{path}.name")
                arguments = {mark(f"{path}.arguments"): mark(f"{path}.arguments")}
                function["arguments"] = json.dumps(arguments) if arguments_as_text else arguments
            marked.append(plain)
        return marked, marks

    def _plain(self, message: Message, arguments_as_text: bool) -> dict[str, Any]:
        plain: dict[str, Any] = {"role": self._role(message)}
        plain["content"] = content_text(message.content)
        if message.name is not None:
            plain["name"] = message.name
        if isinstance(message, ToolMessage):
            plain["tool_call_id"] = message.tool_call_id
        if isinstance(message, AssistantMessage) and message.tool_calls:
            plain["tool_calls"] = [
                _plain_call(call, arguments_as_text) for call in message.tool_calls
            ]
        return plain

    def _role(self, message: Message) -> str:
        """A template that does not know the developer gets its words as the system's."""
        if isinstance(message, DeveloperMessage) and "developer" not in (self._source or ""):
            return "system"
        return str(message.__struct_config__.tag)

    def _rendered(self, messages: list[dict[str, Any]], conversation: Conversation) -> str:
        try:
            return self._render(messages, conversation)
        except TemplateError as error:  # mostly raise_exception: the template's own words
            reason = (error.message or "no reason given").rstrip(".")[:300]
            raise InvalidRequest(
                f"messages: the model's chat template refuses this conversation: {reason}.",
                param="messages",
                code="not_expressible",
            ) from None
        except (TypeError, ValueError, LookupError, AttributeError):
            raise InvalidRequest(
                "messages: the model's chat template cannot express this conversation.",
                param="messages",
                code="not_expressible",
            ) from None


def _marked_tools(
    tools: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The tools with marks in place of their names, and the marks."""
    marks = [f"hsmark{index}tool" for index in range(len(tools))]
    marked: list[Mapping[str, Any]] = [
        {**tool, "function": {**tool["function"], "name": mark}}
        for tool, mark in zip(tools, marks, strict=True)
    ]
    return marked, marks


def _variables_of(source: str) -> frozenset[str]:
    try:
        return frozenset(meta.find_undeclared_variables(_parser().parse(source)))
    except TemplateError:  # of extensions that only the renderer knows
        return frozenset()


def _parser() -> Environment:
    """As lenient as the renderer of transformers: loop controls are its extension."""
    return Environment(extensions=[loopcontrols], autoescape=False)  # nothing is rendered by it


def _plain_call(call: ToolCall, arguments_as_text: bool) -> dict[str, Any]:
    text = call.function.arguments or "{}"
    arguments = text if arguments_as_text else json.loads(text)
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }
