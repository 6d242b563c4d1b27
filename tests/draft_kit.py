"""Drafts by the book: whoever tests what drafts do says what they are.

Owns a speculator that takes them from a function, and functions that know the right answers and
spoil them in ways of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from model_worker.batch import ScheduledRequest
from model_worker.request import Request
from model_worker.speculation import max_num_drafts, may_have_drafts

Guess = Callable[[Request], Sequence[int]]


class ScriptedSpeculator:
    """Proposes what ``guess`` says, as far as budget and request allow, the oldest first."""

    def __init__(self, guess: Guess) -> None:
        self._guess = guess
        self.num_drafts = 0
        self.num_accepted = 0
        self.num_forgotten = 0

    def propose(
        self, scheduled: Sequence[ScheduledRequest], budget: int
    ) -> Mapping[int, tuple[int, ...]]:
        drafts = {}
        for index, item in enumerate(scheduled):
            limit = min(budget, max_num_drafts(item.request))
            if not may_have_drafts(item) or limit <= 0:
                continue
            draft = tuple(int(token) for token in self._guess(item.request))[:limit]
            if draft:
                drafts[index] = draft
                budget -= len(draft)
        return drafts

    def expects_drafts(self, in_flight: Sequence[ScheduledRequest]) -> bool:
        """For some requests, and for these at each other token: there are no drafts without."""
        lengths = [item.own_stop for item in in_flight if item.request.order % 2]
        return any(length % 2 for length in lengths)

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafts
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted

    def forget(self, request: Request) -> None:
        self.num_forgotten += 1


def spoiled(drafts: Sequence[int], position: int, vocab_size: int) -> list[int]:
    """``drafts`` with a wrong token at ``position``."""
    return [
        (token + 1) % vocab_size if index == position else token
        for index, token in enumerate(drafts)
    ]
