"""Guesses of the tokens to come, for a step to verify on the way.

Owns the seam between the scheduler and whoever guesses. Drafts cannot change an answer, only what
it costs: see :class:`model_worker.sampler.Sampler` for how they are verified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from model_worker.batch import ScheduledRequest
from model_worker.request import Request


class Speculator(Protocol):
    """Who guesses, how far, and when not to."""

    def propose(
        self, scheduled: Sequence[ScheduledRequest], budget: int
    ) -> Mapping[int, tuple[int, ...]]:
        """Drafts by index into ``scheduled``, none of them empty and ``budget`` tokens in all.

        Only for items that reach their end, each with at most ``max_num_drafts``.
        """
        ...

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """What became of the drafts that ``request`` had in a step."""
        ...

    def forget(self, request: Request) -> None:
        """``request`` has ended."""
        ...


def max_num_drafts(request: Request) -> int:
    """As many as can still become part of the answer: a step samples one more than its drafts."""
    return request.max_num_tokens - request.num_tokens - 1
