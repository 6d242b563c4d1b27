"""The device tier: the K and V tensors that attention reads and writes.

Owns the memory and the copies inside it. Knows nothing of requests, tokens or who owns a block:
it is handed block ids and row counts.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from cache_store.block import KVCacheSpec
from cache_store.cache import RowCopy


class DeviceTier:
    """K and V apart, each (layers, blocks, block_size, kv_heads, head_dim) on one device.

    That is the order of the indices. In memory the CPU's tensors lie heads first, so that a run of
    consecutive blocks is one stretch per head: attention there reads a run in place, and rows of
    other heads in between cost it up to half of its speed.

    Rows are written once and never change while a tree owns their block. The memory is allocated
    at construction and not cleared: a row is read only after it was written.

    Raises torch.OutOfMemoryError or RuntimeError when the device has no room.
    """

    def __init__(
        self, spec: KVCacheSpec, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        self.keys = self._allocate(dtype, device)
        self.values = self._allocate(dtype, device)

    def _allocate(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        spec = self.spec
        rows = (self.num_blocks, spec.block_size)
        if device.type != "cpu":
            shape = (spec.num_layers, *rows, spec.num_kv_heads, spec.head_dim)
            return torch.empty(shape, dtype=dtype, device=device)
        shape = (spec.num_layers, spec.num_kv_heads, *rows, spec.head_dim)
        return torch.empty(shape, dtype=dtype, device=device).permute(0, 2, 3, 1, 4)

    def copy_rows(self, copies: Iterable[RowCopy]) -> None:
        """Copy each pair's first ``num_rows`` rows of source into target, in all layers."""
        for copy in copies:
            for tensor in (self.keys, self.values):
                tensor[:, copy.target_block_id, : copy.num_rows] = tensor[
                    :, copy.source_block_id, : copy.num_rows
                ]
