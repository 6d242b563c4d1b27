"""What drafts cost one request and bring it, and how long the next one should be.

Owns the arithmetic. The unit is a token of plain decoding: what a step without drafts takes,
divided by the requests in it. An accepted draft is worth one; a row costs what it adds to the step
in this unit. Knows nothing of where drafts come from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# What may be lost on drafts: this share of a request's tokens, and at first a little more, without
# which nothing would ever be tried.
LOSS_SHARE = 0.01
GRACE = 0.75
# What was won longer ago than this buys no new trials.
MAX_BALANCE = 16.0
PROBE_LENGTH = 2
_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
MAX_DRAFT_TOKENS = _LENGTHS[-1]


class Acceptance:
    """How likely a draft is right, given that those before it are. Older trials count less."""

    def __init__(self, prior_weight: float, memory: float) -> None:
        """The prior counts as ``prior_weight`` drafts; each trial makes the earlier ones count
        ``memory`` times as much."""
        self._prior_weight = prior_weight
        self._memory = memory
        self._num_tested = 0.0
        self._num_right = 0.0

    def rate(self, prior: float) -> float:
        weight = self._prior_weight
        return (self._num_right + weight * prior) / (self._num_tested + weight)

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Drafts behind the first wrong one tell nothing."""
        num_tested = min(num_accepted + 1, num_drafts)
        self._num_tested = self._memory * self._num_tested + num_tested
        self._num_right = self._memory * self._num_right + num_accepted


class DraftAccount:
    """Bounds the loss of one request, whatever was expected: who has lost too much rests until its
    further tokens have earned it another trial."""

    def __init__(self) -> None:
        self._balance = 0.0
        self.rests_until = -GRACE / LOSS_SHARE  # output tokens: up to so many there is no credit

    def spend(self, cost: float) -> None:
        self._balance -= cost
        self.rests_until = -(self._balance + GRACE) / LOSS_SHARE

    def earn(self, num_accepted: int) -> None:
        self._balance = min(self._balance + num_accepted, MAX_BALANCE)
        self.rests_until = -(self._balance + GRACE) / LOSS_SHARE

    def credit(self, num_output_tokens: int) -> float:
        """What may be spent on drafts that all turn out wrong."""
        return self._balance + GRACE + LOSS_SHARE * num_output_tokens


@dataclass(frozen=True, slots=True)
class DraftLength:
    """How many drafts, and what they are expected to gain; 0 of a trial."""

    length: int
    gain: float


def best_length(
    rate: float, limit: int, credit: float, cost: Callable[[int], float]
) -> DraftLength:
    """The number of drafts from which most is to be expected; 0 where any is likelier to lose.

    The expected gain of k drafts, of which each is right with probability ``rate`` if those before
    it are, is rate + rate^2 + ... + rate^k (Leviathan et al., 2023) less their ``cost``: the
    goodput of Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models Using
    Goodput", 2024. Where nothing is expected, what is left of the allowance pays for a short trial:
    texts change.
    """
    best, best_gain = 0, 0.0
    for length in _LENGTHS:
        length = min(length, limit)
        price = cost(length)
        if price > credit:
            break
        gain = _expected(rate, length) - price
        if gain > best_gain:
            best, best_gain = length, gain
        if length == limit:
            break
    if best == 0:
        probe = min(PROBE_LENGTH, limit)
        if cost(probe) <= credit - GRACE:
            return DraftLength(probe, 0.0)
    return DraftLength(best, best_gain)


def _expected(rate: float, length: int) -> float:
    if rate > 0.999:
        return float(length)
    return float(rate * (1.0 - rate**length) / (1.0 - rate))
