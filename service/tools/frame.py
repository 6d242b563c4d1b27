"""The text around the names and arguments of calls, as one model is used to it.

Owns how that text is found out: the model's template is asked to write calls, and what it writes
counts if it reads as these calls. Knows nothing of grammars.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from service.conversation import Conversation, Ending
from service.errors import InvalidRequest
from service.schemas.chat import AssistantMessage, FunctionCall, Message, ToolCall, UserMessage
from service.shapes.base import Choice
from service.tools.dialect import Dialect
from service.tools.reader import CallReader

__all__ = ["CallFrame", "frame_of"]

_ID = "hsframe00"  # templates that mind ids want nine letters and digits
_NAMES = ("hsfirst", "hssecond")
_ARGUMENTS = '{"hsname": "hsvalue"}'


@dataclass(frozen=True, slots=True)
class CallFrame:
    """Calls are ``first`` name ``middle`` arguments (``between`` name ``middle`` arguments)*
    ``last``."""

    first: str
    middle: str
    between: str
    last: str

    def text(self, calls: Sequence[tuple[str, str]]) -> str:
        """Of calls by name and arguments."""
        bodies = (name + self.middle + arguments for name, arguments in calls)
        return self.first + self.between.join(bodies) + self.last


_DEFAULTS = {
    "hermes": CallFrame(
        '<tool_call>\n{"name": "',
        '", "arguments": ',
        '}\n</tool_call>\n<tool_call>\n{"name": "',
        "}\n</tool_call>",
    ),
    "llama3-json": CallFrame('{"name": "', '", "parameters": ', '}; {"name": "', "}"),
    "mistral": CallFrame('[TOOL_CALLS][{"name": "', '", "arguments": ', '}, {"name": "', "}]"),
}
_NAMES_FIRST = CallFrame("[TOOL_CALLS]", "[ARGS]", "[TOOL_CALLS]", "")


def frame_of(
    dialect: Dialect,
    source: str,
    render: Callable[[Conversation], str],
    ends: Sequence[str],
) -> CallFrame:
    """Of the template with the text ``source``, which ``render`` applies; ``ends`` are the texts
    that may end a turn."""
    if dialect.names_first and "[ARGS]" in source:
        default = _NAMES_FIRST
    else:
        default = _DEFAULTS[dialect.name]
    for names in (_NAMES, _NAMES[:1]):
        written = _written(render, names, ends)
        frame = None if written is None else _cut(written, names, default)
        if frame is not None and _reads_as_written(frame, dialect):
            return frame
    return default


def _written(
    render: Callable[[Conversation], str], names: Sequence[str], ends: Sequence[str]
) -> str | None:
    """What an assistant's turn with calls of ``names`` is, without what ends it."""
    asked: list[Message] = [UserMessage(content="hsquestion")]
    calls = [ToolCall(id=_ID, function=FunctionCall(name, _ARGUMENTS)) for name in names]
    try:
        before = render(Conversation(asked))
        answered = [*asked, AssistantMessage(tool_calls=calls)]
        whole = render(Conversation(answered, Ending.CLOSED))
    except InvalidRequest:
        return None
    if not whole.startswith(before):
        return None
    turn = whole[len(before) :]
    found = turn.rfind(_ARGUMENTS)
    after = [at for end in ends if end and (at := turn.find(end, found)) >= 0]
    return turn[: min(after)] if found >= 0 and after else None


def _cut(written: str, names: Sequence[str], default: CallFrame) -> CallFrame | None:
    pieces: list[str] = []
    rest = written
    for name in names:
        for mark in (name, _ARGUMENTS):
            piece, found, rest = rest.partition(mark)
            if not found:
                return None
            pieces.append(piece)
    pieces.append(rest)
    if any(_ID in piece for piece in pieces):  # an id is for each call to make up
        return None
    if len(names) == 1:
        return CallFrame(pieces[0], pieces[1], default.between, pieces[2])
    is_regular = pieces[1] == pieces[3]
    return CallFrame(pieces[0], pieces[1], pieces[2], pieces[4]) if is_regular else None


def _reads_as_written(frame: CallFrame, dialect: Dialect) -> bool:
    calls = [("f", '{"a": 1}'), ("g", "{}")]
    return all(_read(frame.text(asked), dialect) == ("", asked) for asked in (calls[:1], calls))


def _read(text: str, dialect: Dialect) -> tuple[str, list[tuple[str, str]]]:
    reader, choice = CallReader(dialect, {"f", "g"}), Choice()
    for delta in (*reader.push(text, ()), *reader.finish()):
        choice.take(delta)
    return choice.text, [(call.name, call.arguments) for call in choice.calls]
