"""Which tokens are an answer's own, and why it ends."""

from __future__ import annotations

import pytest

from model_worker.answer_end import Endings
from model_worker.protocol import FinishReason
from tests.request_kit import make_request


@pytest.mark.parametrize(
    ("params", "tokens", "num_taken", "reason"),
    [
        ({}, (5, 6, 7), 3, None),
        ({}, (5, 0, 7), 2, FinishReason.STOP),
        ({"ignore_eos": True}, (5, 0, 7), 3, None),
        ({"stop_token_ids": (6,)}, (5, 6, 7), 2, FinishReason.STOP),
        ({"stop_token_ids": (0,), "ignore_eos": True}, (0, 6), 1, FinishReason.STOP),
        ({"max_tokens": 2}, (5, 6, 7), 2, FinishReason.LENGTH),
        ({"max_tokens": 2}, (5, 0), 2, FinishReason.STOP),
        ({}, (), 0, None),
    ],
)
def test_tokens_are_taken_up_to_the_one_that_ends(
    params: dict[str, object], tokens: tuple[int, ...], num_taken: int, reason: FinishReason | None
) -> None:
    request = make_request([1, 2, 3], **params)
    assert Endings({0}).take_over(request, tokens) == (tokens[:num_taken], reason)
    assert tuple(request.output_token_ids) == tokens[:num_taken]
