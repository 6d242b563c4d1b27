"""CUDA graphs without CUDA: a capture that runs the same function again, and a backend whose
reserved plans the reference backend carries out.

The function that is captured takes nothing and returns nothing, so what a replay computes depends,
as on a GPU, on what lies in the graph's static memory alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from cache_store.tiers.device import DeviceTier
from model_worker.attention.metadata import AttentionMetadata, SequenceSpan
from model_worker.attention.sdpa import SdpaBackend
from model_worker.cuda_graphs import GraphForward, GraphShape


@dataclass
class ReservedPlan:
    num_rows: int
    max_spans: int
    max_kv_len: int
    spans: tuple[SequenceSpan, ...] = ()
    inner: object = ()


class CapturableSdpa(SdpaBackend):
    """``refused``: spans of so many tokens of KV or more do not fit a reserved plan."""

    def __init__(self, tier: DeviceTier, refused: int = 10**9) -> None:
        super().__init__(tier)
        self.refused = refused
        self.num_prepared = 0

    def prepare(self, spans: tuple[SequenceSpan, ...]) -> object:
        self.num_prepared += 1
        return super().prepare(spans)

    def reserve(self, num_rows: int, max_spans: int, max_kv_len: int) -> ReservedPlan:
        return ReservedPlan(num_rows, max_spans, max_kv_len)

    def refill(self, plan: object, spans: tuple[SequenceSpan, ...]) -> bool:
        assert isinstance(plan, ReservedPlan)
        assert len(spans) <= plan.max_spans
        assert spans[-1].query_stop <= plan.num_rows
        assert max(span.kv_len for span in spans) <= plan.max_kv_len
        if max(span.kv_len for span in spans) >= self.refused:
            return False
        plan.spans, plan.inner = spans, super().prepare(spans)
        return True

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
        if not isinstance(plan, ReservedPlan):
            return super().forward(layer_idx, query, key, value, scaling, metadata)
        assert metadata.spans == ()
        assert query.shape[2] == plan.num_rows
        own = plan.spans[-1].query_stop if plan.spans else 0
        slots = metadata.slot_mapping
        assert (slots[:own] >= 0).all()
        assert (slots[own:] == -1).all()
        output = torch.zeros_like(query).transpose(1, 2)
        if own:
            inner = AttentionMetadata(self, slots[:own], plan.spans, plan.inner)
            rows = (part[:, :, :own] for part in (query, key, value))
            output[:, :own] = super().forward(layer_idx, *rows, scaling, inner)
        return output


@dataclass
class ReplayingCapture:
    """``num_captured`` and ``replayed``: how many, and which, by their order of capture."""

    num_captured: int = 0
    replayed: list[int] = field(default_factory=list)

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        number = self.num_captured
        self.num_captured += 1
        function()

        def replay() -> None:
            self.replayed.append(number)
            function()

        return replay


def captured(
    capture: ReplayingCapture,
    shapes: Sequence[GraphShape],
    max_model_len: int,
    refused: int = 10**9,
) -> Callable[[PreTrainedModel, DeviceTier], GraphForward]:
    """What an EngineRig is to make its forward with."""

    def make(model: PreTrainedModel, tier: DeviceTier) -> GraphForward:
        backend = CapturableSdpa(tier, refused)
        forward = GraphForward(model, backend, shapes, max_model_len, tier.keys.device)
        forward.record(capture)
        return forward

    return make
