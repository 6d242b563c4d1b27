"""The text of one answer and the scores of its tokens, as a worker's outputs come in.

Owns detokenizing, stop strings, and which token counts, is text and is given out when. Knows
nothing of workers, of measuring, or of what becomes of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from model_worker.protocol import RequestOutput, TokenLogprobs
from service.detokenizer import Detokenizer
from service.stop_strings import StopStrings

__all__ = ["AnswerText", "ScoredToken", "TextEvent"]


class ScoredToken(msgspec.Struct, frozen=True):
    """A token and how likely the model took it to be; natural logarithms, ``top`` likeliest first.

    ``start`` and ``end`` are where its text lies in the answer's (an echoed prompt left out), in
    characters: a token that only begins a character has none of it. ``logprob`` is None of a
    prompt's first token, which nothing stands before.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()
    start: int = 0
    end: int = 0


class TextEvent(msgspec.Struct, frozen=True):
    """What became certain of an answer. The last one has a finish_reason: stop or length.

    The first may come before any text, once the prompt is admitted.
    """

    text: str
    num_output_tokens: int  # so far; they count in the usage
    num_cached_tokens: int
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string, or the id of the token, that ended it
    num_host_tokens: int = 0  # of the cached ones
    num_disk_tokens: int = 0
    scores: tuple[ScoredToken, ...] = ()  # of the tokens whose text ends here, where asked for
    prompt_scores: tuple[ScoredToken, ...] = ()  # in one piece, where asked for


class PromptScores:
    """The scores of a prompt's tokens, as they come in; of none where ``token_ids`` are empty."""

    def __init__(self, decode: Callable[[Sequence[int]], str], token_ids: Sequence[int]) -> None:
        self._detokenizer = Detokenizer(decode)
        self._token_ids = token_ids
        self._scores: list[ScoredToken] = []
        self._num_read = 0

    def take(self, logprobs: Sequence[TokenLogprobs | None]) -> None:
        for given in logprobs:
            token_id = self._token_ids[len(self._scores)]
            start = self._num_read
            self._num_read += len(self._detokenizer.push(token_id))
            self._scores.append(_scored(token_id, given, start, self._num_read))

    def give(self) -> tuple[ScoredToken, ...]:
        """Once: what there is."""
        given, self._scores = tuple(self._scores), []
        return given


def _scored(token_id: int, given: TokenLogprobs | None, start: int, end: int) -> ScoredToken:
    if given is None:
        return ScoredToken(token_id, None, (), start, end)
    top = tuple(zip(given.top_ids, given.top_logprobs, strict=True))
    return ScoredToken(token_id, given.logprob, top, start, end)


class AnswerText:
    """``decode`` is the tokenizer's; ``context_ids`` are the prompt's last tokens where the answer
    goes on with its text, ``scored_prompt_ids`` all of them where their scores are asked for."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str] = (),
        context_ids: Sequence[int] = (),
        scored_prompt_ids: Sequence[int] = (),
    ) -> None:
        self._detokenizer = Detokenizer(decode, context_ids)
        self._prompt = PromptScores(decode, scored_prompt_ids)
        self._stop = StopStrings(stop)
        self._text: list[str] = []
        self._num_read = 0  # characters that tokens came to, those held back included
        self._num_given = 0  # characters given out
        self._scores: list[ScoredToken] = []  # of tokens whose text is not yet given out
        self._output_token_ids: list[int] = []
        self._stop_token_id: int | None = None
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self.num_host_tokens = 0
        self.num_disk_tokens = 0
        self.is_admitted = False

    def num_computed_of(self, num_prompt_tokens: int) -> int:
        """How many of the prompt's tokens were not in the cache; none before its admission."""
        return num_prompt_tokens - self.num_cached_tokens if self.is_admitted else 0

    @property
    def text(self) -> str:
        """All that was given out."""
        return "".join(self._text)

    @property
    def stop_token_id(self) -> int | None:
        return self._stop_token_id

    @property
    def output_token_ids(self) -> Sequence[int]:
        """What the worker computed, without the token that stopped it."""
        num_stopping = 0 if self._stop_token_id is None else 1
        return self._output_token_ids[: len(self._output_token_ids) - num_stopping]

    @property
    def computed_token_ids(self) -> Sequence[int]:
        """Those whose keys and values the worker has: all but the last, which nothing followed."""
        return self._output_token_ids[:-1]

    def served(self, output: RequestOutput) -> None:
        """Note what the worker computed, whether or not any of it is given out."""
        if output.num_cached_tokens is not None:
            self.is_admitted = True
            self.num_cached_tokens = output.num_cached_tokens
            self.num_host_tokens = output.num_host_tokens
            self.num_disk_tokens = output.num_disk_tokens
        self._prompt.take(output.prompt_logprobs)
        self._output_token_ids += output.token_ids
        self._stop_token_id = output.stop_token_id

    def take(self, output: RequestOutput) -> tuple[TextEvent | None, int]:
        """The event that ``output`` makes, if any, and how many of its tokens count."""
        pieces: list[str] = []
        before = self.num_output_tokens
        last = len(output.token_ids) - 1
        for index, token_id in enumerate(output.token_ids):
            self.num_output_tokens += 1
            if index == last and token_id == output.stop_token_id:
                continue  # it ended the answer, and is no part of its text
            read = self._detokenizer.push(token_id)
            self._note_score(output, index, len(read))
            pieces.append(self._stop.push(read))
            if self._stop.matched is not None:
                break
        reason = self._finish(output, pieces)
        text = "".join(pieces)
        self._text.append(text)
        self._num_given += len(text)
        num_tokens = self.num_output_tokens - before
        if not text and reason is None and output.num_cached_tokens is None:
            return None, num_tokens
        return self._event(output, text, reason), num_tokens

    def _note_score(self, output: RequestOutput, index: int, num_chars: int) -> None:
        start, self._num_read = self._num_read, self._num_read + num_chars
        if not output.logprobs:
            return
        token_id, given = output.token_ids[index], output.logprobs[index]
        self._scores.append(_scored(token_id, given, start, self._num_read))

    def _finish(self, output: RequestOutput, pieces: list[str]) -> str | None:
        if self._stop.matched is None and output.finish_reason is not None:
            rest = self._detokenizer.finish()
            self._num_read += len(rest)
            pieces.append(self._stop.push(rest))
            if self._stop.matched is None:
                pieces.append(self._stop.finish())
        if self._stop.matched is not None:
            return "stop"
        return None if output.finish_reason is None else output.finish_reason.value

    def _event(self, output: RequestOutput, text: str, reason: str | None) -> TextEvent:
        stop_reason = self._stop.matched or (output.stop_token_id if reason == "stop" else None)
        return TextEvent(
            text,
            self.num_output_tokens,
            self.num_cached_tokens,
            reason,
            stop_reason,
            self.num_host_tokens,
            self.num_disk_tokens,
            self._scores_given(is_last=reason is not None),
            self._prompt.give() if text or reason is not None else (),
        )

    def _scores_given(self, *, is_last: bool) -> tuple[ScoredToken, ...]:
        """Of the tokens whose text is out. A stop string takes those with it that only it holds."""
        if not self._scores:
            return ()
        if is_last:
            kept = [
                score
                for score in self._scores
                if self._stop.matched is None or score.start < self._num_given
            ]
            self._scores = []
            return tuple(kept)
        count = 0
        while count < len(self._scores) and self._scores[count].end <= self._num_given:
            count += 1
        given, self._scores = self._scores[:count], self._scores[count:]
        return tuple(given)
