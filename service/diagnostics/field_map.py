"""Which part of a request a place in its prompt's text belongs to.

Owns the walk along the text of a prompt, piece by piece, in the order in which its template writes
them. Knows nothing of tokens, or of how prompts differ.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterator
from dataclasses import dataclass

from service.chat_template import ChatTemplate
from service.conversation import Conversation
from service.diagnostics.kinds import TEMPLATE_FIELD
from service.errors import InvalidRequest
from service.schemas.chat import AssistantMessage, content_text

__all__ = ["FieldMap"]

_ARGUMENTS = ".arguments"
_MAX_LEVELS = 3  # a tool's name stands in its function, which stands in the tool
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class _Span:
    start: int  # characters
    end: int
    path: str


class FieldMap:
    """Of one prompt's text. Paths are those of a chat request: ``messages[2].content``,
    ``tools[0]``; what belongs to no part of it is ``template``."""

    def __init__(self, text: str, conversation: Conversation, template: ChatTemplate) -> None:
        spans = [
            *_spans_of_tools(text, conversation),
            *_spans_of_messages(text, conversation, template),
        ]
        self._spans = sorted(spans, key=lambda span: span.start)
        self._starts = [span.start for span in self._spans]

    def path_at(self, place: int) -> str:
        """``place`` is in characters."""
        index = bisect.bisect_right(self._starts, place) - 1
        if index >= 0 and place < self._spans[index].end:
            return self._spans[index].path
        return TEMPLATE_FIELD

    def start_of(self, beginning: str) -> int | None:
        """Where the first path with that beginning begins; None where none was found."""
        starts = (span.start for span in self._spans if span.path.startswith(beginning))
        return min(starts, default=None)

    def next_message(self, place: int) -> int | None:
        """The number of the message whose text is the next from ``place`` on."""
        for span in self._spans[bisect.bisect_left(self._starts, place) :]:
            if span.path.startswith("messages["):
                return int(span.path[len("messages[") : span.path.index("]")])
        return None


def _spans_of_messages(
    text: str, conversation: Conversation, template: ChatTemplate
) -> Iterator[_Span]:
    try:
        marked, marks = template.marked(conversation)
    except InvalidRequest:
        return
    place = at = 0  # in the text, and in the marked one
    open_call: tuple[int, str] | None = None
    for path, mark in marks:
        found = marked.find(mark, at)
        if found < 0:
            continue
        literal, at = marked[at:found], found + len(mark)
        if path.endswith(_ARGUMENTS):
            # They are written in the template's own way: they reach to what comes next.
            open_call = open_call or (place, path)
            continue
        value = _value_of(path, conversation)
        start, end = _find(text, place, literal, value, is_after_call=open_call is not None)
        if start < 0:
            return
        if open_call is not None:
            yield _Span(open_call[0], start, open_call[1])
            open_call = None
        yield _Span(start, end, path)
        place = end
    if open_call is not None:
        yield _Span(open_call[0], len(text), open_call[1])


def _find(
    text: str, place: int, literal: str, value: str, *, is_after_call: bool
) -> tuple[int, int]:
    """Where ``value`` stands from ``place`` on: behind ``literal`` if that is written as it was,
    else where it comes first."""
    for written in (value, value.strip()):
        start = place + len(literal)
        if (
            not is_after_call
            and text.startswith(literal, place)
            and text.startswith(written, start)
        ):
            return start, start + len(written)
    start = text.find(value.strip(), place)
    return start, start + len(value.strip())


def _value_of(path: str, conversation: Conversation) -> str:
    index, _, rest = path.removeprefix("messages[").partition("]")
    message = conversation.messages[int(index)]
    if rest == ".content" or not isinstance(message, AssistantMessage):
        return content_text(message.content)
    number = int(rest.removeprefix(".tool_calls[").partition("]")[0])
    return message.tool_calls[number].function.name


def _spans_of_tools(text: str, conversation: Conversation) -> Iterator[_Span]:
    """Each is a JSON object, or else the line that has its name in it."""
    place = 0
    for number, tool in enumerate(conversation.tools):
        name = json.dumps(tool["function"]["name"])
        found = text.find(name, place)
        if found < 0:
            return
        start, end = _object_around(text, found, place) or _line_of(text, found, place)
        yield _Span(start, end, f"tools[{number}]")
        place = end


def _object_around(text: str, place: int, floor: int) -> tuple[int, int] | None:
    """The largest JSON object about ``place``, of those within a few levels."""
    around = None
    brace = place
    for _ in range(_MAX_LEVELS):
        brace = text.rfind("{", floor, brace)
        if brace < 0:
            break
        try:
            _, end = _DECODER.raw_decode(text, brace)
        except (ValueError, RecursionError):
            continue
        if end > place:
            around = brace, end
    return around


def _line_of(text: str, place: int, floor: int) -> tuple[int, int]:
    end = text.find("\n", place)
    return max(text.rfind("\n", floor, place) + 1, floor), len(text) if end < 0 else end
