"""What an answer grows by: pieces of text, and pieces of tool calls.

Owns these pieces and the seam that makes them from text. Knows nothing of any model's way of
writing a call, nor of how an endpoint writes its answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from service.answer_text import ScoredToken

__all__ = ["AnswerReader", "Delta", "MakeReader", "PlainReader", "TextDelta", "ToolCallDelta"]


class TextDelta(msgspec.Struct, frozen=True):
    """``scores`` are those of the tokens whose text ends in this piece, where asked for."""

    text: str
    scores: tuple[ScoredToken, ...] = ()


class ToolCallDelta(msgspec.Struct, frozen=True):
    """``call_id`` and ``name`` come with the first delta of a call, and with it alone."""

    index: int  # of the call in its answer
    arguments: str = ""  # a piece of the JSON text
    call_id: str = ""
    name: str = ""


Delta = TextDelta | ToolCallDelta


class AnswerReader(Protocol):
    """Turns the text of one choice, as it comes, into deltas."""

    def push(self, text: str, scores: tuple[ScoredToken, ...]) -> Sequence[Delta]:
        """What became certain with this text; either may be empty."""
        ...

    def finish(self) -> Sequence[Delta]:
        """What was held back. Called once, when no text follows."""
        ...


MakeReader = Callable[[], AnswerReader]


class PlainReader:
    """Of an answer that is text and nothing else."""

    def push(self, text: str, scores: tuple[ScoredToken, ...]) -> Sequence[Delta]:
        return (TextDelta(text, scores),) if text or scores else ()

    def finish(self) -> Sequence[Delta]:
        return ()
