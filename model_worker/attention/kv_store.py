"""Rows of K and V in the device tier: written and read, as they are or as int8 with scales.

Owns the coding of a row, which depends on that row alone: symmetric, the vector's absolute maximum
is 127 steps, one float32 scale for each token and head (K and V apart). So a row has the same bits
in whichever chunk, batch or run it was computed.

One rule for all rows: attention reads what is stored. A token attends to itself and to the tokens
of its own step through their stored rows, never through the numbers that were rounded to them;
otherwise an answer would depend on where its chunks began.

Knows nothing of sequences, of plans or of how attention is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cache_store.tiers.device import DeviceTier

_INT8_MAX = 127.0


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 numbers (..., head_dim) and their float32 scales (...) of ``rows`` (..., head_dim).

    A vector of zeros has the scale zero. Rounds half to even.
    """
    values = rows.float()
    scales = values.abs().amax(dim=-1) / _INT8_MAX
    steps = torch.where(scales == 0.0, 1.0, scales).unsqueeze(-1)
    return (values / steps).round_().to(torch.int8), scales


def dequantize(
    numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The inverse of ``quantize``: multiplied in float32, then rounded to ``dtype``."""
    return (numbers.float() * scales.unsqueeze(-1)).to(dtype)


@dataclass(frozen=True, slots=True)
class StoredRows:
    """K or V of one layer: a view of the tier's tensors in any order of indices but the last.

    ``numbers`` (..., head_dim), ``scales`` (...) or None where numbers are stored as they are.
    """

    numbers: torch.Tensor
    scales: torch.Tensor | None

    def write(self, dim: int, slots: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Store ``rows`` at the indices ``slots`` (int64) of dimension ``dim``.

        Returns them as attention has to see them: themselves, or decoded again.
        """
        if self.scales is None:
            self.numbers.index_copy_(dim, slots, rows)
            return rows
        numbers, scales = quantize(rows)
        self.numbers.index_copy_(dim, slots, numbers)
        self.scales.index_copy_(dim, slots, scales)
        return dequantize(numbers, scales, rows.dtype)

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        """All rows as attention has to see them: a view if they are stored as they are, else
        decoded to ``dtype``."""
        if self.scales is None:
            return self.numbers
        return dequantize(self.numbers, self.scales, dtype)

    def select(self, dim: int, ids: torch.Tensor) -> StoredRows:
        """A copy of the indices ``ids`` of dimension ``dim``."""
        scales = None if self.scales is None else self.scales.index_select(dim, ids)
        return StoredRows(self.numbers.index_select(dim, ids), scales)

    def narrow(self, dim: int, start: int, length: int) -> StoredRows:
        scales = None if self.scales is None else self.scales.narrow(dim, start, length)
        return StoredRows(self.numbers.narrow(dim, start, length), scales)

    def heads_first(self) -> StoredRows:
        """(blocks, block_size, kv_heads, head_dim) as (1, kv_heads, slots, head_dim), without a
        copy. Raises RuntimeError where the memory does not lie that way, as the CPU's does."""
        blocks, block_size, kv_heads, head_dim = self.numbers.shape
        shape = (1, kv_heads, blocks * block_size)
        scales = None if self.scales is None else self.scales.permute(2, 0, 1).view(shape)
        return StoredRows(self.numbers.permute(2, 0, 1, 3).view(*shape, head_dim), scales)

    def unflatten(self, dim: int, size: int) -> StoredRows:
        """Dimension ``dim`` as two, the second of ``size``."""
        shape = (-1, size)
        numbers = self.numbers.unflatten(dim, shape)  # type: ignore[no-untyped-call]
        if self.scales is None:
            return StoredRows(numbers, None)
        return StoredRows(numbers, self.scales.unflatten(dim, shape))  # type: ignore[no-untyped-call]

    def flatten(self, start_dim: int, end_dim: int) -> StoredRows:
        scales = None if self.scales is None else self.scales.flatten(start_dim, end_dim)
        return StoredRows(self.numbers.flatten(start_dim, end_dim), scales)


def layer_rows(tier: DeviceTier) -> list[tuple[StoredRows, StoredRows]]:
    """K and V of each layer, (blocks, block_size, kv_heads, head_dim), over the tier's memory."""
    keys = _rows(tier.keys, tier.key_scales)
    return list(zip(keys, _rows(tier.values, tier.value_scales), strict=True))


def _rows(numbers: torch.Tensor, scales: torch.Tensor | None) -> list[StoredRows]:
    if scales is None:
        return [StoredRows(layer, None) for layer in numbers]
    return [StoredRows(*layer) for layer in zip(numbers, scales, strict=True)]
