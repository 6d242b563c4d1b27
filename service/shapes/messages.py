"""Answers of /v1/messages: a ``message``, and the events that build one.

Owns which event says what, and what of a prompt counts as newly cached. The shapes are Anthropic's:
https://docs.anthropic.com/en/api/messages-streaming.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType

from service.deltas import Delta, TextDelta
from service.errors import GatewayError
from service.schemas import bodies
from service.schemas import message_bodies as written
from service.schemas.bodies import Usage
from service.shapes.base import AnswerIdentity, CallSoFar, Choice
from service.sse import ServerEvent

__all__ = ["CachedPrefixes", "MessagesShape"]

_EMPTY_OBJECT = msgspec.Raw(b"{}")


@dataclass(slots=True)
class CachedPrefixes:
    """Tokens of the prompt up to the last breakpoint of each ttl; 0 without one. Known once the
    prompt is prepared."""

    num_tokens_1h: int = 0
    num_tokens_5m: int = 0

    def creation(self, num_cached_tokens: int) -> written.CacheCreation:
        """Of what stands before a breakpoint, all that was not in the cache already."""
        until_1h = max(num_cached_tokens, self.num_tokens_1h)
        until_5m = max(until_1h, self.num_tokens_5m)
        return written.CacheCreation(until_5m - until_1h, until_1h - num_cached_tokens)


class MessagesShape:
    """``max_tokens`` is what the client asked for."""

    def __init__(
        self,
        identity: AnswerIdentity,
        prefixes: CachedPrefixes,
        max_tokens: int,
        diagnostics: written.Diagnostics | UnsetType | None = UNSET,
    ) -> None:
        self._diagnostics = diagnostics
        self._identity = identity
        self._request_id = identity.id.partition("-")[2]
        self._prefixes = prefixes
        self._max_tokens = max_tokens
        self._history = identity.history or UNSET
        self._num_blocks = 0
        self._open: type[written.TextBlock | written.ToolUseBlock] | None = None

    def opening(self, index: int, choice: Choice, usage: Usage) -> Sequence[ServerEvent]:
        return (
            _event(written.MessageStart(self._message((), usage))),
            _event(written.Ping()),
        )

    def delta(
        self, index: int, delta: Delta, choice: Choice, usage: Usage
    ) -> Sequence[ServerEvent]:
        events: list[ServerEvent] = []
        if isinstance(delta, TextDelta):
            if not delta.text:
                return ()
            if self._open is not written.TextBlock:
                events += self._begin(written.TextBlock(""))
            events.append(self._grow(written.TextDelta(delta.text)))
            return events
        if delta.name:
            events += self._begin(written.ToolUseBlock(delta.call_id, delta.name, _EMPTY_OBJECT))
        if delta.arguments:
            events.append(self._grow(written.InputJsonDelta(delta.arguments)))
        return events

    def ending(self, index: int, choice: Choice, usage: Usage) -> Sequence[ServerEvent]:
        end = written.MessageEnd(self._stop_reason(choice), _stop_sequence(choice))
        return (
            *self._close(),
            _event(written.MessageDelta(end, self._usage(usage), self._history)),
        )

    def closing(self, choices: Sequence[Choice], usage: Usage) -> Sequence[ServerEvent]:
        return (_event(written.MessageStop(self._identity.notes.cache_explanation)),)

    def failure(self, error: GatewayError) -> Sequence[ServerEvent]:
        return (ServerEvent(error.anthropic_body(self._request_id), "error"),)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        (choice,) = choices
        content = tuple(
            written.TextBlock(part)
            if isinstance(part, str)
            else written.ToolUseBlock(part.call_id, part.name, _input_of(part))
            for part in choice.parts()
        )
        message = msgspec.structs.replace(
            self._message(content, usage),
            stop_reason=self._stop_reason(choice),
            stop_sequence=_stop_sequence(choice),
            history=self._history,
            cache_explanation=self._identity.notes.cache_explanation,
        )
        return bodies.encode(message)

    def _message(
        self, content: tuple[written.TextBlock | written.ToolUseBlock, ...], usage: Usage
    ) -> written.Message:
        return written.Message(
            id=f"msg_{self._request_id}",
            model=self._identity.model,
            content=content,
            usage=self._usage(usage),
            diagnostics=self._diagnostics,
        )

    def _usage(self, usage: Usage) -> written.MessageUsage:
        cached = usage.prompt_tokens_details
        creation = self._prefixes.creation(cached.cached_tokens)
        return written.MessageUsage(
            input_tokens=usage.prompt_tokens - cached.cached_tokens - creation.num_tokens,
            cache_creation_input_tokens=creation.num_tokens,
            cache_read_input_tokens=cached.cached_tokens,
            cache_read_by_tier=cached.cached_tokens_by_tier,
            cache_creation=creation,
            output_tokens=usage.completion_tokens,
        )

    def _stop_reason(self, choice: Choice) -> str:
        if choice.finish_reason == "length":
            is_full = choice.num_output_tokens < self._max_tokens
            return "model_context_window_exceeded" if is_full else "max_tokens"
        if _stop_sequence(choice) is not None:
            return "stop_sequence"
        return "tool_use" if choice.calls else "end_turn"

    def _begin(self, block: written.TextBlock | written.ToolUseBlock) -> list[ServerEvent]:
        events = self._close()
        self._open = type(block)
        events.append(_event(written.ContentBlockStart(self._num_blocks, block)))
        self._num_blocks += 1
        return events

    def _grow(self, delta: written.TextDelta | written.InputJsonDelta) -> ServerEvent:
        return _event(written.ContentBlockDelta(self._num_blocks - 1, delta))

    def _close(self) -> list[ServerEvent]:
        if self._open is None:
            return []
        self._open = None
        return [_event(written.ContentBlockStop(self._num_blocks - 1))]


def _event(body: msgspec.Struct) -> ServerEvent:
    return ServerEvent(bodies.encode(body), str(body.__struct_config__.tag))


def _stop_sequence(choice: Choice) -> str | None:
    return choice.stop_reason if isinstance(choice.stop_reason, str) else None


def _input_of(call: CallSoFar) -> msgspec.Raw:
    """An answer that ended within a call has only a piece of it, which is no object."""
    try:
        is_object = isinstance(msgspec.json.decode(call.arguments), dict)
    except (msgspec.DecodeError, RecursionError):
        is_object = False
    return msgspec.Raw(call.arguments.encode()) if is_object else _EMPTY_OBJECT
