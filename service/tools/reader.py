"""Reads tool calls out of an answer's text as it comes.

Owns where calls begin and end in a text, and what of it stays text: all that turns out to be no
call, unchanged. The text alone decides, not the pieces in which it comes. Knows nothing of models,
of tokens or of how an endpoint writes calls.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Collection, Sequence
from enum import Enum, auto

from service.answer_text import ScoredToken
from service.deltas import Delta, ToolCallDelta
from service.tools.call_object import CallObject
from service.tools.dialect import Dialect
from service.tools.held_text import HeldText
from service.tools.json_scanner import WHITESPACE

__all__ = ["CallReader"]

_ID_CHARS = string.ascii_letters + string.digits
_HEADER = re.compile(r"\s*([A-Za-z0-9_.-]+)(?:\[CALL_ID\][A-Za-z0-9]*)?(?:\[ARGS\])?\s*")
_MAX_HEADER = 256  # characters


class _State(Enum):
    START = auto()  # of an answer that may be a call without anything before it
    TEXT = auto()
    BODY = auto()  # behind the opening
    HEADER = auto()  # the name before arguments
    OBJECT = auto()
    AFTER = auto()  # behind an object


class CallReader:
    """An answer reader (service.deltas). ``names`` are those of the functions on offer.

    White space around calls is theirs, except between a call and text that follows. A call that
    breaks off once it has begun ends there, and what follows is text.
    """

    def __init__(self, dialect: Dialect, names: Collection[str]) -> None:
        self._dialect = dialect
        self._names = names
        self._held = HeldText()
        self._at = 0  # how far what is held was read
        self._state = _State.START if dialect.is_bare else _State.TEXT
        self._opening_end = 0  # in what is held, while no call has come of it
        self._is_bare = False  # whether the object was not announced
        self._is_in_list = False
        self._object: CallObject | None = None
        self._is_begun = False  # whether the object is given out
        self._num_calls = 0
        self._is_after_call = False  # with nothing but white space since

    def push(self, text: str, scores: tuple[ScoredToken, ...]) -> Sequence[Delta]:
        self._held.push(text, scores)
        return self._advance()

    def finish(self) -> Sequence[Delta]:
        deltas: list[Delta] = []
        while self._state in (_State.BODY, _State.HEADER, _State.OBJECT) and not self._is_begun:
            deltas += self._fail()
            deltas += self._advance()
        is_over = self._state is _State.AFTER or self._is_begun
        if not is_over and not (self._is_after_call and self._held.text.isspace()):
            rest = self._held.take_all()
            if rest.text or (rest.scores and not self._num_calls):
                deltas.append(rest)
        return deltas

    # ------------------------------------------------------------ step by step

    def _advance(self) -> list[Delta]:
        deltas: list[Delta] = []
        while self._at < len(self._held.text) and (more := self._step()) is not None:
            deltas += more
        return deltas

    def _step(self) -> list[Delta] | None:
        """What is certain by it; None where it has to wait for more text."""
        match self._state:
            case _State.START:
                return self._start()
            case _State.TEXT:
                return self._text()
            case _State.BODY:
                return self._body()
            case _State.HEADER:
                return self._header()
            case _State.OBJECT:
                return self._read_object()
            case _State.AFTER:
                return self._after()

    def _start(self) -> list[Delta] | None:
        char = self._next_char()
        if not char:
            return None
        self._is_bare = char == "{"
        self._opening_end = 0
        self._state = _State.OBJECT if self._is_bare else _State.TEXT
        self._at = self._at if self._is_bare else 0
        return []

    def _text(self) -> list[Delta] | None:
        text, opening = self._held.text, self._dialect.opening
        found = text.find(opening)
        end = found if found >= 0 else _possible_start(text, opening)
        deltas = self._give_out(len(text[:end].rstrip(WHITESPACE)))
        if found < 0:
            self._at = len(self._held.text)
            return deltas or None
        self._opening_end = self._at = self._held.text.index(opening) + len(opening)
        self._is_bare = False
        self._state = _State.BODY
        return deltas

    def _body(self) -> list[Delta] | None:
        char = self._next_char()
        if not char:
            return None
        self._is_in_list = char == "["
        if self._is_in_list:
            self._at += 1
        is_name = self._dialect.names_first and char not in "[{"
        self._state = _State.HEADER if is_name else _State.OBJECT
        return []

    def _header(self) -> list[Delta] | None:
        header = self._held.text[self._at : self._at + _MAX_HEADER]
        end = header.find("{")
        if end < 0 and len(header) < _MAX_HEADER:
            return None
        found = _HEADER.fullmatch(header, 0, end) if end >= 0 else None
        if found is None:
            return self._fail()
        self._at += end
        self._object = CallObject(self._dialect.argument_names, found[1])
        self._state = _State.OBJECT
        return []

    def _read_object(self) -> list[Delta] | None:
        if self._object is None:
            if not self._next_char():
                return None
            self._object = CallObject(self._dialect.argument_names)
        call = self._object
        self._at = call.feed(self._held.text, self._at)
        deltas: list[Delta] = []
        if call.is_begun and not self._is_begun:
            if self._is_bare and call.name not in self._names:
                return self._fail()
            deltas.append(ToolCallDelta(self._num_calls, "", self._new_id(), call.name))
            self._is_begun = True
            self._num_calls += 1
        if self._is_begun:
            arguments = call.take_arguments()
            if arguments:
                deltas.append(ToolCallDelta(self._num_calls - 1, arguments))
            self._drop_read()
        if call.is_complete:
            self._end_object()
            self._state = _State.AFTER
        elif call.is_broken:
            deltas += self._fail()
        return deltas

    def _after(self) -> list[Delta] | None:
        char = self._next_char()
        if not char:
            return None
        if self._is_in_list:
            if char not in ",]":
                return self._fail()
            self._is_in_list = char == ","
            self._at += 1
            if not self._is_in_list:
                self._drop_read()
            self._state = _State.OBJECT if self._is_in_list else _State.AFTER
            return []
        if char == self._dialect.separator:
            self._at += 1
            self._state = _State.OBJECT
            return []
        if char == "{" and self._dialect.is_bare:
            self._is_bare = True
            self._state = _State.OBJECT
            return []
        closing = self._dialect.closing
        rest = self._held.text[self._at : self._at + len(closing)]
        if closing and closing.startswith(rest):
            if rest != closing:
                return None
            self._at += len(closing)
            self._drop_read()
        else:
            self._at = 0
        self._state = _State.TEXT
        return []

    # ------------------------------------------------------------ what they have in common

    def _next_char(self) -> str:
        """The next that is no white space, empty where none has come; reading goes on with it."""
        text = self._held.text
        while self._at < len(text) and text[self._at] in WHITESPACE:
            self._at += 1
        return text[self._at : self._at + 1]

    def _fail(self) -> list[Delta]:
        """What was read is no call: it is text, up to where another may begin."""
        is_first = not self._is_begun and self._opening_end > 0
        deltas = self._give_out(self._opening_end) if is_first else []
        self._end_object()
        self._is_in_list = False
        self._state, self._at = _State.TEXT, 0
        return deltas

    def _end_object(self) -> None:
        self._is_after_call |= self._is_begun
        self._object, self._is_begun = None, False

    def _give_out(self, num_chars: int) -> list[Delta]:
        if not num_chars:
            return []
        self._is_after_call = False
        self._at = max(0, self._at - num_chars)
        self._opening_end = 0
        return [self._held.take(num_chars)]

    def _drop_read(self) -> None:
        self._held.drop(self._at)
        self._at = self._opening_end = 0

    def _new_id(self) -> str:
        size = self._dialect.num_id_chars
        return self._dialect.id_prefix + "".join(secrets.choice(_ID_CHARS) for _ in range(size))


def _possible_start(text: str, opening: str) -> int:
    """Where ``opening`` may have begun at the end of ``text``."""
    for size in range(min(len(opening) - 1, len(text)), 0, -1):
        if text.endswith(opening[:size]):
            return len(text) - size
    return len(text)
