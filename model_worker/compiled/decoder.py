"""A Llama-like model's forward pass on the CPU, compiled.

Owns the order: embed, all layers, final norm, output embedding. Knows nothing of requests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import get_num_threads
from numpy.typing import NDArray
from transformers import PreTrainedModel

from cache_store.tiers.device import DeviceTier
from model_worker.compiled.elementwise import rms_norm
from model_worker.compiled.layers import run_layers
from model_worker.compiled.linear import linear
from model_worker.compiled.plan import plan_attention
from model_worker.compiled.pool import PoolArrays
from model_worker.compiled.scratch import StepScratch
from model_worker.compiled.weights import head_weights, stack_layers
from model_worker.forward import HandedTokens
from model_worker.step_inputs import StepInputs

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


class CompiledDecoder:
    """A Forward. Single-threaded from outside; uses as many threads as numba is set to."""

    def __init__(self, model: PreTrainedModel, tier: DeviceTier) -> None:
        """``model`` must fit (``compiled.weights.fits``); its parameters become views."""
        core: Any = model.model
        self._rotary = core.rotary_emb
        weights = stack_layers(model)
        self._layers = tuple(weights)
        self._embeddings: Floats = core.embed_tokens.weight.detach().numpy()
        self._head = head_weights(model)
        self._norm: Floats = core.norm.weight.detach().numpy()
        self._epsilon = np.float32(core.norm.variance_epsilon)
        self._scaling = np.float32(core.layers[0].self_attn.scaling)
        self._scratch = StepScratch(weights, tier.spec.head_dim)
        self._pool = tuple(PoolArrays.of(tier))
        self._block_size = tier.spec.block_size
        self._logits = np.empty((0, self._head.weight.shape[0]), np.float32)

    @torch.inference_mode()
    def run(self, inputs: StepInputs, handed: HandedTokens | None = None) -> torch.Tensor:
        """Logits (logit_rows, vocab), good until the next call."""
        token_ids, positions, slots = inputs.per_token
        if handed is not None:
            handed.put_into(torch.from_numpy(token_ids))
        hidden: Floats = self._embeddings[token_ids]
        cosines, sines = (
            part[0].numpy()
            for part in self._rotary(
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
            self._epsilon,
            self._scaling,
        )
        last = hidden[inputs.logit_rows]
        rms_norm(last, self._norm, self._epsilon, last)
        logits = self._logits_of(len(last))
        linear(last, *self._head, logits, False)
        return torch.from_numpy(logits)

    def _logits_of(self, num_rows: int) -> Floats:
        """Kept from step to step: fresh memory of this size costs a page fault every 4 KiB."""
        if len(self._logits) < num_rows:
            self._logits = np.empty((num_rows, self._logits.shape[1]), np.float32)
        return self._logits[:num_rows]
