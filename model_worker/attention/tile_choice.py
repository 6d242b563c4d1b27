"""How large the kernels' tiles are, by dtype, head size and device.

Owns the numbers that only measuring can justify. Knows nothing of Triton or of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from model_worker.attention.work_plan import TileShape

UNITS_PER_PROCESSOR = 2  # tiles at work on a multiprocessor at once hide each other's reads


@dataclass(frozen=True, slots=True)
class KernelShape:
    """``block_m``: query rows times the heads of one kv head; ``block_n``: KV tokens at a time."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class TileChoice:
    small: KernelShape
    large: KernelShape
    block_d: int
    precision: str  # Triton's input_precision: "ieee" keeps float32 products exact

    def tile_shape(
        self, num_heads: int, num_kv_heads: int, num_processors: int, min_split: int
    ) -> TileShape:
        group = num_heads // num_kv_heads
        return TileShape(
            kv_heads=num_kv_heads,
            small_rows=self.small.block_m // group,
            large_rows=self.large.block_m // group,
            small_kv=self.small.block_n,
            large_kv=self.large.block_n,
            target_units=UNITS_PER_PROCESSOR * num_processors,
            min_split=min_split,
        )


def choose_tiles(dtype: torch.dtype, head_dim: int, group: int) -> TileChoice:
    """``group``: query heads of one kv head, at most 128. Raises ValueError beyond the limits."""
    if head_dim > 256:
        raise ValueError(f"heads of {head_dim} elements: the kernels take at most 256")
    if group > 128:
        raise ValueError(f"{group} query heads to a kv head: the kernels take at most 128")
    block_d = max(16, _power_of_two(head_dim))
    small_m = max(16, _power_of_two(group))
    if dtype == torch.float32:
        # Without tensor cores registers hold both operands: small tiles.
        block_n = 32 if block_d <= 64 else 16
        small = KernelShape(small_m, block_n, 4, 2)
        large = KernelShape(max(32, small_m), block_n, 8 if block_d > 128 else 4, 2)
        return TileChoice(small, large, block_d, "ieee")
    if block_d > 128:
        small = KernelShape(small_m, 32, 4, 3)
        large = KernelShape(max(64, small_m), 32, 8, 2)
    else:
        small = KernelShape(small_m, 64, 4, 3)
        large = KernelShape(128, 64, 8, 3)
    return TileChoice(small, large, block_d, "tf32")


def _power_of_two(number: int) -> int:
    """The least one that is not smaller."""
    return 1 << (number - 1).bit_length()
