"""Whole blocks into and out of the device tier, from a thread beside the engine's.

Owns the copies between the device's tensors and payloads in the host's memory. Reads only blocks
that the tree owns (never written) and writes only blocks that nobody reads yet, so it needs no lock
with the engine. Knows nothing of lower tiers or of when to copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from cache_store.tiers.codec import BlockCodec, BlockView, PayloadRows
from cache_store.tiers.device import DeviceTier
from cache_store.tiers.staged_blocks import StagedBlocks
from cache_store.tiers.streams import CudaStream


class DeviceBlocks(Protocol):
    """Used by one thread. Both methods return when the copies are complete."""

    batch_blocks: int
    """How many blocks are worth being handed over at once, at the least."""

    def store(self, block_ids: Sequence[int], rows: PayloadRows) -> None:
        """Code each block of the device into its row."""
        ...

    def load(self, rows: PayloadRows, block_ids: Sequence[int]) -> None:
        """Make each row's content the block's own."""
        ...

    def new_rows(self, num_rows: int) -> NDArray[np.uint8]:
        """Memory of (rows, payload_bytes) that is copied from and to as fast as can be."""
        ...


def device_blocks(tier: DeviceTier, codec: BlockCodec) -> DeviceBlocks:
    """A fresh one for each thread that is to use it."""
    device = tier.keys.device
    if device.type == "cpu":
        return CpuBlocks(tier, codec)
    return StagedBlocks(tier, codec, copying=CudaStream(device), coding=CudaStream(device))


class CpuBlocks:
    """The device's memory is the host's: numpy copies it in place, which lets go of the interpreter
    and, unlike torch, has no team of threads of its own to get in the way of the engine's."""

    batch_blocks = 1

    def __init__(self, tier: DeviceTier, codec: BlockCodec) -> None:
        self._parts = tuple(_raw(tensor) for tensor in tier.tensors)
        self._codec = codec

    def store(self, block_ids: Sequence[int], rows: PayloadRows) -> None:
        for block_id, row_id in zip(block_ids, rows.row_ids, strict=True):
            self._codec.encode(self._view(block_id), rows.memory[row_id])

    def load(self, rows: PayloadRows, block_ids: Sequence[int]) -> None:
        for block_id, row_id in zip(block_ids, rows.row_ids, strict=True):
            self._codec.decode(rows.memory[row_id], self._view(block_id))

    def new_rows(self, num_rows: int) -> NDArray[np.uint8]:
        return np.empty((num_rows, self._codec.payload_bytes), dtype=np.uint8)

    def _view(self, block_id: int) -> BlockView:
        return BlockView(*(part[:, :, block_id] for part in self._parts))


def _raw(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """(layers, kv_heads, blocks, block_size, vector bytes) over the same memory, heads first."""
    heads_first = tensor.movedim(3, 1)
    assert heads_first.is_contiguous(), "the CPU's tensors lie heads first"
    if tensor.dim() == 4:  # scales: a vector of one
        heads_first = heads_first.unsqueeze(-1)
    raw: NDArray[np.uint8] = heads_first.view(torch.uint8).numpy()
    return raw
