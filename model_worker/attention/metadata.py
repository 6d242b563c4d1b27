"""What attention must know of a step: where each sequence's rows lie, and which are new.

Owns the plan that all layers share, so that it is built once per step. Knows nothing of requests
or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import torch

if TYPE_CHECKING:
    from model_worker.attention.backend import AttentionBackend


class SequenceSpan(msgspec.Struct, frozen=True, gc=False):
    """One sequence's share of a step. A struct, since there is one for each request at each step.

    Its new tokens are rows ``query_start`` to ``query_stop`` of the flattened step; they follow
    ``context_len`` tokens whose KV the pool holds. ``block_ids`` cover context and new tokens.
    """

    query_start: int
    query_len: int
    context_len: int
    block_ids: Sequence[int]

    @property
    def query_stop(self) -> int:
        return self.query_start + self.query_len

    @property
    def kv_len(self) -> int:
        return self.context_len + self.query_len


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The step as attention sees it; handed to the model as the keyword ``attention_metadata``.

    ``slot_mapping``: int64 (num_tokens,), the slot each new token's K and V go to.
    ``plan``: what the backend derived from ``spans`` in ``prepare``; opaque to everyone else.
    """

    backend: AttentionBackend
    slot_mapping: torch.Tensor
    spans: tuple[SequenceSpan, ...]
    plan: object
