"""Whole blocks into and out of the device tier, from a thread beside the engine's.

Owns the copies between the device's tensors and plain bytes. Reads only blocks that the tree owns
(never written) and writes only blocks that nobody reads yet, so it needs no lock with the engine.
Knows nothing of codings, of lower tiers or of when to copy.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from cache_store.tiers.codec import BlockView, part_shapes
from cache_store.tiers.device import DeviceTier


class DeviceBlocks(Protocol):
    """Used by one thread."""

    def read(self, block_id: int) -> BlockView:
        """The block's bytes, good until the next call; maybe the device's own memory."""
        ...

    def target(self, block_id: int) -> BlockView:
        """Where to write bytes that ``commit`` then makes the block's own."""
        ...

    def commit(self, block_id: int) -> None:
        """Returns when the block is complete on the device."""
        ...


def device_blocks(tier: DeviceTier) -> DeviceBlocks:
    """A fresh one for each thread that is to use it."""
    return CpuBlocks(tier) if tier.keys.device.type == "cpu" else CudaBlocks(tier)


class CpuBlocks:
    """The device's memory is the host's: numpy copies it in place, which lets go of the interpreter
    and, unlike torch, has no team of threads of its own to get in the way of the engine's."""

    def __init__(self, tier: DeviceTier) -> None:
        self._parts = tuple(_raw(tensor) for tensor in tier.tensors)

    def read(self, block_id: int) -> BlockView:
        return BlockView(*(part[:, :, block_id] for part in self._parts))

    def target(self, block_id: int) -> BlockView:
        return self.read(block_id)

    def commit(self, block_id: int) -> None:
        pass


class CudaBlocks:
    """A stream of its own and pinned memory, so that copies run beside the engine's kernels."""

    def __init__(self, tier: DeviceTier) -> None:
        self._tier = tier
        self._stream = torch.cuda.Stream(tier.keys.device)  # type: ignore[no-untyped-call]
        self._pinned = tuple(
            torch.empty(tensor[:, 0].transpose(1, 2).shape, dtype=tensor.dtype, pin_memory=True)
            for tensor in tier.tensors
        )
        raw = [pinned.view(torch.uint8).numpy() for pinned in self._pinned]
        shapes = part_shapes(tier.spec)
        self._view = BlockView(
            *(part.reshape(shape) for part, shape in zip(raw, shapes, strict=True))
        )

    def read(self, block_id: int) -> BlockView:
        with torch.cuda.stream(self._stream), torch.inference_mode():
            for pinned, tensor in zip(self._pinned, self._tier.tensors, strict=True):
                block = tensor[:, block_id].transpose(1, 2).contiguous()
                pinned.copy_(block, non_blocking=True)
        self._stream.synchronize()
        return self._view

    def target(self, block_id: int) -> BlockView:
        return self._view

    def commit(self, block_id: int) -> None:
        with torch.cuda.stream(self._stream), torch.inference_mode():
            for pinned, tensor in zip(self._pinned, self._tier.tensors, strict=True):
                on_device = pinned.to(tensor.device, non_blocking=True)
                tensor[:, block_id] = on_device.transpose(1, 2)
        self._stream.synchronize()


def _raw(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """(layers, kv_heads, blocks, block_size, vector bytes) over the same memory, heads first."""
    heads_first = tensor.movedim(3, 1)
    assert heads_first.is_contiguous(), "the CPU's tensors lie heads first"
    if tensor.dim() == 4:  # scales: a vector of one
        heads_first = heads_first.unsqueeze(-1)
    raw: NDArray[np.uint8] = heads_first.view(torch.uint8).numpy()
    return raw
