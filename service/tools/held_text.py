"""Text of an answer that is not given out yet, and the scores of its tokens.

Owns which score goes with which piece of text. Knows nothing of what the text means.
"""

from __future__ import annotations

from collections import deque

from service.answer_text import ScoredToken
from service.deltas import TextDelta

__all__ = ["HeldText"]


class HeldText:
    """Positions count from the first character that is held."""

    def __init__(self) -> None:
        self.text = ""
        self._num_gone = 0  # characters of the answer before the text
        self._num_scored = 0  # and those that scores have come for
        self._scores: deque[tuple[int, ScoredToken]] = deque()  # by where their text begins

    def push(self, text: str, scores: tuple[ScoredToken, ...]) -> None:
        self.text += text
        for score in scores:
            self._scores.append((self._num_scored, score))
            self._num_scored += score.end - score.start

    def take(self, num_chars: int) -> TextDelta:
        """The first characters, and the scores of the tokens that begin in them or before."""
        return TextDelta(self.text[:num_chars], self._cut(num_chars))

    def take_all(self) -> TextDelta:
        """What is left, and all scores."""
        taken = TextDelta(self.text, tuple(score for _, score in self._scores))
        self._scores.clear()
        self._cut(len(self.text))
        return taken

    def drop(self, num_chars: int) -> None:
        self._cut(num_chars)

    def _cut(self, num_chars: int) -> tuple[ScoredToken, ...]:
        self.text = self.text[num_chars:]
        self._num_gone += num_chars
        scores = []
        while self._scores and self._scores[0][0] < self._num_gone:
            scores.append(self._scores.popleft()[1])
        return tuple(scores)
