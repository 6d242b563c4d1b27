"""What is refused before it is queued: which error, and what it names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from model_worker.admission import EngineLimits, capacity_refusal, decode_ids, refusal
from model_worker.protocol import ErrorCode, SamplingParams

LIMITS = EngineLimits("model", block_size=4, max_model_len=20, vocab_size=50, max_num_waiting=2)


def refused(prompt: list[int], **params: Any) -> tuple[ErrorCode, str | None] | None:
    ids = np.asarray(prompt, dtype=np.int32)
    error = refusal(SamplingParams(**{"max_tokens": 4, **params}), ids, LIMITS)
    return None if error is None else (error.code, error.param)


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ([1, 2], {}, None),
        ([], {}, (ErrorCode.INVALID_REQUEST, "prompt")),
        ([50], {}, (ErrorCode.INVALID_REQUEST, "prompt")),
        ([-1], {}, (ErrorCode.INVALID_REQUEST, "prompt")),
        ([1], {"num_logprobs": 21}, (ErrorCode.INVALID_REQUEST, "num_logprobs")),
        ([1] * 19, {}, None),
        ([1] * 20, {}, (ErrorCode.CONTEXT_LENGTH, None)),
    ],
)
def test_of_the_request_itself(
    prompt: list[int], params: dict[str, Any], error: tuple[ErrorCode, str | None] | None
) -> None:
    assert refused(prompt, **params) == error


@pytest.mark.parametrize(
    ("max_tokens", "num_blocks", "may_wait", "code"),
    [
        (4, 4, True, None),  # 10 tokens are 3 blocks, and one to copy from
        (4, 3, True, ErrorCode.NEVER_FITS),
        (99, 6, True, None),  # no longer than the model allows
        (99, 5, True, ErrorCode.NEVER_FITS),
        (4, 4, False, ErrorCode.OVERLOADED),
    ],
)
def test_of_what_there_is_no_room_for(
    max_tokens: int, num_blocks: int, may_wait: bool, code: ErrorCode | None
) -> None:
    params = SamplingParams(max_tokens=max_tokens)
    error = capacity_refusal(params, 6, LIMITS, num_blocks=num_blocks, may_wait=may_wait)
    assert (None if error is None else error.code) == code


def test_ids_are_little_endian_and_whole() -> None:
    assert decode_ids(b"\x01\0\0\0\x00\x01\0\0").tolist() == [1, 256]
    assert decode_ids(b"\x01\0\0").tolist() == []
