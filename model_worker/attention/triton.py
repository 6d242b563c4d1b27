"""The Triton backend: our own kernels over the paged pool, in any dtype and for any block size.

Owns the step's plan in device memory and the launches. What a kernel does is in
``triton_kernels``, what there is to do comes from ``step_planner``. Needs the package triton.
Knows nothing of requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cache_store.tiers.device import DeviceTier
from model_worker.attention.metadata import AttentionMetadata, SequenceSpan
from model_worker.attention.plan_buffer import PlanBuffer, PlanCapacity
from model_worker.attention.step_planner import MIN_SHARED_TOKENS, StepPlanner
from model_worker.attention.tile_choice import KernelShape, choose_tiles
from model_worker.attention.triton_kernels import attend_tiles, merge_parts, store_rows
from model_worker.attention.work_plan import MIN_SPLIT_TOKENS

LOG2_E = 1.4426950408889634
MERGE_PARTS = 16  # partial results that a program of the merge takes at a time
RESERVED_PROGRAMS_PER_PROCESSOR = 8


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """``small_programs``, ``large_programs``, ``merge_rows``: grids, 0 where nothing is launched.

    ``part_outputs`` float32 (parts, heads, head_dim), ``part_sums`` float32 (parts, heads).
    """

    buffer: PlanBuffer
    small_programs: int
    large_programs: int
    merge_rows: int
    part_outputs: torch.Tensor
    part_sums: torch.Tensor
    is_reserved: bool


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's tensors and the strides that keys and values have in common: of a slot and of a
    head in the pool, of a slot and of a head in the scales."""

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None
    strides: tuple[int, int, int, int]


class TritonBackend:
    """Captured by CUDA graphs too (see CapturableBackend).

    ``num_heads``: query heads. ``dtype``: of the model; the tier may hold int8. ``num_processors``:
    multiprocessors of the device; None asks it. ``min_shared_tokens``: see StepPlanner;
    ``min_split_tokens``: see TileShape.

    Raises ValueError for heads beyond the kernels' limits or a block size that is no power of two.
    """

    def __init__(
        self,
        tier: DeviceTier,
        num_heads: int,
        dtype: torch.dtype,
        num_processors: int | None = None,
        min_shared_tokens: int | None = MIN_SHARED_TOKENS,
        min_split_tokens: int = MIN_SPLIT_TOKENS,
    ) -> None:
        spec = tier.spec
        if spec.block_size & (spec.block_size - 1):
            raise ValueError(f"a block of {spec.block_size} tokens: no power of two")
        self._tier = tier
        self._layers = _layers(tier)
        self._device = tier.keys.device
        self._num_heads = num_heads
        self._group = num_heads // spec.num_kv_heads
        self._processors = num_processors or _num_processors(self._device)
        self._tiles = choose_tiles(dtype, spec.head_dim, self._group)
        self._shape = self._tiles.tile_shape(
            num_heads, spec.num_kv_heads, self._processors, min_split_tokens
        )
        self._planner = StepPlanner(self._shape, spec.block_size, min_shared_tokens)

    def prepare(self, spans: tuple[SequenceSpan, ...]) -> TritonPlan:
        work = self._planner.plan(spans)
        buffer = PlanBuffer(PlanCapacity.of(work), self._device)
        buffer.fill(work)
        kv_heads = self._tier.spec.num_kv_heads
        return self._plan(
            buffer,
            small_programs=len(work.small) * kv_heads,
            large_programs=len(work.large) * kv_heads,
            merge_rows=work.num_rows if work.num_parts else 0,
            is_reserved=False,
        )

    def reserve(self, num_rows: int, max_spans: int, max_kv_len: int) -> TritonPlan:
        shape = self._shape
        max_blocks = -(-max_kv_len // self._tier.spec.block_size)
        max_splits = min(shape.max_splits, -(-max_kv_len // shape.min_split))
        num_large = -(-num_rows // shape.large_rows) + max_spans
        # The more tiles a sequence has, the less it is split.
        chunk_parts = shape.large_rows * max(1, shape.target_units // shape.kv_heads) + num_rows
        span_parts = max(shape.small_rows * max_splits, chunk_parts)
        own_parts = min(num_rows * max_splits, max_spans * span_parts)
        shared_parts = num_rows * max_splits // 2 if max_spans > 1 else 0
        capacity = PlanCapacity(
            small=2 * max_spans * max_splits,
            large=num_large * max_splits,
            query_rows=3 * num_rows,
            rows=num_rows,
            parts=own_parts + shared_parts,
            table_blocks=max_spans * max_blocks,
        )
        programs = RESERVED_PROGRAMS_PER_PROCESSOR * self._processors
        kv_heads = self._tier.spec.num_kv_heads
        return self._plan(
            PlanBuffer(capacity, self._device),
            small_programs=min(programs, capacity.small * kv_heads),
            large_programs=min(programs, capacity.large * kv_heads),
            merge_rows=num_rows,
            is_reserved=True,
        )

    def refill(self, plan: object, spans: tuple[SequenceSpan, ...]) -> bool:
        assert isinstance(plan, TritonPlan)
        for is_sharing in (True, False):
            work = self._planner.plan(spans, is_sharing=is_sharing)
            if plan.buffer.capacity.holds(PlanCapacity.of(work)):
                plan.buffer.fill(work)
                return True
        return False

    def _plan(
        self,
        buffer: PlanBuffer,
        *,
        small_programs: int,
        large_programs: int,
        merge_rows: int,
        is_reserved: bool,
    ) -> TritonPlan:
        shape = (buffer.capacity.parts, self._num_heads, self._tier.spec.head_dim)
        outputs = torch.empty(shape, dtype=torch.float32, device=self._device)
        sums = torch.empty(shape[:2], dtype=torch.float32, device=self._device)
        return TritonPlan(
            buffer, small_programs, large_programs, merge_rows, outputs, sums, is_reserved
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
        assert isinstance(plan, TritonPlan)
        assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        self._store(layer_idx, key[0], value[0], metadata.slot_mapping)
        queries = query[0].transpose(0, 1)
        new = torch.zeros if plan.is_reserved else torch.empty
        output = new(queries.shape, dtype=query.dtype, device=query.device)
        buffer = plan.buffer
        for kernel, programs, num_items, items in (
            (self._tiles.small, plan.small_programs, buffer.num_small, buffer.small),
            (self._tiles.large, plan.large_programs, buffer.num_large, buffer.large),
        ):
            if programs:
                self._attend(
                    layer_idx, queries, output, scaling, plan, kernel, programs, num_items, items
                )
        if plan.merge_rows:
            merge_parts[(plan.merge_rows, self._num_heads)](
                output,
                plan.part_outputs,
                plan.part_sums,
                buffer.num_rows,
                buffer.part_starts,
                buffer.part_ids,
                HEADS=self._num_heads,
                HEAD_DIM=self._tier.spec.head_dim,
                BLOCK_P=MERGE_PARTS,
                BLOCK_D=self._tiles.block_d,
                num_warps=4,
            )
        return output.unsqueeze(0)

    def _store(
        self, layer_idx: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """``key`` and ``value`` (kv_heads, tokens, head_dim)."""
        layer = self._layers[layer_idx]
        spec = self._tier.spec
        store_rows[(key.shape[1],)](
            key,
            value,
            layer.keys,
            layer.values,
            layer.key_scales,
            layer.value_scales,
            slots,
            key.stride(1),
            key.stride(0),
            value.stride(1),
            value.stride(0),
            *layer.strides,
            KV_HEADS=spec.num_kv_heads,
            HEAD_DIM=spec.head_dim,
            BLOCK_H=1 << (spec.num_kv_heads - 1).bit_length(),
            BLOCK_D=self._tiles.block_d,
            IS_INT8=layer.key_scales is not None,
            num_warps=4,
        )

    def _attend(
        self,
        layer_idx: int,
        queries: torch.Tensor,
        output: torch.Tensor,
        scaling: float,
        plan: TritonPlan,
        kernel: KernelShape,
        programs: int,
        num_items: torch.Tensor,
        items: torch.Tensor,
    ) -> None:
        layer = self._layers[layer_idx]
        spec = self._tier.spec
        attend_tiles[(programs,)](
            queries,
            output,
            plan.part_outputs,
            plan.part_sums,
            layer.keys,
            layer.values,
            layer.key_scales,
            layer.value_scales,
            num_items,
            items,
            plan.buffer.query_rows,
            plan.buffer.row_limits,
            plan.buffer.tables,
            scaling * LOG2_E,
            queries.stride(0),
            queries.stride(1),
            *layer.strides,
            KV_HEADS=spec.num_kv_heads,
            GROUP=self._group,
            HEAD_DIM=spec.head_dim,
            BLOCK_SIZE=spec.block_size,
            BLOCK_M=kernel.block_m,
            BLOCK_N=kernel.block_n,
            BLOCK_D=self._tiles.block_d,
            PRECISION=self._tiles.precision,
            IS_INT8=layer.key_scales is not None,
            num_warps=kernel.num_warps,
            num_stages=kernel.num_stages,
        )


def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _layers(tier: DeviceTier) -> list[_Layer]:
    layers = []
    for index in range(tier.spec.num_layers):
        tensors = [tensor[index] for tensor in tier.tensors]
        keys, values, key_scales, value_scales = (*tensors, None, None)[:4]
        assert keys is not None
        assert values is not None
        assert keys.stride() == values.stride()
        assert (keys.stride(0), keys.stride(3)) == (tier.spec.block_size * keys.stride(1), 1)
        scale_strides = (
            (0, 0) if key_scales is None else (key_scales.stride(1), key_scales.stride(2))
        )
        strides = (keys.stride(1), keys.stride(2), *scale_strides)
        layers.append(_Layer(keys, values, key_scales, value_scales, strides))
    return layers
