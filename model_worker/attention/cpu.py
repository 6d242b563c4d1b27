"""The CPU backend: torch's flash kernel over the pool in place, partial results merged.

Sequences are mostly a few long runs of consecutive blocks, and a run is a view that needs no copy.
Each part of a sequence's KV (a run, the gathered short runs, the new tokens themselves) is attended
apart and the parts are joined by their log-sum-exp, which is exact up to rounding (Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., FlashAttention, 2022).
Knows nothing of requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cache_store.tiers.device import DeviceTier
from model_worker.attention.metadata import AttentionMetadata, SequenceSpan, SlotRun, slot_runs

# Below this many tokens, one more kernel call costs more than copying the run: a call with its
# views takes some 25 us, a gathered row of 3 x 64 floats in K and V some 0.05 us.
MIN_IN_PLACE_TOKENS = 256

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


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


class CpuFlashBackend:
    def __init__(self, tier: DeviceTier) -> None:
        self._tier = tier
        self._block_size = tier.spec.block_size

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
        keys, values = self._tier.keys[layer_idx], self._tier.values[layer_idx]
        keys.flatten(0, 1).index_copy_(0, metadata.slot_mapping, key[0].transpose(0, 1))
        values.flatten(0, 1).index_copy_(0, metadata.slot_mapping, value[0].transpose(0, 1))
        plans = metadata.plan
        assert isinstance(plans, tuple)
        outputs = []
        for plan in plans:
            start, stop = plan.span.query_start, plan.span.query_stop
            parts = self._past_parts(plan, query[:, :, start:stop], keys, values, scaling)
            if plan.span.query_len > 1:
                own = (query[:, :, start:stop], key[:, :, start:stop], value[:, :, start:stop])
                parts.append(_flash(*own, 0.0, True, scale=scaling))
            outputs.append(_merge(parts))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _past_parts(
        self,
        plan: _SpanPlan,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scaling: float,
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        parts = []
        flat_keys, flat_values = keys.flatten(0, 1), values.flatten(0, 1)
        for run in plan.runs:
            run_keys = flat_keys[run.start : run.stop].transpose(0, 1).unsqueeze(0)
            run_values = flat_values[run.start : run.stop].transpose(0, 1).unsqueeze(0)
            parts.append(_flash(query, run_keys, run_values, scale=scaling))
        if plan.gather is not None:
            ids, count = plan.gather.block_ids, plan.gather.num_tokens
            own_keys = keys.index_select(0, ids).flatten(0, 1)[:count].transpose(0, 1).unsqueeze(0)
            own_values = (
                values.index_select(0, ids).flatten(0, 1)[:count].transpose(0, 1).unsqueeze(0)
            )
            parts.append(_flash(query, own_keys, own_values, scale=scaling))
        return parts


def _merge(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Join parts of (output (1, heads, n, head_dim), log-sum-exp (1, heads, n)).

    Returns (1, n, heads, head_dim).
    """
    if len(parts) == 1:
        return parts[0][0].transpose(1, 2)
    weights = torch.stack([lse for _, lse in parts]).softmax(dim=0).unsqueeze(-1)
    outputs = torch.stack([output for output, _ in parts])
    return (outputs * weights).sum(dim=0).to(outputs.dtype).transpose(1, 2)
