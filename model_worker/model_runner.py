"""Runs one scheduled batch through the model and draws its tokens.

Owns the order of a step: rows are copied, the pass is made, tokens are drawn. Knows nothing of
queues, of the tree, of why these tokens were scheduled, or whether the model is called or replayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from cache_store.tiers.device import DeviceTier
from model_worker.batch import ScheduledBatch, ScheduledRequest, StepResult
from model_worker.drawn_tokens import DrawnTokens
from model_worker.forward import Forward
from model_worker.host_copy import ToHost
from model_worker.sampler import Sampler, accepted_runs
from model_worker.step_inputs import step_inputs
from model_worker.token_scores import StepScores, sampled_rows, score_step


class PendingStep(Protocol):
    """A step that a device may still be computing."""

    def result(self) -> StepResult:
        """Waits for it. Once; raises what the step failed with."""
        ...


class Runner(Protocol):
    """The seam between engine and model; tests put a scripted one behind it."""

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """Have the batch's KV computed and its tokens drawn. Steps are carried out in the order of
        their launch, and each may take tokens that the one before it draws; on a CPU this one is
        complete when the call returns."""
        ...


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """Of a runner that has nothing to wait for."""

    outcome: StepResult

    def result(self) -> StepResult:
        return self.outcome


class ModelRunner:
    """One forward pass per step over all scheduled tokens, flattened to a batch of one row."""

    def __init__(self, forward: Forward, tier: DeviceTier, sampler: Sampler) -> None:
        self._model = forward
        self._tier = tier
        self._sampler = sampler
        self._block_size = tier.spec.block_size
        device = tier.keys.device
        self._drawn = DrawnTokens((), torch.empty(0, dtype=torch.int64, device=device))

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> PendingStep:
        self._tier.copy_rows(batch.copies)
        logits = self._forward(batch)
        ending = [item for item in batch.scheduled if item.reaches_end]
        # Of those that draw nothing the copy is empty, and tells when they are done: their blocks
        # may be read by other streams, and their time counts, only then.
        sampled = sampled_rows(batch, logits)
        drawn = self._sampler.sample(sampled, ending) if ending else self._drawn.token_ids[:0]
        self._drawn = DrawnTokens(ending, drawn)
        scores = score_step(batch, logits, sampled, drawn)
        return _LaunchedStep(batch, ending, ToHost(drawn), scores)

    def _forward(self, batch: ScheduledBatch) -> torch.Tensor:
        """Logits (rows that they are needed of, vocab), in the order of the batch."""
        inputs = step_inputs(batch, self._block_size)
        return self._model.run(inputs, self._drawn.handed_to(batch, inputs.drawn_rows))


@dataclass(frozen=True, slots=True)
class _LaunchedStep:
    batch: ScheduledBatch
    ending: list[ScheduledRequest]
    drawn: ToHost
    scores: StepScores | None

    def result(self) -> StepResult:
        runs = iter(accepted_runs(self.ending, self.drawn.wait().tolist()))
        scheduled = self.batch.scheduled
        told = tuple(next(runs) if item.reaches_end else () for item in scheduled)
        return StepResult(told, {} if self.scores is None else self.scores.read(told))
