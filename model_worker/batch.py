"""What one step computes, as the scheduler hands it to the model runner.

Owns the description only: which request advances by how many tokens, and which rows are copied
first. Knows nothing of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from cache_store.cache import RowCopy
from model_worker.request import Request


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """``num_scheduled_tokens`` tokens from the request's num_computed_tokens on."""

    request: Request
    num_scheduled_tokens: int

    @property
    def reaches_end(self) -> bool:
        """Whether the step computes the request's last token, so that the next one is sampled."""
        return self.num_scheduled_tokens == self.request.num_uncomputed_tokens


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """``copies`` are executed before the model runs. Decode tokens are those of requests that had
    a single token to compute; all others are prefill."""

    scheduled: tuple[ScheduledRequest, ...]
    copies: tuple[RowCopy, ...]
    num_decode_tokens: int
    num_prefill_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.num_decode_tokens + self.num_prefill_tokens


@dataclass(frozen=True, slots=True)
class StepResult:
    """One token per scheduled request; None where the step did not reach the request's end."""

    token_ids: tuple[int | None, ...]
