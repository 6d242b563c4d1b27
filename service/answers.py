"""From the text events of all choices of a request to its answer, whole or as a stream.

Owns the merging of choices and their usage. Both forms are made of the same events: what the events
come to is kept, and a shape writes it down. Knows nothing of how events come about, of the form an
endpoint writes, or of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec

from service.answer_text import ScoredToken, TextEvent
from service.deltas import AnswerReader, Delta, TextDelta
from service.schemas.bodies import CachedTokens, Usage
from service.shapes.base import Choice, Shape
from service.sse import ServerEvent

__all__ = ["Answer", "BeforeEnd", "ChoiceSource"]

Events = AsyncGenerator[TextEvent, None]
BeforeEnd = Callable[[Sequence[Choice], Usage], Awaitable[None]]
"""What is to be done with all that was answered before the client is told that it is all."""


@dataclass(frozen=True, slots=True)
class ChoiceSource:
    """Where one choice comes from. ``events`` are closed whatever happens; ``prompt`` is the number
    of the prompt that it answers; ``prefix`` is text to put before the answer."""

    events: Events
    reader: AnswerReader
    prompt: int = 0
    prefix: str = ""


class Answer:
    """``num_prompt_tokens`` are those of each prompt, ``sources`` the choices in their order."""

    def __init__(
        self,
        shape: Shape,
        sources: Sequence[ChoiceSource],
        num_prompt_tokens: Sequence[int],
        before_end: BeforeEnd | None = None,
    ) -> None:
        self._shape = shape
        self._before_end = before_end
        self._sources = sources
        self._num_prompt_tokens = num_prompt_tokens
        self._choices = [Choice(source.prompt) for source in sources]

    @property
    def num_cached_tokens(self) -> int | None:
        """None until all prompts are admitted."""
        return self._cached().num_tokens if self._is_admitted else None

    async def whole(self) -> bytes:
        usage = await self.usage()
        await self._see_to_end()
        return self._shape.whole(self._choices, usage)

    async def usage(self) -> Usage:
        """Wait for the end, for those who want no text."""
        async with contextlib.aclosing(self._merged()) as merged:
            async for index, event in merged:
                self._take(index, event)
        return self._usage()

    async def events(self) -> AsyncGenerator[ServerEvent, None]:
        opened: set[int] = set()
        async with contextlib.aclosing(self._merged()) as merged:
            async for index, event in merged:
                deltas, choice = self._take(index, event), self._choices[index]
                usage = self._usage()
                if index not in opened:
                    opened.add(index)
                    for opening in self._shape.opening(index, choice, usage):
                        yield opening
                for delta in deltas:
                    for piece in self._shape.delta(index, delta, choice, usage):
                        yield piece
                if event.finish_reason is not None:
                    for ending in self._shape.ending(index, choice, usage):
                        yield ending
        await self._see_to_end()
        for closing in self._shape.closing(self._choices, self._usage()):
            yield closing

    async def _see_to_end(self) -> None:
        if self._before_end is not None:
            await self._before_end(self._choices, self._usage())

    def _take(self, index: int, event: TextEvent) -> list[Delta]:
        """Note the event; what it adds to its choice."""
        choice, source = self._choices[index], self._sources[index]
        choice.is_admitted = True  # nothing comes of a request before
        choice.num_output_tokens = event.num_output_tokens
        choice.num_cached_tokens = event.num_cached_tokens
        choice.num_host_tokens = event.num_host_tokens
        choice.num_disk_tokens = event.num_disk_tokens
        choice.finish_reason = event.finish_reason
        choice.stop_reason = event.stop_reason
        deltas: list[Delta] = []
        is_more = bool(event.text) or event.finish_reason is not None
        if source.prefix and is_more and not choice.is_begun:
            deltas.append(TextDelta(source.prefix, event.prompt_scores))
        choice.is_begun |= is_more
        choice.prompt_scores = choice.prompt_scores or event.prompt_scores
        scores = _moved(event.scores, len(source.prefix))
        deltas += source.reader.push(event.text, scores)
        if event.finish_reason is not None:
            deltas += source.reader.finish()
        for delta in deltas:
            choice.take(delta)
        return deltas

    def _usage(self) -> Usage:
        return Usage.of(
            sum(self._num_prompt_tokens),
            sum(choice.num_output_tokens for choice in self._choices),
            self._cached(),
        )

    def _cached(self) -> CachedTokens:
        """Once per prompt, of its first sample: the others find what that one has computed."""
        first: dict[int, Choice] = {}
        for choice in self._choices:
            first.setdefault(choice.prompt, choice)
        host = sum(choice.num_host_tokens for choice in first.values())
        disk = sum(choice.num_disk_tokens for choice in first.values())
        cached = sum(choice.num_cached_tokens for choice in first.values())
        return CachedTokens(cached - host - disk, host, disk)

    @property
    def _is_admitted(self) -> bool:
        return all(choice.is_admitted for choice in self._choices)

    def _merged(self) -> AsyncGenerator[tuple[int, TextEvent], None]:
        sources = [source.events for source in self._sources]
        return _single(sources[0]) if len(sources) == 1 else _merged(sources)


def _moved(scores: tuple[ScoredToken, ...], by: int) -> tuple[ScoredToken, ...]:
    if not by:
        return scores
    replace = msgspec.structs.replace
    return tuple(replace(item, start=item.start + by, end=item.end + by) for item in scores)


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
