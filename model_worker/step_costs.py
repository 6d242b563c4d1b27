"""What steps take on this machine, by what they compute.

Owns running averages over the very steps the engine runs: of a decode step by its size, of what
each prefill token adds to it, of what each draft does, and of what the host needs to launch one.
Knows nothing of requests.
"""

from __future__ import annotations

from dataclasses import dataclass

# Weight of the newest measurement: old ones fade within some twenty steps, so that a context
# growing longer or a machine growing busier is followed.
SMOOTHING = 0.1


@dataclass(slots=True)
class _Average:
    value: float | None = None

    def add(self, sample: float) -> None:
        self.value = (
            sample if self.value is None else self.value + SMOOTHING * (sample - self.value)
        )


class StepCosts:
    """All in seconds. None where nothing has been measured yet."""

    def __init__(self) -> None:
        self._decode_step_s: dict[int, _Average] = {}  # by bit length of the decoding requests
        self._prefill_token_s = _Average()
        self._draft_s: dict[int, _Average] = {}  # by bit length of all rows of the step
        self._launch_s = _Average()

    def clear(self) -> None:
        """Forget all: what was measured is no longer what steps take."""
        self._decode_step_s.clear()
        self._draft_s.clear()
        self._prefill_token_s.value = None
        self._launch_s.value = None

    @property
    def prefill_token_s(self) -> float | None:
        """What a prefill token adds to a step."""
        return self._prefill_token_s.value

    @property
    def launch_s(self) -> float:
        """What the host needs before the device has a step to compute, for which the device waits
        where nothing is launched ahead; 0 where that was never measured."""
        return self._launch_s.value or 0.0

    def record_launch(self, seconds: float) -> None:
        self._launch_s.add(seconds)

    def decode_step_s(self, num_decode_tokens: int) -> float | None:
        """The measured step of this size, else of the nearest measured one."""
        return _nearest(self._decode_step_s, num_decode_tokens)

    def drafts_s(self, num_decode_tokens: int, num_drafts: int) -> float:
        """What so many drafts add to a step. One that was never tried costs as much as a prefill
        token, which is more: attention and logits aside, these are the same rows."""
        draft_s = _nearest(self._draft_s, num_decode_tokens + num_drafts)
        if draft_s is None:
            draft_s = self.prefill_token_s or 0.0
        return num_drafts * max(draft_s, 0.0)

    def record(
        self, num_decode_tokens: int, num_prefill_tokens: int, step_s: float, num_drafts: int = 0
    ) -> None:
        """Learn from a completed step."""
        if num_prefill_tokens == num_drafts == 0:
            key = num_decode_tokens.bit_length()
            self._decode_step_s.setdefault(key, _Average()).add(step_s)
            return
        # Without decoding requests the weights' read is still paid once: charge what lies above a
        # single decode step, or a short chunk would look dearer than it is beside others.
        base_s = self.decode_step_s(max(num_decode_tokens, 1)) or 0.0
        added_s = step_s - base_s
        if num_prefill_tokens > 0:
            if added_s > 0:
                self._prefill_token_s.add(added_s / (num_prefill_tokens + num_drafts))
        elif base_s > 0:
            key = (num_decode_tokens + num_drafts).bit_length()
            # From what is known already, so that one slow step at first does not end all drafts.
            average = self._draft_s.setdefault(key, _Average(self.prefill_token_s))
            average.add(added_s / num_drafts)


def _nearest(averages: dict[int, _Average], size: int) -> float | None:
    key = size.bit_length()
    if key in averages:
        return averages[key].value
    nearest = min(averages, key=lambda other: abs(other - key), default=None)
    return None if nearest is None else averages[nearest].value
