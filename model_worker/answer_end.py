"""Where an answer ends: which of a step's tokens are its own, and which one is the last.

Owns what ends it, tokens that say so, its grammar, its length, and their order. Knows nothing of
the step, of queues or of blocks.
"""

from __future__ import annotations

from collections.abc import Iterable

from model_worker.protocol import FinishReason
from model_worker.request import Request
from model_worker.sampling_params import SamplingParams


class Endings:
    """``eos_token_ids`` are the model's own."""

    def __init__(self, eos_token_ids: Iterable[int]) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)

    def token_ids(self, params: SamplingParams) -> list[int]:
        """The tokens that end an answer of these parameters."""
        return [*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)]

    def take_over(
        self, request: Request, token_ids: tuple[int, ...]
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """Append ``token_ids`` up to the one that ends the request; those taken, and the end."""
        for count, token_id in enumerate(token_ids, 1):
            request.append(token_id)
            reason = self.reason(request, token_id)
            if reason is not None:
                return token_ids[:count], reason
        return token_ids, None

    def reason(self, request: Request, token_id: int) -> FinishReason | None:
        """Of the end, if the answer ends with ``token_id``, its last token. A complete grammar is
        one whatever may be ignored; one that cannot be followed any further is an error."""
        params, matcher = request.sampling_params, request.matcher
        if matcher is not None and matcher.problem is not None:
            return FinishReason.ERROR
        if matcher is not None and matcher.is_complete:
            return FinishReason.STOP
        if token_id in params.stop_token_ids:
            return FinishReason.STOP
        if token_id in self._eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP
        if request.num_tokens >= request.max_num_tokens:
            return FinishReason.LENGTH
        return None

    def stop_token_id(
        self, request: Request, taken: tuple[int, ...], reason: FinishReason | None
    ) -> int | None:
        """The token that an answer stopped with, where that is no part of its text."""
        if reason is not FinishReason.STOP:
            return None
        outside = {*request.sampling_params.stop_token_ids, *self._eos_token_ids}
        return taken[-1] if taken[-1] in outside else None
