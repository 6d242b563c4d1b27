"""Where an answer ends: which of a step's tokens are its own, and which one is the last.

Knows nothing of the step, of queues or of blocks.
"""

from __future__ import annotations

from collections.abc import Set

from model_worker.protocol import FinishReason
from model_worker.request import Request


def take_over(
    request: Request, token_ids: tuple[int, ...], eos_token_ids: Set[int]
) -> tuple[tuple[int, ...], FinishReason | None]:
    """Append ``token_ids`` up to the one that ends the request; those taken, and the end."""
    for count, token_id in enumerate(token_ids, 1):
        request.append(token_id)
        reason = _finish_reason(request, token_id, eos_token_ids)
        if reason is not None:
            return token_ids[:count], reason
    return token_ids, None


def _finish_reason(request: Request, token_id: int, eos_token_ids: Set[int]) -> FinishReason | None:
    params = request.sampling_params
    if token_id in params.stop_token_ids:
        return FinishReason.STOP
    if token_id in eos_token_ids and not params.ignore_eos:
        return FinishReason.STOP
    if request.num_tokens >= request.max_num_tokens:
        return FinishReason.LENGTH
    return None
