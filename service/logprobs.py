"""Scored tokens as OpenAI's endpoints write them.

Owns the two forms, and that every number in them is finite. Knows nothing of where scores come
from.
"""

from __future__ import annotations

from collections.abc import Sequence

from service.answer_text import ScoredToken
from service.schemas.bodies import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from service.vocabulary import Vocabulary, readable

__all__ = ["LEAST_LOGPROB", "chat_logprobs", "completion_logprobs", "prompt_logprobs"]

LEAST_LOGPROB = -9999.0  # of what cannot come: JSON has no infinity


def chat_logprobs(scores: Sequence[ScoredToken], vocabulary: Vocabulary) -> ChatLogprobs:
    return ChatLogprobs(tuple(_token(score, vocabulary) for score in scores))


def completion_logprobs(
    scores: Sequence[ScoredToken], vocabulary: Vocabulary
) -> CompletionLogprobs:
    """The likeliest tokens of each place are named with the one that stands there, be it among
    them or not. The first token of a prompt has nothing before it, and so no score."""
    return CompletionLogprobs(
        tokens=tuple(_text(score.token_id, vocabulary) for score in scores),
        token_logprobs=tuple(_finite(score.logprob) for score in scores),
        top_logprobs=tuple(_top(score, vocabulary) for score in scores),
        text_offset=tuple(score.start for score in scores),
    )


def prompt_logprobs(scores: Sequence[ScoredToken], vocabulary: Vocabulary) -> PromptLogprobs:
    return tuple(_candidates(score, vocabulary) for score in scores)


def _candidates(score: ScoredToken, vocabulary: Vocabulary) -> dict[str, PromptLogprob] | None:
    if score.logprob is None:
        return None
    found = dict(((score.token_id, score.logprob), *score.top))
    return {
        str(token_id): PromptLogprob(
            max(logprob, LEAST_LOGPROB), readable(vocabulary.token_bytes(token_id))
        )
        for token_id, logprob in found.items()
    }


def _token(score: ScoredToken, vocabulary: Vocabulary) -> TokenLogprob:
    content = vocabulary.token_bytes(score.token_id)
    logprob = _finite(score.logprob)
    assert logprob is not None  # a chat's answer has something before it
    top = tuple(_top_entry(token_id, value, vocabulary) for token_id, value in score.top)
    return TokenLogprob(readable(content), logprob, list(content), top)


def _top_entry(token_id: int, logprob: float, vocabulary: Vocabulary) -> TopLogprob:
    content = vocabulary.token_bytes(token_id)
    return TopLogprob(readable(content), max(logprob, LEAST_LOGPROB), list(content))


def _top(score: ScoredToken, vocabulary: Vocabulary) -> dict[str, float] | None:
    if score.logprob is None:
        return None
    entries = {
        _text(token_id, vocabulary): max(value, LEAST_LOGPROB) for token_id, value in score.top
    }
    entries.setdefault(_text(score.token_id, vocabulary), max(score.logprob, LEAST_LOGPROB))
    return entries


def _text(token_id: int, vocabulary: Vocabulary) -> str:
    """A part of a character is marked as OpenAI marks it here."""
    content = vocabulary.token_bytes(token_id)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + readable(content)


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST_LOGPROB)
