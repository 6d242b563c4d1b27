"""The reference backend: gather each sequence's KV, then torch's scaled_dot_product_attention.

Correct on every device and dtype, and the yardstick of the other backends; fast on none. Knows
nothing of runs of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from cache_store.tiers.device import DeviceTier
from model_worker.attention.kv_store import StoredRows, layer_rows
from model_worker.attention.metadata import AttentionMetadata, SequenceSpan


@dataclass(frozen=True, slots=True)
class _SpanPlan:
    span: SequenceSpan
    block_ids: torch.Tensor  # int64 (blocks,)
    mask: torch.Tensor | None  # bool (query_len, kv_len), True = attend; None for one new token


class SdpaBackend:
    def __init__(self, tier: DeviceTier) -> None:
        self._device = tier.keys.device
        self._block_size = tier.spec.block_size
        self._layers = layer_rows(tier)

    def prepare(self, spans: tuple[SequenceSpan, ...]) -> tuple[_SpanPlan, ...]:
        return tuple(self._plan(span) for span in spans)

    def _plan(self, span: SequenceSpan) -> _SpanPlan:
        num_blocks = -(-span.kv_len // self._block_size)
        ids = torch.tensor(span.block_ids[:num_blocks], dtype=torch.int64, device=self._device)
        if span.query_len == 1:
            return _SpanPlan(span, ids, None)
        mask = torch.ones(span.query_len, span.kv_len, dtype=torch.bool, device=self._device)
        return _SpanPlan(span, ids, mask.tril(span.context_len))

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
        keys.flatten(0, 1).write(0, metadata.slot_mapping, key[0].transpose(0, 1))
        values.flatten(0, 1).write(0, metadata.slot_mapping, value[0].transpose(0, 1))
        plans = metadata.plan
        assert isinstance(plans, tuple)
        outputs = [self._attend(plan, query, keys, values, scaling) for plan in plans]
        return torch.cat(outputs, dim=1)

    def _attend(
        self,
        plan: _SpanPlan,
        query: torch.Tensor,
        keys: StoredRows,
        values: StoredRows,
        scaling: float,
    ) -> torch.Tensor:
        span = plan.span
        own_keys, own_values = (
            part.select(0, plan.block_ids).read(query.dtype).flatten(0, 1)[: span.kv_len]
            for part in (keys, values)
        )
        output = F.scaled_dot_product_attention(
            query[:, :, span.query_start : span.query_stop],
            own_keys.transpose(0, 1).unsqueeze(0),
            own_values.transpose(0, 1).unsqueeze(0),
            attn_mask=plan.mask,
            scale=scaling,
            enable_gqa=True,
        )
        return output.transpose(1, 2)
