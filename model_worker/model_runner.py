"""Runs one scheduled batch through the model and draws its tokens.

Owns the step's tensors: flattened inputs, positions, slots, the attention plan. Knows nothing of
queues, of the tree, or of why these tokens were scheduled.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from cache_store.tiers.device import DeviceTier
from model_worker.attention.backend import AttentionBackend
from model_worker.attention.metadata import AttentionMetadata, SequenceSpan
from model_worker.batch import ScheduledBatch, ScheduledRequest, StepResult
from model_worker.sampler import Sampler


class Runner(Protocol):
    """The seam between engine and model; tests put a scripted one behind it."""

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Compute the batch's KV and sample where a request's end is reached."""
        ...


class ModelRunner:
    """One forward pass per step over all scheduled tokens, flattened to a batch of one row."""

    def __init__(
        self,
        model: torch.nn.Module,
        tier: DeviceTier,
        backend: AttentionBackend,
        sampler: Sampler,
    ) -> None:
        self._model = model
        self._tier = tier
        self._backend = backend
        self._sampler = sampler
        self._device = tier.keys.device
        self._block_size = tier.spec.block_size

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> StepResult:
        self._tier.copy_rows(batch.copies)
        logits = self._forward(batch)
        ending = [item for item in batch.scheduled if item.reaches_end]
        drawn = iter(self._sampler.sample(logits, ending) if ending else ())
        return StepResult(
            tuple(next(drawn) if item.reaches_end else () for item in batch.scheduled)
        )

    def _forward(self, batch: ScheduledBatch) -> torch.Tensor:
        """Logits (rows that something is sampled from, vocab), in the order of the batch."""
        inputs = [_new_tokens(item) for item in batch.scheduled]
        positions = [_new_positions(item) for item in batch.scheduled]
        slots = [
            self._slots(item, where) for item, where in zip(batch.scheduled, positions, strict=True)
        ]
        spans = _spans(batch)
        metadata = AttentionMetadata(
            backend=self._backend,
            slot_mapping=self._tensor(slots),
            spans=spans,
            plan=self._backend.prepare(spans),
        )
        last_rows = [
            row
            for span, item in zip(spans, batch.scheduled, strict=True)
            for row in range(span.query_stop - item.num_logit_rows, span.query_stop)
        ]
        output = self._model(
            input_ids=self._tensor(inputs)[None],
            position_ids=self._tensor(positions)[None],
            use_cache=False,
            logits_to_keep=torch.tensor(last_rows, dtype=torch.int64, device=self._device),
            attention_metadata=metadata,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _slots(self, item: ScheduledRequest, positions: np.ndarray) -> np.ndarray:
        lease = item.request.lease
        assert lease is not None
        first = int(positions[0]) // self._block_size
        last = int(positions[-1]) // self._block_size
        blocks = np.asarray(lease.block_ids[first : last + 1], dtype=np.int64)
        rows = positions % self._block_size
        slots: np.ndarray = blocks[positions // self._block_size - first] * self._block_size + rows
        return slots

    def _tensor(self, parts: list[np.ndarray]) -> torch.Tensor:
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return torch.from_numpy(joined).to(self._device, torch.int64)


def _new_tokens(item: ScheduledRequest) -> np.ndarray:
    start = item.request.num_computed_tokens
    tokens: np.ndarray = item.request.token_ids[start : start + item.num_own_tokens]
    if item.draft_token_ids:
        return np.concatenate((tokens, item.draft_token_ids), dtype=np.int64)
    return tokens.astype(np.int64)


def _new_positions(item: ScheduledRequest) -> np.ndarray:
    start = item.request.num_computed_tokens
    return np.arange(start, start + item.num_scheduled_tokens, dtype=np.int64)


def _spans(batch: ScheduledBatch) -> tuple[SequenceSpan, ...]:
    spans = []
    start = 0
    for item in batch.scheduled:
        lease = item.request.lease
        assert lease is not None
        spans.append(
            SequenceSpan(
                query_start=start,
                query_len=item.num_scheduled_tokens,
                context_len=item.request.num_computed_tokens,
                block_ids=lease.block_ids,
            )
        )
        start += item.num_scheduled_tokens
    return tuple(spans)
