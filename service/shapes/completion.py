"""Answers of /v1/completions: ``text_completion``, whole and in chunks.

Owns which chunk says what. The shapes are OpenAI's:
https://platform.openai.com/docs/api-reference/completions.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from service.answer_text import ScoredToken
from service.deltas import Delta, TextDelta
from service.errors import GatewayError
from service.logprobs import completion_logprobs, prompt_logprobs
from service.schemas import bodies
from service.schemas.bodies import Usage
from service.schemas.cache_explanation import CacheExplanation
from service.shapes.base import AnswerIdentity, Choice
from service.sse import DONE, ServerEvent
from service.stream_usage import StreamUsage
from service.vocabulary import Vocabulary

__all__ = ["CompletionShape"]


class CompletionShape:
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
        return ()

    def delta(
        self, index: int, delta: Delta, choice: Choice, usage: Usage
    ) -> Sequence[ServerEvent]:
        assert isinstance(delta, TextDelta)  # no tool can be offered here
        logprobs = self._logprobs(delta.scores)
        written = bodies.CompletionChoice(index, delta.text, logprobs=logprobs)
        return (ServerEvent(self._body((written,), self._stream_usage.shown(usage))),)

    def ending(self, index: int, choice: Choice, usage: Usage) -> Sequence[ServerEvent]:
        written = bodies.CompletionChoice(index, "", choice.finish_reason, choice.stop_reason)
        body = self._body((written,), self._stream_usage.shown(usage), is_last=True)
        return (ServerEvent(body),)

    def closing(self, choices: Sequence[Choice], usage: Usage) -> Sequence[ServerEvent]:
        has_usage = self._stream_usage is not StreamUsage.NEVER
        explanation = self._identity.notes.cache_explanation
        if not has_usage and explanation is UNSET:
            return (DONE,)
        body = self._body((), usage if has_usage else UNSET, explanation, is_last=True)
        return (ServerEvent(body), DONE)

    def failure(self, error: GatewayError) -> Sequence[ServerEvent]:
        return (ServerEvent(error.body()), DONE)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        written = tuple(
            bodies.CompletionChoice(
                index,
                choice.text,
                choice.finish_reason,
                choice.stop_reason,
                self._logprobs(choice.scores),
                self._prompt_logprobs(choice),
            )
            for index, choice in enumerate(choices)
        )
        explanation = self._identity.notes.cache_explanation
        return self._body(written, usage, explanation, is_last=True)

    def _prompt_logprobs(self, choice: Choice) -> bodies.PromptLogprobs | UnsetType:
        if not self._has_prompt_logprobs:
            return UNSET
        return prompt_logprobs(choice.prompt_scores, self._vocabulary)

    def _logprobs(self, scores: Sequence[ScoredToken]) -> bodies.CompletionLogprobs | None:
        return completion_logprobs(scores, self._vocabulary) if self._has_logprobs else None

    def _body(
        self,
        choices: tuple[bodies.CompletionChoice, ...],
        usage: Usage | UnsetType | None,
        explanation: CacheExplanation | UnsetType = UNSET,
        *,
        is_last: bool = False,
    ) -> bytes:
        me = self._identity
        history = self._history if is_last else UNSET
        return bodies.encode(
            bodies.Completion(
                *(me.id, me.created, me.model, choices, me.fingerprint, usage, history),
                explanation,
            )
        )
