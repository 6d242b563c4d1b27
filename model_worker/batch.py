"""What one step computes, as the scheduler hands it to the model runner.

Owns the description only: which request advances by how many tokens, which guesses of the tokens
after them are verified on the way, and which rows are copied first. Knows nothing of tensors.
Per request and step there are msgspec structs, which cost a fifth of frozen dataclasses; the
garbage collector need not look at them, since nothing that they refer to refers back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from cache_store.cache import RowCopy
from model_worker.protocol import TokenLogprobs
from model_worker.request import NO_POSITIONS, Request, RequestStatus


class ScheduledRequest(msgspec.Struct, frozen=True, gc=False):
    """``num_scheduled_tokens`` rows from position ``start`` on: the request's own tokens, and after
    its last one ``draft_token_ids``, guesses of what comes next.

    A draft's row is computed like any other, so that the step knows the token after it; its KV
    counts only if the draft turns out to be what is sampled in its place.

    ``reaches_end``: the step computes the request's last token, so that the next one is sampled.
    ``takes_drawn``: that last token, then the only one, is what the step before draws, which the
    device alone knows. ``goes_on``: the request has room for another token after the one that is
    sampled. ``scored`` are the positions of the prompt's tokens whose logprobs are wanted and come
    with this step; see :meth:`model_worker.request.Request.scored_by`. All of it stays true while
    the step is in flight, whatever its request does.
    """

    request: Request
    start: int
    num_scheduled_tokens: int
    reaches_end: bool
    takes_drawn: bool = False
    draft_token_ids: tuple[int, ...] = ()
    goes_on: bool = False
    scored: range = NO_POSITIONS

    @classmethod
    def next_of(
        cls, request: Request, num_tokens: int, draft_token_ids: tuple[int, ...] = ()
    ) -> ScheduledRequest:
        """The request's next ``num_tokens`` own tokens, and drafts."""
        start = request.num_launched_tokens
        reaches_end = start + num_tokens == request.num_tokens + request.num_placeholders
        return cls(
            request,
            start,
            num_tokens + len(draft_token_ids),
            reaches_end,
            start == request.num_tokens,
            draft_token_ids,
            reaches_end and start + num_tokens + 1 < request.max_num_tokens,
            request.scored_by(start, num_tokens) if request.num_unscored_tokens else NO_POSITIONS,
        )

    @property
    def num_own_tokens(self) -> int:
        return self.num_scheduled_tokens - len(self.draft_token_ids)

    @property
    def own_stop(self) -> int:
        """The position after its own tokens: that of the token which is sampled at the end."""
        return self.start + self.num_scheduled_tokens - len(self.draft_token_ids)

    @property
    def num_logit_rows(self) -> int:
        """How many rows tokens are drawn from: the request's last token's and each draft's."""
        return 1 + len(self.draft_token_ids) if self.reaches_end else 0


def still_running(scheduled: Iterable[ScheduledRequest]) -> list[ScheduledRequest]:
    """Without those that have given way since they were scheduled."""
    return [item for item in scheduled if item.request.status is RequestStatus.RUNNING]


def pending_copies(scheduled: Iterable[ScheduledRequest]) -> Iterable[RowCopy]:
    for item in scheduled:
        lease = item.request.lease
        assert lease is not None
        # Of a request in flight it is being made.
        if lease.pending_copy is not None and not item.request.is_in_flight:
            yield lease.pending_copy


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """``copies`` are executed before the model runs. Decode tokens are those of requests that had
    a single token to compute; drafts are counted apart, and all others are prefill."""

    scheduled: tuple[ScheduledRequest, ...]
    copies: tuple[RowCopy, ...]
    num_decode_tokens: int
    num_prefill_tokens: int
    num_draft_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_decode_tokens + self.num_prefill_tokens + self.num_draft_tokens


class RequestScores(msgspec.Struct, frozen=True):
    """What one step tells of one request's logprobs: of the tokens that it drew, and of the
    prompt's that it scored, with None for the very first."""

    drawn: tuple[TokenLogprobs, ...]
    prompt: tuple[TokenLogprobs | None, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The new tokens of each scheduled request; none where the step did not reach its end.

    They are the leading drafts that were right, in their order, and then the one token that was
    sampled after these. ``scores`` are of those who ask for logprobs, by index in the batch.
    """

    token_ids: tuple[tuple[int, ...], ...]
    scores: Mapping[int, RequestScores] = field(default_factory=dict)
