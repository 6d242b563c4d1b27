"""Runs one scheduled batch through the model and draws its tokens.

Owns the step's tensors and the attention plan. Knows nothing of queues, of the tree, or of why
these tokens were scheduled.
"""

from __future__ import annotations

from typing import Protocol

import torch

from cache_store.tiers.device import DeviceTier
from model_worker.attention.backend import AttentionBackend
from model_worker.attention.metadata import AttentionMetadata
from model_worker.batch import ScheduledBatch, StepResult
from model_worker.sampler import Sampler
from model_worker.step_inputs import step_inputs


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
        inputs = step_inputs(batch, self._block_size)
        token_ids, positions, slots = torch.from_numpy(inputs.per_token).to(self._device)
        metadata = AttentionMetadata(
            backend=self._backend,
            slot_mapping=slots,
            spans=inputs.spans,
            plan=self._backend.prepare(inputs.spans),
        )
        output = self._model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=torch.from_numpy(inputs.logit_rows).to(self._device),
            attention_metadata=metadata,
        )
        logits: torch.Tensor = output.logits[0]
        return logits
