"""Runs one scheduled batch through the model and draws its tokens.

Owns the order of a step: rows are copied, the pass is made, tokens are drawn. Knows nothing of
queues, of the tree, of why these tokens were scheduled, or whether the model is called or replayed.
"""

from __future__ import annotations

from typing import Protocol

import torch

from cache_store.tiers.device import DeviceTier
from model_worker.batch import ScheduledBatch, StepResult
from model_worker.forward import Forward
from model_worker.sampler import Sampler
from model_worker.step_inputs import step_inputs


class Runner(Protocol):
    """The seam between engine and model; tests put a scripted one behind it."""

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Compute the batch's KV and sample where a request's end is reached."""
        ...


class ModelRunner:
    """One forward pass per step over all scheduled tokens, flattened to a batch of one row."""

    def __init__(self, forward: Forward, tier: DeviceTier, sampler: Sampler) -> None:
        self._model = forward
        self._tier = tier
        self._sampler = sampler
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
        return self._model.run(step_inputs(batch, self._block_size))
