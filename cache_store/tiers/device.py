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

    Rows are written once and never change while a tree owns their block. The memory is allocated
    at construction and not cleared: a row is read only after it was written.

    Raises torch.OutOfMemoryError or RuntimeError when the device has no room.
    """

    def __init__(
        self, spec: KVCacheSpec, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (spec.num_layers, num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        self.spec = spec
        self.num_blocks = num_blocks
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)

    def copy_rows(self, copies: Iterable[RowCopy]) -> None:
        """Copy each pair's first ``num_rows`` rows of source into target, in all layers."""
        for copy in copies:
            for tensor in (self.keys, self.values):
                tensor[:, copy.target_block_id, : copy.num_rows] = tensor[
                    :, copy.source_block_id, : copy.num_rows
                ]
