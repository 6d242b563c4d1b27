"""How much prefill a step may carry while others are decoding.

Owns the decision; what steps cost is measured by :mod:`model_worker.step_costs`. Knows nothing of
requests.
"""

from __future__ import annotations

from model_worker.step_costs import StepCosts

# Progress even where the estimate leaves no room: a prompt must not wait for all streams to end.
MIN_PREFILL_TOKENS = 8


class PrefillPacer:
    """Sizes prefill chunks so that a running stream's ITL stays within ``max_itl_factor`` of the
    ITL it would have without them."""

    def __init__(self, max_itl_factor: float, max_num_batched_tokens: int) -> None:
        self._factor = max_itl_factor
        self._max_tokens = max_num_batched_tokens
        self.costs = StepCosts()

    @property
    def max_step_tokens(self) -> int:
        return self._max_tokens

    def prefill_budget(self, num_decode_tokens: int, *, is_paced: bool = True) -> int:
        """Tokens that the next step may carry beside ``num_decode_tokens``; where it is not paced,
        whatever it does to their ITL."""
        left = self._max_tokens - num_decode_tokens
        base_s = self.costs.decode_step_s(num_decode_tokens)
        token_s = self.costs.prefill_token_s
        if not is_paced or num_decode_tokens == 0 or base_s is None or not token_s:
            return left
        allowed = (self._factor - 1.0) * base_s / token_s
        return max(int(min(left, allowed)), min(left, MIN_PREFILL_TOKENS))

    def prefill_token_s(self) -> float | None:
        """Measured seconds that a prefill token adds to a step; None before the first."""
        return self.costs.prefill_token_s

    def record(
        self, num_decode_tokens: int, num_prefill_tokens: int, step_s: float, num_drafts: int = 0
    ) -> None:
        """Learn from a completed step."""
        self.costs.record(num_decode_tokens, num_prefill_tokens, step_s, num_drafts)
