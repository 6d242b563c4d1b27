"""How much of a step the scoring of prompts may take: a bound on its memory.

Owns the count. Each prompt token whose logprob is wanted is a row of the whole vocabulary's logits,
so a step of 8,192 of them would be gigabytes. Knows nothing of tensors or queues.
"""

from __future__ import annotations

from model_worker.request import Request

# 64 MiB in float32.
MAX_SCORED_LOGITS = 2**24


class ScoreRoom:
    """Begun anew with each step; who asks first is served first."""

    def __init__(self, vocab_size: int) -> None:
        self._max_rows = max(1, MAX_SCORED_LOGITS // vocab_size)
        self._num_left = self._max_rows

    def begin(self) -> None:
        self._num_left = self._max_rows

    def take(self, request: Request, num_tokens: int) -> int:
        """How many of its next ``num_tokens`` the step may compute: all, unless it is to score
        them and there is no room for so many rows; then what there is, and that may be none."""
        if not request.num_unscored_tokens:
            return num_tokens
        count = min(num_tokens, self._num_left)
        self._num_left -= count
        return count
