"""The CPU backend: the compiled kernel over the pool in place, whatever the model.

Owns how a model's tensors reach the kernel. What is read together, and in which pieces, is the
plan's business; how rows are stored is kv_store's. Knows nothing of requests.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import get_num_threads

from cache_store.tiers.device import DeviceTier
from model_worker.attention.kv_store import StoredRows, layer_rows
from model_worker.attention.metadata import AttentionMetadata, SequenceSpan
from model_worker.compiled.attention import attend
from model_worker.compiled.plan import AttentionPlan, plan_attention
from model_worker.compiled.pool import PoolArrays


class CpuBackend:
    """For models that compute in float32, over a pool of float32 or int8 whose memory lies heads
    first, as the CPU's does."""

    def __init__(self, tier: DeviceTier) -> None:
        self._block_size = tier.spec.block_size
        self._pool = PoolArrays.of(tier)
        self._layers: list[tuple[StoredRows, StoredRows]] = [
            (keys.heads_first(), values.heads_first()) for keys, values in layer_rows(tier)
        ]

    def prepare(self, spans: tuple[SequenceSpan, ...]) -> AttentionPlan:
        return plan_attention(spans, self._block_size, get_num_threads())

    def forward(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        keys, values = self._layers[layer_idx]
        keys.write(2, metadata.slot_mapping, key)
        values.write(2, metadata.slot_mapping, value)
        plan = metadata.plan
        assert isinstance(plan, AttentionPlan)
        heads, rows, head_dim = query.shape[1:]
        output = np.empty((rows, heads * head_dim), np.float32)
        attend(
            query[0].transpose(0, 1).contiguous().numpy(),
            *self._pool.layer(layer_idx),
            np.float32(scaling),
            *plan.arrays,
            output,
        )
        return torch.from_numpy(output).view(1, rows, heads, head_dim)
