"""Grammars of answers that must, or may, call tools.

Owns how calls, and text beside them, are put in llguidance's dialect of Lark
(https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md). Knows nothing of requests or
of templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from model_worker.protocol import Grammar
from service.tools.dialect import Dialect
from service.tools.frame import CallFrame

__all__ = ["BoundFunction", "CallGrammar", "arguments_schema", "json_grammar"]

# As templates write arguments back (json.dumps), so that a call that comes back as history is the
# text that was generated.
_SPACING = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
_ANYTHING = "/(.|\\n)*/"
_NO_OBJECT = "/([ \\t\\r\\n]*[^{ \\t\\r\\n](.|\\n)*)?/"  # text that no bare call can be


@dataclass(frozen=True, slots=True)
class BoundFunction:
    """A function that may be called, and the schema that its arguments keep to."""

    name: str
    schema: Mapping[str, Any]


def arguments_schema(schema: Mapping[str, Any], *, is_lenient: bool) -> dict[str, Any]:
    """With the spacing of a call; ``is_lenient`` leaves out what cannot be held to."""
    return {**schema, "x-guidance": {**_SPACING, "lenient": is_lenient}}


def json_grammar(schema: Mapping[str, Any]) -> Grammar:
    """The grammar of a JSON schema, as it is within one of calls."""
    return Grammar("lark", f"start: %json {json.dumps(schema)}")


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """``special_ids`` are the ids of tokens that stand for their text alone, by that text."""

    dialect: Dialect
    frame: CallFrame
    special_ids: Mapping[str, int]

    def forced(self, functions: Sequence[BoundFunction], *, is_parallel: bool) -> str:
        """At least one call, and no text beside it."""
        return self._lark("start: calls", functions, is_parallel)

    def beside_answer(
        self, functions: Sequence[BoundFunction], answer: Mapping[str, Any], *, is_parallel: bool
    ) -> str:
        """Calls, or else JSON that keeps to the schema ``answer``."""
        start = f"start: calls | answer\nanswer: %json {json.dumps(answer)}"
        return self._lark(start, functions, is_parallel)

    def beside_text(self, functions: Sequence[BoundFunction], *, is_parallel: bool) -> str:
        """Any text, in which each call is a good one."""
        opening, frame = self.dialect.opening, self.frame
        _, found, inside = frame.first.partition(opening)
        special = self.special_ids.get(opening)
        if not found:  # a bare call, which begins the answer or does not stand in it
            marked = f"<[{special}]> calls | " if special is not None else ""
            start = f"start: calls | {marked}text\ntext: TEXT\nTEXT: {_NO_OBJECT}"
            return self._lark(start, functions, is_parallel)
        head = f"head: TEXT <[{special}]>"
        if special is None:
            head = f"head[lazy]: TEXT {json.dumps(opening)}"
        is_list = opening not in frame.between
        more = f"({self._text(frame.between)} body)*" if is_list and is_parallel else ""
        marked = f"head {self._text(inside)} body {more} {self._text(frame.last)}"
        start = f"start: ({marked})* text" if is_parallel else f"start: {marked} | text"
        rules = (start, head, "text: TEXT", f"TEXT: {_ANYTHING}")
        return "\n".join((*rules, *self._bodies(functions)))

    def _lark(self, start: str, functions: Sequence[BoundFunction], is_parallel: bool) -> str:
        frame = self.frame
        more = f"({self._text(frame.between)} body)*" if is_parallel else ""
        calls = f"calls: {self._text(frame.first)} body {more} {self._text(frame.last)}"
        return "\n".join((start, calls, *self._bodies(functions)))

    def _bodies(self, functions: Sequence[BoundFunction]) -> list[str]:
        rules = ["body: " + " | ".join(f"body_{index}" for index in range(len(functions)))]
        for index, function in enumerate(functions):
            named = self._text(function.name + self.frame.middle)
            rules.append(f"body_{index}: {named} %json {json.dumps(function.schema)}")
        return rules

    def _text(self, text: str) -> str:
        """``text`` as terminals: no text stands for a special token but its id."""
        if not text:
            return ""
        specials = sorted(self.special_ids, key=len, reverse=True)
        pattern = "|".join(map(re.escape, specials))
        pieces = re.split(f"({pattern})", text) if pattern else [text]
        return " ".join(
            f"<[{self.special_ids[piece]}]>" if piece in self.special_ids else json.dumps(piece)
            for piece in pieces
            if piece
        )
