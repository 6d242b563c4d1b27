"""The marks of steps in flight, who is kept for their sake, and who has to be waited for."""

from __future__ import annotations

import pytest

from cache_store.cache import Lease
from model_worker.batch import ScheduledBatch, ScheduledRequest
from model_worker.in_flight import InFlight
from model_worker.request import Request, RequestStatus
from tests.draft_kit import ScriptedSpeculator
from tests.request_kit import NAMESPACE, make_request


def running(num_computed: int = 0, **params: object) -> Request:
    request = make_request([1, 2, 3, 4, 5], **params)
    request.status = RequestStatus.RUNNING
    request.lease = Lease(NAMESPACE, [0, 1])
    request.num_computed_tokens = num_computed
    return request


def step(request: Request, count: int, drafts: tuple[int, ...] = ()) -> ScheduledBatch:
    return ScheduledBatch((ScheduledRequest.next_of(request, count, drafts),), (), 0, count)


def marks(request: Request) -> tuple[int, int, int]:
    """In flight, placeholders, and what is left to compute."""
    return (
        request.num_in_flight_tokens,
        request.num_placeholders,
        request.num_uncomputed_tokens,
    )


def test_a_chunk_leaves_the_rest_and_the_end_a_placeholder() -> None:
    flight, request = InFlight(), running()
    chunk = step(request, 3)
    flight.begin(chunk)
    assert marks(request) == (3, 0, 2)
    end = step(request, 2)
    assert (end.scheduled[0].start, end.scheduled[0].takes_drawn) == (3, False)
    flight.begin(end)
    assert marks(request) == (5, 1, 1)
    flight.end(chunk)
    request.num_computed_tokens = 3
    assert marks(request) == (2, 1, 1)
    behind = step(request, 1)
    assert behind.scheduled[0] == ScheduledRequest(
        request, 5, 1, reaches_end=True, takes_drawn=True, goes_on=True
    )
    assert behind.scheduled[0].own_stop == 6
    flight.begin(behind)
    flight.check_integrity()
    assert marks(request) == (3, 2, 1)
    flight.end(end)
    request.append(9)
    request.num_computed_tokens = 5
    assert marks(request) == (1, 1, 1)
    flight.end(behind)
    assert marks(request) == (0, 0, 1)
    assert len(flight) == 0


def test_a_token_that_can_only_be_the_last_has_no_placeholder() -> None:
    for max_tokens, num_left in ((0, 0), (1, 0), (2, 1)):
        flight, request = InFlight(), running(max_tokens=max_tokens)
        flight.begin(step(request, 5))
        assert marks(request) == (5, num_left, num_left)


def test_steps_end_in_their_order() -> None:
    flight, request = InFlight(), running()
    first = step(request, 3)
    flight.begin(first)
    second = step(request, 2)
    flight.begin(second)
    with pytest.raises(AssertionError, match="in the order of their launch"):
        flight.end(second)


def test_who_has_ended_is_let_go_with_its_last_step() -> None:
    flight, request = InFlight(), running()
    first = step(request, 3)
    flight.begin(first)
    second = step(request, 2)
    flight.begin(second)
    request.status = RequestStatus.FINISHED
    flight.keep(request)
    flight.check_integrity()
    flight.end(first)
    assert not flight.let_go(request)
    assert flight.leaving == [request]
    flight.end(second)
    assert flight.let_go(request)
    assert flight.leaving == []


def test_a_mark_or_a_lease_that_is_lost_shows() -> None:
    for damage in ("mark", "lease"):
        flight, request = InFlight(), running()
        flight.begin(step(request, 3))
        if damage == "mark":
            request.num_in_flight_tokens = 2
        else:
            request.lease = None
        with pytest.raises(AssertionError):
            flight.check_integrity()


@pytest.mark.parametrize(
    ("params", "drafts", "is_awaited"),
    [
        ({}, (), False),
        ({"temperature": 1.0, "top_p": 0.5, "top_k": 3, "logit_bias": {3: 1.0}}, (), False),
        ({"presence_penalty": 0.1}, (), True),
        ({"frequency_penalty": 0.1}, (), True),
        ({"repetition_penalty": 0.9}, (), True),
        ({"repetition_penalty": 0.9, "max_tokens": 1}, (), False),  # none is drawn behind it
        ({}, (7,), True),
    ],
)
def test_who_needs_its_tokens_is_waited_for(
    params: dict[str, object], drafts: tuple[int, ...], is_awaited: bool
) -> None:
    flight, request = InFlight(), running(4, **params)
    flight.begin(step(request, 1, drafts))
    assert flight.is_awaited(None) == is_awaited
    request.status = RequestStatus.FINISHED  # aborted
    assert not flight.is_awaited(None)


def test_in_the_middle_of_a_prompt_nothing_is_waited_for() -> None:
    flight, request = InFlight(), running(presence_penalty=1.0)
    flight.begin(step(request, 3))
    assert not flight.is_awaited(None)


@pytest.mark.parametrize("expects", [True, False])
def test_a_speculator_is_asked(expects: bool) -> None:
    speculator = ScriptedSpeculator(lambda request: ())
    speculator.expects_drafts = lambda in_flight: expects and len(in_flight) == 1  # type: ignore[method-assign]
    flight, request = InFlight(), running(4)
    flight.begin(step(request, 1))
    assert flight.is_awaited(speculator) == expects
