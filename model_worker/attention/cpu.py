"""The CPU backend: torch's flash kernel over the pool in place, partial results merged.

Sequences are mostly a few long runs of consecutive blocks, and a run is a view that needs no copy.
Each part of a sequence's KV (a run, the gathered short runs, the new tokens themselves) is attended
apart and the parts are joined by their log-sum-exp, which is exact up to rounding (Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., FlashAttention, 2022).
Rows stored as int8 are decoded part by part first. Knows nothing of requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cache_store.tiers.device import DeviceTier
from model_worker.attention.kv_store import StoredRows, layer_rows
from model_worker.attention.metadata import AttentionMetadata, SequenceSpan, SlotRun, slot_runs

# Below this many tokens, one more kernel call costs more than copying the run.
MIN_IN_PLACE_TOKENS = 256

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

Part = tuple[torch.Tensor, torch.Tensor]
"""Output (1, heads, tokens, head_dim) over some KV rows, and its log-sum-exp (1, heads, tokens)."""


@dataclass(frozen=True, slots=True)
class _Gather:
    block_ids: torch.Tensor  # int64 (blocks,); a partly filled one comes last
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _SpanPlan:
    """``runs`` and ``gather`` cover every KV row that all of the span's new tokens attend to."""

    span: SequenceSpan
    runs: tuple[SlotRun, ...]
    gather: _Gather | None


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer of the pool, heads first: (1, kv_heads, slots, head_dim) views of its tensors."""

    keys: StoredRows
    values: StoredRows

    def store(
        self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new rows as attention has to read them."""
        return self.keys.write(2, slots, key), self.values.write(2, slots, value)

    def run(self, run: SlotRun, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (
            rows.narrow(2, run.start, run.num_tokens).read(dtype)
            for rows in (self.keys, self.values)
        )
        return keys, values

    def gather(
        self, gather: _Gather, block_size: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (
            rows.unflatten(2, block_size)
            .select(2, gather.block_ids)
            .flatten(2, 3)
            .narrow(2, 0, gather.num_tokens)
            .read(dtype)
            for rows in (self.keys, self.values)
        )
        return keys, values


class CpuFlashBackend:
    """Needs a tier whose memory lies heads first, as the CPU's does."""

    def __init__(self, tier: DeviceTier) -> None:
        self._block_size = tier.spec.block_size
        self._layers = [
            _Layer(keys.heads_first(), values.heads_first()) for keys, values in layer_rows(tier)
        ]

    def prepare(self, spans: tuple[SequenceSpan, ...]) -> tuple[_SpanPlan, ...]:
        return tuple(self._plan(span) for span in spans)

    def _plan(self, span: SequenceSpan) -> _SpanPlan:
        # One new token attends to itself through the pool, so that decode is a single part.
        past = span.kv_len if span.query_len == 1 else span.context_len
        runs = slot_runs(span.block_ids, past, self._block_size)
        short = [run for run in runs if run.num_tokens < MIN_IN_PLACE_TOKENS]
        if len(short) < 2:
            return _SpanPlan(span, tuple(runs), None)
        long = tuple(run for run in runs if run.num_tokens >= MIN_IN_PLACE_TOKENS)
        return _SpanPlan(span, long, self._gather(short))

    def _gather(self, runs: list[SlotRun]) -> _Gather:
        # Only the sequence's last run can end inside a block, and order is kept: it stays last.
        size = self._block_size
        ids = [
            block_id for run in runs for block_id in range(run.start // size, -(-run.stop // size))
        ]
        return _Gather(torch.tensor(ids), sum(run.num_tokens for run in runs))

    def forward(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        layer = self._layers[layer_idx]
        key, value = layer.store(metadata.slot_mapping, key, value)
        plans = metadata.plan
        assert isinstance(plans, tuple)
        outputs = []
        for plan in plans:
            start, count = plan.span.query_start, plan.span.query_len
            own_query = query.narrow(2, start, count)
            parts = self._past_parts(plan, own_query, layer, scaling)
            if count > 1:
                own_key, own_value = key.narrow(2, start, count), value.narrow(2, start, count)
                parts.append(_flash(own_query, own_key, own_value, 0.0, True, scale=scaling))
            outputs.append(_merge(parts))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _past_parts(
        self, plan: _SpanPlan, query: torch.Tensor, layer: _Layer, scaling: float
    ) -> list[Part]:
        parts: list[Part] = [
            _flash(query, *layer.run(run, query.dtype), scale=scaling) for run in plan.runs
        ]
        if plan.gather is not None:
            gathered = layer.gather(plan.gather, self._block_size, query.dtype)
            parts.append(_flash(query, *gathered, scale=scaling))
        return parts


def _merge(parts: list[Part]) -> torch.Tensor:
    """Join parts over different KV rows into (1, new tokens, heads, head_dim)."""
    if len(parts) == 1:
        return parts[0][0].transpose(1, 2)
    weights = torch.stack([lse for _, lse in parts]).softmax(dim=0).unsqueeze(-1)
    outputs = torch.stack([output for output, _ in parts])
    return (outputs * weights).sum(dim=0).to(outputs.dtype).transpose(1, 2)
