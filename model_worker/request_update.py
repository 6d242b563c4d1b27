"""What a finished step means for its requests, and the counts of all of them.

Owns the records; the scheduler fills them and the engine tells of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from model_worker.protocol import FinishReason
from model_worker.request import Request


class RequestUpdate(msgspec.Struct, frozen=True, gc=False):
    """What one step did for one request; ``token_ids`` are its new ones."""

    request: Request
    token_ids: tuple[int, ...]
    is_first_admission: bool = False
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


@dataclass(slots=True)
class SchedulerCounters:
    prompt_tokens_computed: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    coalesced_requests: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0  # drafts that became part of an answer
