"""Streams of named events, as the Messages and the Responses API have them, and answers with tool
calls that no model has to write."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import httpx

from service.answer_text import ScoredToken, TextEvent
from service.answers import Answer, ChoiceSource
from service.deltas import Delta, TextDelta, ToolCallDelta
from service.shapes.base import Shape
from service.sse import ServerEvent


def named_events(response: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    """Of a whole stream: name and decoded data of each event; comments are left out."""
    events = []
    for block in response.text.split("\n\n"):
        lines = block.split("\n")
        if not block or lines[0].startswith(":"):
            continue
        assert lines[0].startswith("event: "), block
        assert lines[1].startswith("data: "), block
        name, data = lines[0].removeprefix("event: "), json.loads(lines[1].removeprefix("data: "))
        assert data["type"] == name
        events.append((name, data))
    return events


class CallReader:
    """Reads a piece such as ``[look {"at":`` as the beginning of a call, one such as ``] 1}`` as
    more of it, and anything else as text."""

    def __init__(self) -> None:
        self._num_calls = 0

    def push(self, text: str, scores: tuple[ScoredToken, ...]) -> Sequence[Delta]:
        if text.startswith("["):
            name, _, arguments = text[1:].partition(" ")
            index, self._num_calls = self._num_calls, self._num_calls + 1
            return (ToolCallDelta(index, arguments, f"call_{index}", name),)
        if text.startswith("]"):
            return (ToolCallDelta(self._num_calls - 1, text[1:]),)
        return (TextDelta(text, scores),) if text or scores else ()

    def finish(self) -> Sequence[Delta]:
        return ()


def answer_of(
    shape: Shape, pieces: Sequence[str], reason: str = "stop", num_prompt_tokens: int = 10
) -> Answer:
    """An answer that says ``pieces``, a token each; four of its prompt's tokens were cached."""

    async def said() -> AsyncGenerator[TextEvent, None]:
        yield TextEvent("", 0, 4)
        for number, piece in enumerate(pieces, 1):
            yield TextEvent(piece, number, 4)
        yield TextEvent("", len(pieces), 4, reason)

    return Answer(shape, [ChoiceSource(said(), CallReader())], [num_prompt_tokens])


def events_of_answer(answer: Answer) -> list[dict[str, Any]]:
    async def collect() -> list[ServerEvent]:
        return [event async for event in answer.events()]

    events = asyncio.run(collect())
    decoded: list[dict[str, Any]] = [json.loads(event.data) for event in events]
    assert [event.name for event in events] == [event["type"] for event in decoded]
    return decoded


def whole_of_answer(answer: Answer) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(asyncio.run(answer.whole()))
    return body
