"""One request of a worker without a model: its tokens so far, and how likely they are said to be.

Owns the figures that a test can foretell. Knows nothing of queues or streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from model_worker.protocol import AddRequest, TokenLogprobs


@dataclass(slots=True)
class FakeRequest:
    request: AddRequest
    prompt_token_ids: NDArray[np.int32]  # 1-D
    tokens: Iterator[int]
    arrived_at: float
    admitted_at: float = 0.0
    output_token_ids: list[int] = field(default_factory=list)

    def logprobs_of(self, token_id: int) -> tuple[TokenLogprobs, ...]:
        """Of a token that it draws, if it asks for that."""
        num_top = self.request.sampling_params.num_logprobs
        return () if num_top is None else (scripted_logprobs(token_id, num_top),)

    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...]:
        """Of its prompt, if it asks for these."""
        num_top = self.request.sampling_params.num_prompt_logprobs
        if num_top is None:
            return ()
        rest = self.prompt_token_ids[1:].tolist()
        return (None, *(scripted_logprobs(token_id, num_top) for token_id in rest))


def scripted_logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """Of any token: -1/8, the likeliest, and behind it the ids that follow it, each 1/8 less."""
    logprobs = tuple(-0.125 * (place + 1) for place in range(num_top))
    return TokenLogprobs(-0.125, 1, tuple(range(token_id, token_id + num_top)), logprobs)
