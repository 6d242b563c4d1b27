"""Runs one scheduled batch through the model and draws its tokens.

Owns the order of a step: rows are copied, the pass is made, tokens are drawn. Knows nothing of
queues, of the tree, of why these tokens were scheduled, or whether the model is called or replayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from cache_store.tiers.device import DeviceTier
from model_worker.batch import ScheduledBatch, StepResult
from model_worker.forward import Forward
from model_worker.sampler import Sampler
from model_worker.step_inputs import step_inputs


class PendingStep(Protocol):
    """A step that a device may still be computing."""

    def result(self) -> StepResult:
        """Waits for it. Once; raises what the step failed with."""
        ...


class Runner(Protocol):
    """The seam between engine and model; tests put a scripted one behind it."""

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """Have the batch's KV computed. Steps are carried out in the order of their launch; on a
        CPU this one is complete when the call returns."""
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

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> PendingStep:
        self._tier.copy_rows(batch.copies)
        logits = self._forward(batch)
        return _LaunchedStep(batch, logits, self._sampler, _mark_of(logits.device))

    def _forward(self, batch: ScheduledBatch) -> torch.Tensor:
        """Logits (rows that something is sampled from, vocab), in the order of the batch."""
        return self._model.run(step_inputs(batch, self._block_size))


@dataclass(frozen=True, slots=True)
class _LaunchedStep:
    batch: ScheduledBatch
    logits: torch.Tensor
    sampler: Sampler
    computed: torch.cuda.Event | None

    @torch.inference_mode()
    def result(self) -> StepResult:
        scheduled = self.batch.scheduled
        ending = [item for item in scheduled if item.reaches_end]
        drawn = iter(self.sampler.sample(self.logits, ending) if ending else ())
        if self.computed is not None:
            # Where nothing was drawn, nobody has waited yet: the step's blocks may be read by
            # other streams, and its time counts, only once it is done.
            self.computed.synchronize()
        return StepResult(tuple(next(drawn) if item.reaches_end else () for item in scheduled))


def _mark_of(device: torch.device) -> torch.cuda.Event | None:
    """Passed once all that was queued so far is done; None where nothing is queued."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
