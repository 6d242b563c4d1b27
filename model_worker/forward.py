"""One pass of the model over a step's rows: the seam behind which it is replayed from a graph.

Owns the call of the model as transformers defines it, and the plain way to make it. Knows nothing
of requests or of why these rows are computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from model_worker.attention.backend import AttentionBackend
from model_worker.attention.metadata import AttentionMetadata
from model_worker.host_copy import to_device
from model_worker.step_inputs import StepInputs


@dataclass(frozen=True, slots=True)
class HandedTokens:
    """Token ids that the step before has drawn, and that only the device knows: those of the rows
    ``rows`` are ``token_ids``, both int64 (n,) on it."""

    rows: torch.Tensor
    token_ids: torch.Tensor

    def put_into(self, token_ids: torch.Tensor) -> None:
        """``token_ids`` int64 (rows of the step or more,), on the same device."""
        token_ids.index_copy_(0, self.rows, self.token_ids)


class Forward(Protocol):
    def run(self, inputs: StepInputs, handed: HandedTokens | None = None) -> torch.Tensor:
        """Logits (logit_rows, vocab) on the device, good until the next call. ``handed`` takes the
        place of the token ids of ``inputs.drawn_rows``."""
        ...


class EagerForward:
    """Any step, launched kernel by kernel."""

    def __init__(
        self, model: torch.nn.Module, backend: AttentionBackend, device: torch.device
    ) -> None:
        self._model = model
        self._backend = backend
        self._device = device

    def run(self, inputs: StepInputs, handed: HandedTokens | None = None) -> torch.Tensor:
        token_ids, positions, slots = to_device(inputs.per_token, self._device)
        if handed is not None:
            handed.put_into(token_ids)
        metadata = AttentionMetadata(
            backend=self._backend,
            slot_mapping=slots,
            spans=inputs.spans,
            plan=self._backend.prepare(inputs.spans),
        )
        rows = to_device(inputs.logit_rows, self._device)
        return call_model(self._model, token_ids, positions, rows, metadata)


def call_model(
    model: torch.nn.Module,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    logit_rows: torch.Tensor,
    metadata: AttentionMetadata,
) -> torch.Tensor:
    """All sequences flattened to a batch of one row; logits (logit_rows, vocab)."""
    output = model(
        input_ids=token_ids[None],
        position_ids=positions[None],
        use_cache=False,
        logits_to_keep=logit_rows,
        attention_metadata=metadata,
    )
    logits: torch.Tensor = output.logits[0]
    return logits
