"""From one step's draws to the rows of the next, without the host."""

from __future__ import annotations

import torch

from model_worker.batch import ScheduledBatch, ScheduledRequest
from model_worker.drawn_tokens import DrawnTokens
from model_worker.step_inputs import step_inputs
from tests.request_kit import make_request
from tests.test_step_inputs import item


def batch_of(*items: ScheduledRequest) -> ScheduledBatch:
    return ScheduledBatch(items, (), 0, sum(each.num_scheduled_tokens for each in items))


def behind(each: ScheduledRequest) -> ScheduledRequest:
    """The row of the token that ``each`` draws."""
    return ScheduledRequest(each.request, each.own_stop, 1, reaches_end=True, takes_drawn=True)


def test_each_row_gets_its_own_requests_token() -> None:
    ending = [item([number, 1, 2], 2, 1, [number]) for number in range(4)]
    drafted = item([9, 1, 2], 2, 3, [7], (5, 6))
    drawn = DrawnTokens(
        [ending[0], drafted, *ending[1:]], torch.tensor([40, -1, -2, -3, 41, 42, 43])
    )
    chunk = item(list(range(20)), 4, 3, [8, 9])
    batch = batch_of(behind(ending[3]), chunk, behind(ending[1]))
    inputs = step_inputs(batch, 4)
    assert inputs.drawn_rows.tolist() == [0, 4]
    assert inputs.per_token[0].tolist() == [0, 4, 5, 6, 0]
    assert inputs.per_token[1].tolist() == [3, 4, 5, 6, 3]
    handed = drawn.handed_to(batch, inputs.drawn_rows)
    assert handed is not None
    token_ids = torch.from_numpy(inputs.per_token[0])
    handed.put_into(token_ids)
    assert token_ids.tolist() == [43, 4, 5, 6, 41]


def test_a_step_that_takes_nothing_is_handed_nothing() -> None:
    batch = batch_of(item([1, 2, 3], 0, 3, [4]))
    inputs = step_inputs(batch, 4)
    drawn = DrawnTokens([], torch.empty(0, dtype=torch.int64))
    assert inputs.drawn_rows.tolist() == []
    assert drawn.handed_to(batch, inputs.drawn_rows) is None


def test_an_item_says_the_same_when_its_request_has_gone_on() -> None:
    request = make_request([1, 2, 3], output=[4])
    request.num_computed_tokens = 3
    each = ScheduledRequest.next_of(request, 1)
    request.append(5)
    request.num_computed_tokens = 4
    assert (each.start, each.own_stop, each.reaches_end, each.takes_drawn) == (3, 4, True, False)
    assert each.goes_on
