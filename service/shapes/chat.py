"""Answers of /v1/chat/completions: ``chat.completion`` and its chunks.

Owns which chunk says what. The shapes are OpenAI's: https://platform.openai.com/docs/api-reference/chat.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from service.answer_text import ScoredToken
from service.deltas import Delta, TextDelta
from service.errors import GatewayError
from service.logprobs import chat_logprobs, prompt_logprobs
from service.schemas import bodies
from service.schemas.bodies import Usage
from service.shapes.base import AnswerIdentity, CallSoFar, Choice
from service.sse import DONE, ServerEvent
from service.stream_usage import StreamUsage
from service.vocabulary import Vocabulary

__all__ = ["ChatShape"]


class ChatShape:
    def __init__(
        self,
        identity: AnswerIdentity,
        vocabulary: Vocabulary,
        stream_usage: StreamUsage = StreamUsage.NEVER,
        *,
        has_logprobs: bool = False,
        has_prompt_logprobs: bool = False,
    ) -> None:
        self._identity = identity
        self._vocabulary = vocabulary
        self._stream_usage = stream_usage
        self._has_logprobs = has_logprobs
        self._has_prompt_logprobs = has_prompt_logprobs
        self._history = identity.history or UNSET

    def opening(self, index: int, choice: Choice, usage: Usage) -> Sequence[ServerEvent]:
        delta = bodies.Delta("assistant", "")
        return (self._chunk((bodies.ChatChunkChoice(index, delta),), usage),)

    def delta(
        self, index: int, delta: Delta, choice: Choice, usage: Usage
    ) -> Sequence[ServerEvent]:
        if isinstance(delta, TextDelta):
            written = bodies.Delta(content=delta.text)
            logprobs = self._logprobs(delta.scores)
        else:
            call = bodies.ToolCallDelta(
                delta.index,
                bodies.FunctionCallDelta(delta.name or UNSET, delta.arguments),
                delta.call_id or UNSET,
                "function" if delta.call_id else UNSET,
            )
            written, logprobs = bodies.Delta(tool_calls=(call,)), None
        chunk = bodies.ChatChunkChoice(index, written, logprobs=logprobs)
        return (self._chunk((chunk,), usage),)

    def ending(self, index: int, choice: Choice, usage: Usage) -> Sequence[ServerEvent]:
        chunk = bodies.ChatChunkChoice(
            index, bodies.Delta(), _finish_reason(choice), choice.stop_reason
        )
        return (self._chunk((chunk,), usage, is_last=True),)

    def closing(self, choices: Sequence[Choice], usage: Usage) -> Sequence[ServerEvent]:
        has_usage = self._stream_usage is not StreamUsage.NEVER
        if not has_usage and self._identity.notes.cache_explanation is UNSET:
            return (DONE,)
        return (self._chunk((), usage, is_last=True, has_usage=has_usage), DONE)

    def failure(self, error: GatewayError) -> Sequence[ServerEvent]:
        return (ServerEvent(error.body()), DONE)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        me = self._identity
        written = tuple(
            bodies.ChatChoice(
                index,
                _message(choice),
                _finish_reason(choice),
                choice.stop_reason,
                self._logprobs(choice.scores),
            )
            for index, choice in enumerate(choices)
        )
        return bodies.encode(
            bodies.ChatCompletion(
                me.id,
                me.created,
                me.model,
                written,
                usage,
                me.fingerprint,
                self._history,
                self._prompt_logprobs(choices[0]),
                me.notes.cache_explanation,
            )
        )

    def _prompt_logprobs(self, choice: Choice) -> bodies.PromptLogprobs | UnsetType:
        if not self._has_prompt_logprobs:
            return UNSET
        return prompt_logprobs(choice.prompt_scores, self._vocabulary)

    def _logprobs(self, scores: Sequence[ScoredToken]) -> bodies.ChatLogprobs | None:
        return chat_logprobs(scores, self._vocabulary) if self._has_logprobs else None

    def _chunk(
        self,
        choices: tuple[bodies.ChatChunkChoice, ...],
        usage: Usage,
        *,
        is_last: bool = False,
        has_usage: bool = False,
    ) -> ServerEvent:
        me = self._identity
        shown: Usage | UnsetType | None = usage if has_usage else self._stream_usage.shown(usage)
        history = self._history if is_last else UNSET
        chunk = bodies.ChatChunk(
            *(me.id, me.created, me.model, choices, me.fingerprint, shown, history),
            UNSET if choices else me.notes.cache_explanation,
        )
        return ServerEvent(bodies.encode(chunk))


def _finish_reason(choice: Choice) -> str:
    """An answer that calls tools and ended by itself waits for their results."""
    if choice.calls and choice.finish_reason == "stop":
        return "tool_calls"
    return choice.finish_reason or ""


def _message(choice: Choice) -> bodies.ChatMessage:
    if not choice.calls:
        return bodies.ChatMessage("assistant", choice.text)
    return bodies.ChatMessage("assistant", choice.text or None, tuple(map(_call, choice.calls)))


def _call(call: CallSoFar) -> bodies.ToolCall:
    return bodies.ToolCall(call.call_id, bodies.FunctionCall(call.name, call.arguments))
