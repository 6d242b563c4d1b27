"""The seam between an answer and the form in which an endpoint writes it.

Owns what a shape is told: the choices as they grow, and the usage. Knows no endpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import UNSET, UnsetType

from service.answer_text import ScoredToken
from service.deltas import Delta, TextDelta
from service.errors import GatewayError
from service.schemas.bodies import Usage
from service.schemas.cache_explanation import CacheExplanation
from service.sse import ServerEvent

__all__ = ["AnswerIdentity", "AnswerNotes", "CallSoFar", "Choice", "MakeShape", "Shape"]


@dataclass(slots=True)
class AnswerNotes:
    """What becomes known of an answer before its end: why no more of its prompt was cached, if the
    client wants to know."""

    cache_explanation: CacheExplanation | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class AnswerIdentity:
    """What all chunks of an answer have in common. ``created`` is in seconds since 1970;
    ``history`` is said of a session's answer, and empty of others."""

    id: str
    created: int
    model: str
    fingerprint: str
    history: str = ""
    notes: AnswerNotes = field(default_factory=AnswerNotes)


@dataclass(slots=True)
class CallSoFar:
    """One tool call; ``arguments`` is JSON text once the answer has ended by itself."""

    call_id: str
    name: str
    pieces: list[str] = field(default_factory=list)
    num_pieces_before: int = 0  # of text

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class Choice:
    """One answer to one prompt so far. ``pieces`` begin with the prompt where that is echoed, and
    ``scores`` with those of its tokens."""

    prompt: int = 0  # which of the request's prompts
    is_admitted: bool = False
    is_begun: bool = False  # whether any of it, or its end, was given out
    pieces: list[str] = field(default_factory=list)
    calls: list[CallSoFar] = field(default_factory=list)
    scores: list[ScoredToken] = field(default_factory=list)
    prompt_scores: tuple[ScoredToken, ...] = ()
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_host_tokens: int = 0
    num_disk_tokens: int = 0
    finish_reason: str | None = None  # stop | length
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def parts(self) -> list[str | CallSoFar]:
        """Its texts and its calls in the order in which they were said; no text is empty."""
        parts: list[str | CallSoFar] = []
        start = 0
        for call in self.calls:
            parts += ["".join(self.pieces[start : call.num_pieces_before]), call]
            start = call.num_pieces_before
        parts.append("".join(self.pieces[start:]))
        return [part for part in parts if part != ""]

    def take(self, delta: Delta) -> None:
        if isinstance(delta, TextDelta):
            self.pieces.append(delta.text)
            self.scores += delta.scores
            return
        if delta.name:
            call = CallSoFar(delta.call_id, delta.name, num_pieces_before=len(self.pieces))
            self.calls.append(call)
        self.calls[delta.index].pieces.append(delta.arguments)


class Shape(Protocol):
    """Streamed and whole answers of one endpoint.

    Of a stream the calls come in this order: ``opening`` for each choice once its prompt is
    admitted, ``delta`` as it grows, ``ending``; after the last choice ``closing``. ``failure``
    takes the place of all that had still to come. A choice holds what it is told of already.
    """

    def opening(self, index: int, choice: Choice, usage: Usage) -> Sequence[ServerEvent]: ...

    def delta(
        self, index: int, delta: Delta, choice: Choice, usage: Usage
    ) -> Sequence[ServerEvent]: ...

    def ending(self, index: int, choice: Choice, usage: Usage) -> Sequence[ServerEvent]: ...

    def closing(self, choices: Sequence[Choice], usage: Usage) -> Sequence[ServerEvent]: ...

    def failure(self, error: GatewayError) -> Sequence[ServerEvent]: ...

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes: ...


MakeShape = Callable[[AnswerIdentity], Shape]
