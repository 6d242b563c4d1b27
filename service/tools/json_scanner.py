"""Follows one JSON value through text that arrives in pieces.

Owns the grammar of JSON (RFC 8259), as strict as its parsers are: what was followed to the end can
be parsed, and what cannot become JSON any more ends at the first character that shows it. Builds no
values.
"""

from __future__ import annotations

import re
from enum import Enum, auto

__all__ = ["MAX_DEPTH", "WHITESPACE", "JsonScanner"]

MAX_DEPTH = 128
WHITESPACE = " \t\n\r"
_MAX_NUMBER = 64  # characters
_BLANK = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # of a string
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]?|u[0-9A-Fa-f]{0,4})')  # or the beginning of one
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_NUMBER_BEGUN = re.compile(r"-?(?:(?:0|[1-9]\d*)(?:\.\d*|(?:\.\d+)?[eE][+-]?\d*)?)?", re.ASCII)
_LITERALS = ("true", "false", "null")


class _State(Enum):
    VALUE = auto()
    FIRST_VALUE = auto()  # of a list, or its end
    NAME = auto()
    FIRST_NAME = auto()  # of an object, or its end
    COLON = auto()
    NEXT = auto()  # a comma, or the end of what is open
    STRING = auto()
    NUMBER = auto()
    LITERAL = auto()


class JsonScanner:
    """A value begins with its first character: white space before it is for others to skip."""

    def __init__(self) -> None:
        self._state = _State.VALUE
        self._open: list[str] = []  # "{" or "[", the innermost last
        self._is_name = False  # whether the string is one
        self._begun = ""  # of an escape, a number or a literal
        self.is_complete = False
        self.is_broken = False

    def feed(self, text: str, at: int = 0) -> int:
        """Follow ``text`` from ``at``; where the value, or what can be one, ends in it."""
        while at < len(text) and not (self.is_complete or self.is_broken):
            match self._state:
                case _State.STRING:
                    at = self._string(text, at)
                case _State.NUMBER:
                    at = self._number(text, at)
                case _State.LITERAL:
                    at = self._literal(text, at)
                case _:
                    at = self._between(text, at)
        return at

    # ------------------------------------------------------------ within a value

    def _string(self, text: str, at: int) -> int:
        if self._begun:
            return self._escape(text, at)
        end = _PLAIN.match(text, at).end()  # type: ignore[union-attr]
        if end == len(text):
            return end
        if text[end] == "\\":
            self._begun = "\\"
            return end + 1
        if text[end] == '"':
            if self._is_name:
                self._state = _State.COLON
            else:
                self._end_value()
            return end + 1
        self.is_broken = True
        return end

    def _escape(self, text: str, at: int) -> int:
        begun = self._begun + text[at]
        if not _ESCAPE.fullmatch(begun):
            self.is_broken = True
            return at
        is_whole = len(begun) == (6 if begun[1] == "u" else 2)
        self._begun = "" if is_whole else begun
        return at + 1

    def _number(self, text: str, at: int) -> int:
        while at < len(text):
            begun = self._begun + text[at]
            if len(begun) > _MAX_NUMBER or not _NUMBER_BEGUN.fullmatch(begun):
                if _NUMBER.fullmatch(self._begun):
                    self._end_value()
                else:
                    self.is_broken = True
                return at
            self._begun = begun
            at += 1
        return at

    def _literal(self, text: str, at: int) -> int:
        begun = self._begun + text[at]
        if not any(literal.startswith(begun) for literal in _LITERALS):
            self.is_broken = True
            return at
        self._begun = begun
        if begun in _LITERALS:
            self._end_value()
        return at + 1

    # ------------------------------------------------------------ between values

    def _between(self, text: str, at: int) -> int:
        if self._open:
            at = _BLANK.match(text, at).end()  # type: ignore[union-attr]
            if at == len(text):
                return at
        char = text[at]
        match self._state:
            case _State.COLON if char == ":":
                self._state = _State.VALUE
            case _State.NEXT if char == ",":
                self._state = _State.NAME if self._open[-1] == "{" else _State.VALUE
            case _State.NEXT if char == _closing(self._open[-1]):
                self._close()
            case _State.FIRST_NAME if char == "}":
                self._close()
            case _State.FIRST_VALUE if char == "]":
                self._close()
            case _State.NAME | _State.FIRST_NAME if char == '"':
                self._state, self._is_name = _State.STRING, True
            case _State.VALUE | _State.FIRST_VALUE:
                return self._begin_value(char, at)
            case _:
                self.is_broken = True
                return at
        return at + 1

    def _begin_value(self, char: str, at: int) -> int:
        if char in "{[":
            if len(self._open) == MAX_DEPTH:
                self.is_broken = True
                return at
            self._open.append(char)
            self._state = _State.FIRST_NAME if char == "{" else _State.FIRST_VALUE
        elif char == '"':
            self._state, self._is_name = _State.STRING, False
        elif char in "-0123456789":
            self._state, self._begun = _State.NUMBER, char
        elif char in "tfn":
            self._state, self._begun = _State.LITERAL, char
        else:
            self.is_broken = True
            return at
        return at + 1

    def _close(self) -> None:
        self._open.pop()
        self._end_value()

    def _end_value(self) -> None:
        self._begun = ""
        self._state = _State.NEXT
        self.is_complete = not self._open


def _closing(opening: str) -> str:
    return "}" if opening == "{" else "]"
