"""How much prefill a step may carry while others are decoding.

Owns a running estimate of what a decode step costs and what each prefill token adds, both measured
on this machine by the very steps the engine runs. Knows nothing of requests.
"""

from __future__ import annotations

from dataclasses import dataclass

# Weight of the newest measurement: old ones fade within some twenty steps, so that a context
# growing longer or a machine growing busier is followed.
SMOOTHING = 0.1
# Progress even where the estimate leaves no room: a prompt must not wait for all streams to end.
MIN_PREFILL_TOKENS = 8


@dataclass(slots=True)
class _Average:
    value: float | None = None

    def add(self, sample: float) -> None:
        self.value = (
            sample if self.value is None else self.value + SMOOTHING * (sample - self.value)
        )


class PrefillPacer:
    """Sizes prefill chunks so that a running stream's ITL stays within ``max_itl_factor`` of the
    ITL it would have without them."""

    def __init__(self, max_itl_factor: float, max_num_batched_tokens: int) -> None:
        self._factor = max_itl_factor
        self._max_tokens = max_num_batched_tokens
        self._decode_step_s: dict[int, _Average] = {}  # by bit length of the decoding requests
        self._prefill_token_s = _Average()

    def prefill_budget(self, num_decode_tokens: int) -> int:
        """Prefill tokens that the next step may carry beside ``num_decode_tokens``."""
        left = self._max_tokens - num_decode_tokens
        base_s = self._decode_s(num_decode_tokens)
        token_s = self._prefill_token_s.value
        if num_decode_tokens == 0 or base_s is None or not token_s:
            return left
        allowed = (self._factor - 1.0) * base_s / token_s
        return max(int(min(left, allowed)), min(left, MIN_PREFILL_TOKENS))

    def prefill_token_s(self) -> float | None:
        """Measured seconds that a prefill token adds to a step; None before the first."""
        return self._prefill_token_s.value

    def record(self, num_decode_tokens: int, num_prefill_tokens: int, step_s: float) -> None:
        """Learn from a completed step."""
        if num_prefill_tokens == 0:
            key = num_decode_tokens.bit_length()
            self._decode_step_s.setdefault(key, _Average()).add(step_s)
            return
        # Without decoding requests the weights' read is still paid once: charge what lies above a
        # single decode step, or a short chunk would look dearer than it is beside others.
        base_s = self._decode_s(max(num_decode_tokens, 1)) or 0.0
        if step_s > base_s:
            self._prefill_token_s.add((step_s - base_s) / num_prefill_tokens)

    def _decode_s(self, num_decode_tokens: int) -> float | None:
        """The measured step of this size, else of the nearest measured one."""
        key = num_decode_tokens.bit_length()
        nearest = min(self._decode_step_s, key=lambda other: abs(other - key), default=None)
        return None if nearest is None else self._decode_step_s[nearest].value
