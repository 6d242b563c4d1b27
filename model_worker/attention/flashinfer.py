"""The backend on FlashInfer's paged kernels (Ye et al., "FlashInfer", 2025).

Steps of one new token each go through its decode kernels, everything else through its prefill
kernels; where one prefix is shared by the whole step, its cascade reads that once. Owns the
description of a step in the library's terms (indptr, indices, last_page_len) and the wrappers with
their workspace. float16 and bfloat16 only. Needs the package flashinfer and, for kernels it has not
built yet, a CUDA compiler.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cache_store.tiers.device import DeviceTier
from model_worker.attention.block_tables import BlockTables, FlatTables
from model_worker.attention.kv_store import layer_rows
from model_worker.attention.metadata import AttentionMetadata, SequenceSpan
from model_worker.attention.shared_prefix import SharedPrefix, plan_shared_prefixes
from model_worker.attention.step_planner import MIN_SHARED_TOKENS
from model_worker.host_copy import StreamMark

WORKSPACE_BYTES = 128 * 2**20  # the size that the library recommends
LAYOUT = "NHD"  # (blocks, block_size, kv_heads, head_dim)


@dataclass(frozen=True, slots=True)
class PageLevel:
    """Rows of queries against lists of pages, as FlashInfer takes them; all int32.

    Entry i: query rows ``qo_indptr[i]`` to ``qo_indptr[i + 1]`` against the pages
    ``indices[indptr[i]:indptr[i + 1]]``, of the last of which ``last_page_len[i]`` rows count.
    """

    qo_indptr: NDArray[np.int32]
    indptr: NDArray[np.int32]
    indices: NDArray[np.int32]
    last_page_len: NDArray[np.int32]

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """On the host: the library reads them there, and copies them to the device itself."""
        return (
            torch.from_numpy(self.qo_indptr),
            torch.from_numpy(self.indptr),
            torch.from_numpy(self.indices),
            torch.from_numpy(self.last_page_len),
        )


@dataclass(slots=True)
class FlashInferPlan:
    """``levels``: a shared prefix, if any, then each sequence's own pages. The library's plan holds
    the softmax scale, which the first layer brings: ``scaling`` is the one it was made with."""

    levels: tuple[PageLevel, ...]
    is_decode: bool
    wrapper: Any = field(default=None)
    scaling: float | None = None


def own_level(
    spans: tuple[SequenceSpan, ...], tables: FlatTables, block_size: int, skipped_blocks: int
) -> PageLevel:
    """Every span's pages from ``skipped_blocks`` on."""
    kv_lens = np.array([span.kv_len for span in spans], dtype=np.int32)
    num_pages = -(-kv_lens // block_size) - skipped_blocks
    starts = tables.starts + skipped_blocks
    indices = [
        tables.block_ids[start : start + count]
        for start, count in zip(starts, num_pages, strict=True)
    ]
    return PageLevel(
        qo_indptr=np.array([0, *(span.query_stop for span in spans)], dtype=np.int32),
        indptr=np.concatenate([[0], np.cumsum(num_pages)]).astype(np.int32),
        indices=np.concatenate(indices),
        last_page_len=(kv_lens - 1) % block_size + np.int32(1),
    )


def shared_level(group: SharedPrefix, num_rows: int, block_size: int) -> PageLevel:
    """One entry: all rows of the step against the group's blocks, each of them full."""
    return PageLevel(
        qo_indptr=np.array([0, num_rows], dtype=np.int32),
        indptr=np.array([0, len(group.block_ids)], dtype=np.int32),
        indices=np.array(group.block_ids, dtype=np.int32),
        last_page_len=np.array([block_size], dtype=np.int32),
    )


class FlashInferBackend:
    """Raises ImportError where the library cannot be imported, ValueError beyond its limits.

    ``num_heads``: query heads. ``min_shared_tokens``: see StepPlanner; None shares nothing.
    ``library``: the module flashinfer, or what stands in for it.
    """

    def __init__(
        self,
        tier: DeviceTier,
        num_heads: int,
        dtype: torch.dtype,
        min_shared_tokens: int | None = MIN_SHARED_TOKENS,
        library: Any = None,
    ) -> None:
        if dtype not in (torch.float16, torch.bfloat16) or tier.keys.dtype is not dtype:
            raise ValueError(
                f"{dtype} over {tier.keys.dtype} KV: one half-precision type is needed"
            )
        if library is None:
            library = importlib.import_module("flashinfer")
        self._spec = tier.spec
        self._num_heads = num_heads
        self._dtype = dtype
        self._min_shared_tokens = min_shared_tokens
        self._layers = layer_rows(tier)
        self._tables = BlockTables(tier.spec.block_size)
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=tier.keys.device)
        self._decode = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace, LAYOUT, use_tensor_cores=num_heads > tier.spec.num_kv_heads
        )
        self._prefill = library.BatchPrefillWithPagedKVCacheWrapper(workspace, LAYOUT)
        self._cascade = library.MultiLevelCascadeAttentionWrapper(2, workspace, LAYOUT)
        self._planned = StreamMark(tier.keys.device)

    def prepare(self, spans: tuple[SequenceSpan, ...]) -> FlashInferPlan:
        tables = self._tables.flatten(spans)
        block_size = self._spec.block_size
        group = self._common_prefix(spans)
        if group is not None:
            shared = shared_level(group, spans[-1].query_stop, block_size)
            own = own_level(spans, tables, block_size, group.stop_block)
            return FlashInferPlan((shared, own), is_decode=False)
        own = own_level(spans, tables, block_size, 0)
        return FlashInferPlan((own,), is_decode=all(span.query_len == 1 for span in spans))

    def _common_prefix(self, spans: tuple[SequenceSpan, ...]) -> SharedPrefix | None:
        """A group of all spans, at least two: the cascade has an entry for every row."""
        if self._min_shared_tokens is None or len(spans) < 2:
            return None
        groups = plan_shared_prefixes(spans, self._spec.block_size, self._min_shared_tokens).groups
        return groups[0] if groups and len(groups[0].span_indices) == len(spans) else None

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
        assert isinstance(plan, FlashInferPlan)
        keys, values = self._layers[layer_idx]
        keys.flatten(0, 1).write(0, metadata.slot_mapping, key[0].transpose(0, 1))
        values.flatten(0, 1).write(0, metadata.slot_mapping, value[0].transpose(0, 1))
        if plan.scaling != scaling:
            # The library stages its plans in memory of its own, without looking whether the device
            # has copied the last one, which is that of a step in flight.
            self._planned.wait()
            plan.wrapper = self._plan(plan, scaling)
            self._planned = StreamMark(query.device)
            plan.scaling = scaling
        queries = query[0].transpose(0, 1).contiguous()
        output: torch.Tensor = plan.wrapper.run(queries, (keys.numbers, values.numbers))
        return output.unsqueeze(0)

    def _plan(self, plan: FlashInferPlan, scaling: float) -> Any:
        """Describe the step to the wrapper that serves it; returns that."""
        spec = self._spec
        sizes = (self._num_heads, spec.num_kv_heads, spec.head_dim, spec.block_size)
        types = {"sm_scale": scaling, "q_data_type": self._dtype, "kv_data_type": self._dtype}
        if len(plan.levels) > 1:
            arrays = zip(*(level.tensors() for level in plan.levels), strict=True)
            self._cascade.plan(*(list(array) for array in arrays), *sizes, causal=True, **types)
            return self._cascade
        (level,) = plan.levels
        qo_indptr, *pages = level.tensors()
        if plan.is_decode:
            self._decode.plan(*pages, *sizes, **types)
            return self._decode
        self._prefill.plan(qo_indptr, *pages, *sizes, causal=True, **types)
        return self._prefill
