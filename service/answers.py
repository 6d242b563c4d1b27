"""From the text events of one or several prompts to an answer's body, whole or in chunks.

Owns the merging of choices, the usage, and which chunk says what. Both forms are made from the
same events. Knows nothing of how events come about, nor of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import UNSET, UnsetType

from service.generation import TextEvent
from service.schemas import responses
from service.schemas.responses import Usage

__all__ = ["Answer", "AnswerIdentity", "ChatShape", "CompletionShape", "Shape"]

Events = AsyncGenerator[TextEvent, None]


@dataclass(frozen=True, slots=True)
class AnswerIdentity:
    """What all chunks of an answer have in common. ``created`` is in seconds since 1970."""

    id: str
    created: int
    model: str
    fingerprint: str


@dataclass(slots=True)
class Choice:
    """One prompt's answer so far. ``text`` begins with the prompt where that is to be echoed."""

    num_prompt_tokens: int
    text: list[str] = field(default_factory=list)
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Shape(Protocol):
    """How an endpoint writes its answers; all methods give one JSON body."""

    def opening(self, index: int, usage: Usage | None) -> bytes | None: ...

    def piece(self, index: int, text: str, usage: Usage | None) -> bytes: ...

    def ending(
        self, index: int, reason: str, stop_reason: str | int | None, usage: Usage | None
    ) -> bytes: ...

    def final_usage(self, usage: Usage) -> bytes: ...

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes: ...


class Answer:
    """``events`` holds one generator per choice, in order; they are closed whatever happens."""

    def __init__(
        self,
        shape: Shape,
        events: Sequence[Events],
        num_prompt_tokens: Sequence[int],
        prefixes: Sequence[str] = (),
    ) -> None:
        self._shape = shape
        self._events = events
        self._choices = [Choice(count) for count in num_prompt_tokens]
        self._prefixes = prefixes or [""] * len(events)

    async def whole(self) -> bytes:
        usage = await self.usage()
        return self._shape.whole(self._choices, usage)

    async def usage(self) -> Usage:
        """Wait for the end, for those who want no text."""
        async with contextlib.aclosing(self._merged()) as merged:
            async for index, event in merged:
                self._take(index, event)
        return self._usage()

    async def chunks(
        self, *, has_usage: bool = False, has_continuous_usage: bool = False
    ) -> AsyncGenerator[bytes, None]:
        opened: set[int] = set()
        async with contextlib.aclosing(self._merged()) as merged:
            async for index, event in merged:
                text = self._take(index, event)
                usage = self._usage() if has_continuous_usage else None
                if index not in opened:
                    opened.add(index)
                    opening = self._shape.opening(index, usage)
                    if opening is not None:
                        yield opening
                if text:
                    yield self._shape.piece(index, text, usage)
                if event.finish_reason is not None:
                    reason = event.finish_reason
                    yield self._shape.ending(index, reason, event.stop_reason, usage)
        if has_usage:
            yield self._shape.final_usage(self._usage())

    def _take(self, index: int, event: TextEvent) -> str:
        """Note the event; the text it adds to its choice."""
        choice = self._choices[index]
        text = event.text if choice.text else self._prefixes[index] + event.text
        choice.text.append(text)
        choice.num_output_tokens = event.num_output_tokens
        choice.num_cached_tokens = event.num_cached_tokens
        choice.finish_reason = event.finish_reason
        choice.stop_reason = event.stop_reason
        return text

    def _usage(self) -> Usage:
        return Usage.of(
            sum(choice.num_prompt_tokens for choice in self._choices),
            sum(choice.num_output_tokens for choice in self._choices),
            sum(choice.num_cached_tokens for choice in self._choices),
        )

    def _merged(self) -> AsyncGenerator[tuple[int, TextEvent], None]:
        return _single(self._events[0]) if len(self._events) == 1 else _merged(self._events)


async def _single(events: Events) -> AsyncGenerator[tuple[int, TextEvent], None]:
    async with contextlib.aclosing(events):
        async for event in events:
            yield 0, event


async def _merged(sources: Sequence[Events]) -> AsyncGenerator[tuple[int, TextEvent], None]:
    """As they come. The first failure ends all; leaving early closes every source."""
    queue: asyncio.Queue[tuple[int, TextEvent | None]] = asyncio.Queue()

    async def forward(index: int, events: Events) -> None:
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    queue.put_nowait((index, event))
        finally:
            queue.put_nowait((index, None))

    tasks = [asyncio.create_task(forward(*source)) for source in enumerate(sources)]
    try:
        num_open = len(tasks)
        while num_open:
            index, event = await queue.get()
            if event is not None:
                yield index, event
                continue
            num_open -= 1
            await tasks[index]  # raises what ended it
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class ChatShape:
    """``chat.completion`` and its chunks. ``is_usage_null`` puts ``usage: null`` into chunks.
    ``history`` is said of a session's answer."""

    def __init__(
        self,
        identity: AnswerIdentity,
        *,
        is_usage_null: bool = False,
        history: str | UnsetType = UNSET,
    ) -> None:
        self._identity = identity
        self._no_usage = None if is_usage_null else UNSET
        self._history = history

    def opening(self, index: int, usage: Usage | None) -> bytes | None:
        return self._chunk(
            (responses.ChatChunkChoice(index, responses.Delta("assistant", "")),), usage
        )

    def piece(self, index: int, text: str, usage: Usage | None) -> bytes:
        delta = responses.Delta(content=text)
        return self._chunk((responses.ChatChunkChoice(index, delta),), usage)

    def ending(
        self, index: int, reason: str, stop_reason: str | int | None, usage: Usage | None
    ) -> bytes:
        choice = responses.ChatChunkChoice(index, responses.Delta(), reason, stop_reason)
        return self._chunk((choice,), usage, is_last=True)

    def final_usage(self, usage: Usage) -> bytes:
        return self._chunk((), usage, is_last=True)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        me = self._identity
        written = tuple(
            responses.ChatChoice(
                index,
                responses.ChatMessage("assistant", "".join(choice.text)),
                choice.finish_reason or "",
                choice.stop_reason,
            )
            for index, choice in enumerate(choices)
        )
        return responses.encode(
            responses.ChatCompletion(
                me.id, me.created, me.model, written, usage, me.fingerprint, self._history
            )
        )

    def _chunk(
        self,
        choices: tuple[responses.ChatChunkChoice, ...],
        usage: Usage | None,
        *,
        is_last: bool = False,
    ) -> bytes:
        me = self._identity
        return responses.encode(
            responses.ChatChunk(
                me.id,
                me.created,
                me.model,
                choices,
                me.fingerprint,
                usage or self._no_usage,
                self._history if is_last else UNSET,
            )
        )


class CompletionShape:
    """``text_completion``, whole and in chunks."""

    def __init__(
        self,
        identity: AnswerIdentity,
        *,
        is_usage_null: bool = False,
        history: str | UnsetType = UNSET,
    ) -> None:
        self._identity = identity
        self._no_usage = None if is_usage_null else UNSET
        self._history = history

    def opening(self, index: int, usage: Usage | None) -> bytes | None:
        return None

    def piece(self, index: int, text: str, usage: Usage | None) -> bytes:
        return self._body((responses.CompletionChoice(index, text),), usage or self._no_usage)

    def ending(
        self, index: int, reason: str, stop_reason: str | int | None, usage: Usage | None
    ) -> bytes:
        choice = responses.CompletionChoice(index, "", reason, stop_reason)
        return self._body((choice,), usage or self._no_usage, is_last=True)

    def final_usage(self, usage: Usage) -> bytes:
        return self._body((), usage, is_last=True)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        written = tuple(
            responses.CompletionChoice(
                index, "".join(choice.text), choice.finish_reason, choice.stop_reason
            )
            for index, choice in enumerate(choices)
        )
        return self._body(written, usage, is_last=True)

    def _body(
        self,
        choices: tuple[responses.CompletionChoice, ...],
        usage: Usage | UnsetType | None,
        *,
        is_last: bool = False,
    ) -> bytes:
        me = self._identity
        history = self._history if is_last else UNSET
        return responses.encode(
            responses.Completion(
                me.id, me.created, me.model, choices, me.fingerprint, usage, history
            )
        )
