"""The backend on torch's own variable-length attention (torch.nn.attention.varlen), paged.

One call for the whole step. Only where its limits hold: blocks of a multiple of 256 tokens, float16
or bfloat16, head_dim at most 256, a torch whose varlen_attn takes a block table. The KV is never
split: split-KV over a paged pool has open correctness bugs in torch, and its splits would depend on
the batch. So few sequences with long contexts leave most of a device idle.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from cache_store.tiers.device import DeviceTier
from model_worker.attention.block_tables import BlockTables
from model_worker.attention.kv_store import layer_rows
from model_worker.attention.metadata import AttentionMetadata, SequenceSpan
from model_worker.host_copy import to_device

CAUSAL = (-1, 0)
BLOCK_MULTIPLE = 256


@dataclass(frozen=True, slots=True)
class VarlenPlan:
    """``query_starts`` int32 (sequences + 1,), ``kv_lens`` int32 (sequences,), ``tables`` int32
    (sequences, blocks of the longest), short ones padded with block 0."""

    query_starts: torch.Tensor
    kv_lens: torch.Tensor
    tables: torch.Tensor
    max_query_len: int
    max_kv_len: int


class VarlenBackend:
    """Raises ImportError where torch has no varlen_attn, ValueError beyond its limits."""

    def __init__(self, tier: DeviceTier) -> None:
        from torch.nn.attention.varlen import varlen_attn

        spec = tier.spec
        if spec.block_size % BLOCK_MULTIPLE:
            raise ValueError(f"a block of {spec.block_size} tokens: no multiple of 256")
        if tier.keys.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"{tier.keys.dtype} KV: float16 or bfloat16 is needed")
        self._attend = varlen_attn
        self._device = tier.keys.device
        self._block_size = spec.block_size
        self._layers = layer_rows(tier)
        self._tables = BlockTables(spec.block_size)

    def prepare(self, spans: tuple[SequenceSpan, ...]) -> VarlenPlan:
        flat = self._tables.flatten(spans)
        lengths = [-(-span.kv_len // self._block_size) for span in spans]
        tables = np.zeros((len(spans), max(lengths)), dtype=np.int32)
        for row, start, length in zip(tables, flat.starts, lengths, strict=True):
            row[:length] = flat.block_ids[start : start + length]
        query_starts = np.array([0, *(span.query_stop for span in spans)], dtype=np.int32)
        kv_lens = np.array([span.kv_len for span in spans], dtype=np.int32)
        return VarlenPlan(
            query_starts=to_device(query_starts, self._device),
            kv_lens=to_device(kv_lens, self._device),
            tables=to_device(tables, self._device),
            max_query_len=max(span.query_len for span in spans),
            max_kv_len=int(kv_lens.max()),
        )

    def forward(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        plan = metadata.plan
        assert isinstance(plan, VarlenPlan)
        keys, values = self._layers[layer_idx]
        keys.flatten(0, 1).write(0, metadata.slot_mapping, key[0].transpose(0, 1))
        values.flatten(0, 1).write(0, metadata.slot_mapping, value[0].transpose(0, 1))
        output = self._attend(
            query[0].transpose(0, 1).contiguous(),
            keys.numbers,
            values.numbers,
            plan.query_starts,
            None,
            plan.max_query_len,
            plan.max_kv_len,
            scale=scaling,
            window_size=CAUSAL,
            enable_gqa=query.shape[1] != key.shape[1],
            seqused_k=plan.kv_lens,
            block_table=plan.tables,
            num_splits=1,
        )
        assert isinstance(output, torch.Tensor)
        return output.unsqueeze(0)
