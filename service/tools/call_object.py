"""Reads one call of a tool, a JSON object with a name and arguments, as its text arrives.

Owns what such an object may hold, and from where on it certainly is a call. Knows nothing of what
stands around it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum, auto

from service.tools.json_scanner import WHITESPACE, JsonScanner

__all__ = ["CallObject"]

_OTHER_FIELDS = ("id", "type")  # may stand beside them, and say nothing


class _Part(Enum):
    OPENING = auto()
    FIELD = auto()
    COLON = auto()
    VALUE = auto()
    NEXT = auto()  # a comma, or the end


class CallObject:
    """``argument_names`` are the names that the arguments may go by. With a ``name`` the text is
    that of the arguments alone.

    A call is begun once its name is known and its arguments are known to be an object; until then
    it may turn out to be none, and after that its arguments may break off.
    """

    def __init__(self, argument_names: Sequence[str], name: str = "") -> None:
        self._argument_names = argument_names
        self._is_arguments_alone = bool(name)
        self._part = _Part.VALUE if name else _Part.OPENING
        self._field = "arguments" if name else ""  # whose value it is
        self._seen: set[str] = set()
        self._scanner: JsonScanner | None = None  # of a field's name or value
        self._captured: list[str] = []  # what that has followed
        self._arguments: list[str] = []  # not yet taken
        self._has_arguments = False  # that are certainly an object
        self.name = name
        self.is_complete = False
        self.is_broken = False

    @property
    def is_begun(self) -> bool:
        return bool(self.name) and self._has_arguments

    def take_arguments(self) -> str:
        """What of the arguments' JSON has come since the last call, as it is written."""
        taken, self._arguments = "".join(self._arguments), []
        return taken

    def feed(self, text: str, at: int) -> int:
        """Read ``text`` from ``at``; how far it belongs to the call, or may."""
        while at < len(text) and not (self.is_complete or self.is_broken):
            if self._scanner is not None:
                at = self._scan(self._scanner, text, at)
            elif text[at] in WHITESPACE or self._takes(text[at]):
                at += 1
        return at

    def _scan(self, scanner: JsonScanner, text: str, at: int) -> int:
        end = scanner.feed(text, at)
        is_plain = self._part is _Part.VALUE and self._field == "arguments" and self._has_arguments
        (self._arguments if is_plain else self._captured).append(text[at:end])
        self.is_broken = scanner.is_broken
        if scanner.is_complete:
            self._scanner = None
            captured, self._captured = "".join(self._captured), []
            if self._part is _Part.FIELD:
                self._end_field_name(captured)
            else:
                self._end_value(captured)
        return end

    def _takes(self, char: str) -> bool:
        """Whether ``char``, which is between two texts to scan, is no part of the next."""
        match self._part:
            case _Part.OPENING if char == "{":
                self._part = _Part.FIELD
            case _Part.COLON if char == ":":
                self._part = _Part.VALUE
            case _Part.NEXT if char == ",":
                self._part = _Part.FIELD
            case _Part.NEXT if char == "}" and self.is_begun:
                self.is_complete = True
            case _Part.FIELD if char == '"':
                self._scanner = JsonScanner()
                return False
            case _Part.VALUE:
                self._begin_value(char)
                return False
            case _:
                self.is_broken = True
                return False
        return True

    def _end_field_name(self, captured: str) -> None:
        name = _text_in(captured)
        field = "arguments" if name in self._argument_names else name
        is_known = field in ("name", "arguments") or field in _OTHER_FIELDS
        if not is_known or field in self._seen:
            self.is_broken = True
            return
        self._seen.add(field)
        self._field, self._part = field, _Part.COLON

    def _begin_value(self, char: str) -> None:
        allowed = {"name": '"', "arguments": '{"'}.get(self._field)
        if allowed is not None and char not in allowed:
            self.is_broken = True
            return
        self._has_arguments |= self._field == "arguments" and char == "{"
        self._scanner = JsonScanner()

    def _end_value(self, captured: str) -> None:
        self._part = _Part.NEXT
        if self._field == "name":
            self.name = _text_in(captured)
            self.is_broken |= not self.name
        elif self._field == "arguments" and not self._has_arguments:
            self._take_encoded(captured)
        self.is_complete = self._is_arguments_alone and not self.is_broken

    def _take_encoded(self, captured: str) -> None:
        """Arguments that are JSON in a JSON string."""
        arguments = _text_in(captured).strip(WHITESPACE)
        scanner = JsonScanner()
        is_whole = scanner.feed(arguments) == len(arguments) and scanner.is_complete
        if not (is_whole and arguments.startswith("{")):
            self.is_broken = True
            return
        self._has_arguments = True
        self._arguments.append(arguments)


def _text_in(captured: str) -> str:
    """The text of a JSON string; empty if there is half a surrogate pair in it."""
    text: str = json.loads(captured)
    return text if text.isascii() or text.encode("utf-8", "replace").decode() == text else ""
