"""Steps that are launched and whose results are not known yet, as their requests see them.

Owns the marks that a step in flight leaves on its requests, and who has ended meanwhile: a step
goes on writing to their blocks, so these stay theirs until it is done. Knows nothing of queues, of
blocks, or of how a step is computed.
"""

from __future__ import annotations

from collections import deque

from model_worker.batch import ScheduledBatch
from model_worker.request import Request, RequestStatus
from model_worker.speculation import Speculator


class InFlight:
    """Steps end in the order in which they began."""

    def __init__(self) -> None:
        self._batches: deque[ScheduledBatch] = deque()
        self._leaving: list[Request] = []

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def leaving(self) -> list[Request]:
        """Ended, but still in a step."""
        return list(self._leaving)

    def begin(self, batch: ScheduledBatch) -> None:
        self._batches.append(batch)
        for item in batch.scheduled:
            request = item.request
            request.num_in_flight_tokens += item.num_scheduled_tokens - len(item.draft_token_ids)
            if item.goes_on:
                request.num_placeholders += 1

    def end(self, batch: ScheduledBatch) -> None:
        oldest = self._batches.popleft()
        assert oldest is batch, "steps end in the order of their launch"
        for item in batch.scheduled:
            request = item.request
            request.num_in_flight_tokens -= item.num_scheduled_tokens - len(item.draft_token_ids)
            if item.goes_on:
                request.num_placeholders -= 1

    def keep(self, request: Request) -> None:
        """``request`` has ended and is in a step."""
        assert request.is_in_flight
        self._leaving.append(request)

    def let_go(self, request: Request) -> bool:
        """Whether ``request``, which has ended, was in the step that ended last for the last time:
        nothing writes to its blocks any more."""
        if request.is_in_flight:
            return False
        self._leaving.remove(request)
        return True

    def is_awaited(self, speculator: Speculator | None) -> bool:
        """Whether a request needs to know the token that the last step draws for it. Then all wait:
        in every other step this one would be half as fast, and what the others lose is no more than
        the time that the host needs between two steps."""
        going_on = [
            item
            for item in self._batches[-1].scheduled
            if item.goes_on and item.request.status is RequestStatus.RUNNING
        ]
        if any(
            item.draft_token_ids or item.request.sampling_params.needs_output_tokens
            for item in going_on
        ):
            return True
        return speculator is not None and speculator.expects_drafts(going_on)

    def check_integrity(self) -> None:
        """Raises AssertionError where a mark is not that of a step."""
        marks: dict[Request, tuple[int, int]] = dict.fromkeys(self._leaving, (0, 0))
        for batch in self._batches:
            for item in batch.scheduled:
                num_tokens, num_placeholders = marks.get(item.request, (0, 0))
                marks[item.request] = (
                    num_tokens + item.num_own_tokens,
                    num_placeholders + item.goes_on,
                )
        for request, mark in marks.items():
            assert mark == (request.num_in_flight_tokens, request.num_placeholders)
            is_leaving = request in self._leaving
            assert is_leaving == (request.status is RequestStatus.FINISHED)
            assert request.lease is not None, "its blocks are gone and a step still uses them"
