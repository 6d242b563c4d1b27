"""A Llama-like model's forward pass on the CPU, compiled.

Owns the order: embed, all layers, final norm, output embedding. Knows nothing of requests.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import get_num_threads
from numpy.typing import NDArray

from cache_store.tiers.device import DeviceTier
from model_worker.compiled.elementwise import rms_norm
from model_worker.compiled.layers import run_layers
from model_worker.compiled.linear import linear
from model_worker.compiled.plan import plan_attention
from model_worker.compiled.pool import PoolArrays
from model_worker.compiled.scratch import StepScratch
from model_worker.compiled.weights import DecoderWeights
from model_worker.forward import HandedTokens
from model_worker.step_inputs import StepInputs

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


class CompiledDecoder:
    """A Forward. Single-threaded from outside; uses as many threads as numba is set to."""

    def __init__(self, weights: DecoderWeights, tier: DeviceTier) -> None:
        self._weights = weights
        self._layers = tuple(weights.layers)
        self._scratch = StepScratch(weights.layers, tier.spec.num_kv_heads, tier.spec.head_dim)
        self._pool = tuple(PoolArrays.of(tier))
        self._block_size = tier.spec.block_size
        self._logits = np.empty((0, len(weights.head.scale)), np.float32)

    @torch.inference_mode()
    def run(self, inputs: StepInputs, handed: HandedTokens | None = None) -> torch.Tensor:
        """Logits (logit_rows, vocab), good until the next call."""
        token_ids, positions, slots = inputs.per_token
        if handed is not None:
            handed.put_into(torch.from_numpy(token_ids))
        weights = self._weights
        hidden = weights.embed(token_ids)
        cosines, sines = (
            part[0].numpy()
            for part in weights.rotary(
                torch.from_numpy(hidden)[None], torch.from_numpy(positions)[None]
            )
        )
        run_layers(
            hidden,
            cosines,
            sines,
            slots,
            self._layers,
            self._pool,
            plan_attention(inputs.spans, self._block_size, get_num_threads()).arrays,
            self._scratch.arrays(len(hidden)),
            weights.epsilon,
            weights.scaling,
        )
        last = hidden[inputs.logit_rows]
        rms_norm(last, weights.norm, weights.epsilon, last)
        logits = self._logits_of(len(last))
        linear(last, *weights.head, logits, False)
        return torch.from_numpy(logits)

    def _logits_of(self, num_rows: int) -> Floats:
        """Kept from step to step: fresh memory of this size costs a page fault every 4 KiB."""
        if len(self._logits) < num_rows:
            self._logits = np.empty((num_rows, self._logits.shape[1]), np.float32)
        return self._logits[:num_rows]
