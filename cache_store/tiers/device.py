"""The device tier: the K and V tensors that attention reads and writes.

Owns the memory and the copies inside it. Knows nothing of requests, tokens or who owns a block:
it is handed block ids and row counts.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from cache_store.block import SCALE_DTYPE, KVCacheSpec
from cache_store.cache import RowCopy


class DeviceTier:
    """K and V apart, each (layers, blocks, block_size, kv_heads, head_dim) on one device.

    Where the spec stores int8, ``key_scales`` and ``value_scales`` (layers, blocks, block_size,
    kv_heads), float32, are what a vector's numbers are to be multiplied by; else they are None.

    That is the order of the indices. In memory the CPU's tensors lie heads first, scales too, so
    that a run of consecutive blocks is one stretch per head: attention there reads a run in place,
    and rows of other heads in between cost it up to half of its speed.

    Rows are written once and never change while a tree owns their block. The memory is allocated
    at construction and not cleared: a row is read only after it was written.

    Raises torch.OutOfMemoryError or RuntimeError when the device has no room.
    """

    def __init__(self, spec: KVCacheSpec, num_blocks: int, device: torch.device) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        self.keys = self._allocate(spec.dtype, device, spec.head_dim)
        self.values = self._allocate(spec.dtype, device, spec.head_dim)
        self.key_scales: torch.Tensor | None = None
        self.value_scales: torch.Tensor | None = None
        if spec.scale_bytes:
            self.key_scales = self._allocate(SCALE_DTYPE, device)
            self.value_scales = self._allocate(SCALE_DTYPE, device)

    def _allocate(self, dtype_name: str, device: torch.device, *vector: int) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, dtype_name)
        spec = self.spec
        rows = (self.num_blocks, spec.block_size)
        if device.type != "cpu":
            shape = (spec.num_layers, *rows, spec.num_kv_heads, *vector)
            return torch.empty(shape, dtype=dtype, device=device)
        shape = (spec.num_layers, spec.num_kv_heads, *rows, *vector)
        return torch.empty(shape, dtype=dtype, device=device).movedim(1, 3)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that a block consists of: K, V and, where there are any, the scales of each."""
        if self.key_scales is None or self.value_scales is None:
            return (self.keys, self.values)
        return (self.keys, self.values, self.key_scales, self.value_scales)

    def copy_rows(self, copies: Iterable[RowCopy]) -> None:
        """Copy each pair's first ``num_rows`` rows of source into target, in all layers."""
        for copy in copies:
            for tensor in self.tensors:
                tensor[:, copy.target_block_id, : copy.num_rows] = tensor[
                    :, copy.source_block_id, : copy.num_rows
                ]
