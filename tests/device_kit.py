"""Small device tiers with random contents, and the bytes of their blocks."""

from __future__ import annotations

import numpy as np
import torch

from cache_store.block import KVCacheSpec
from cache_store.tiers.codec import BlockView
from cache_store.tiers.device import DeviceTier

# Bytes of one number.
DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}
STORED_DTYPES = {**DTYPES, "int8": 1}


def make_spec(dtype: str = "float32", block_size: int = 4) -> KVCacheSpec:
    """3 layers of 2 heads of 8 numbers."""
    return KVCacheSpec(block_size, 3, 2, 8, dtype, STORED_DTYPES[dtype])


def make_tier(spec: KVCacheSpec, num_blocks: int = 6, seed: int = 0) -> DeviceTier:
    tier = DeviceTier(spec, num_blocks, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    for tensor in tier.tensors:
        drawn = torch.randn(tensor.shape, generator=generator)
        tensor.copy_(drawn * 40 if tensor.dtype is torch.int8 else drawn)
    return tier


def block_of(tier: DeviceTier, block_id: int, num_rows: int | None = None) -> torch.Tensor:
    """A copy of the first rows (all, if not said) of a block: (2, layers, rows, heads, dim)."""
    rows = slice(num_rows)
    parts = (tier.keys[:, block_id, rows], tier.values[:, block_id, rows])
    return torch.stack(parts).clone()


def raw(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor in index order: uint8 (..., last dimension's bytes)."""
    flat: np.ndarray = tensor.contiguous().view(torch.uint8).numpy()
    return flat


def view_of(keys: torch.Tensor, values: torch.Tensor) -> BlockView:
    """Over the tensors' own memory, each (layers, kv_heads, block_size, head_dim)."""
    return BlockView(raw(keys), raw(values))
