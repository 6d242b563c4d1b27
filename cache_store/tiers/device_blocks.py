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

from cache_store.tiers.codec import BlockView, part_shape
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
        self._keys = _raw(tier.keys)
        self._values = _raw(tier.values)

    def read(self, block_id: int) -> BlockView:
        return BlockView(self._keys[:, :, block_id], self._values[:, :, block_id])

    def target(self, block_id: int) -> BlockView:
        return self.read(block_id)

    def commit(self, block_id: int) -> None:
        pass


class CudaBlocks:
    """A stream of its own and pinned memory, so that copies run beside the engine's kernels."""

    def __init__(self, tier: DeviceTier) -> None:
        self._tier = tier
        self._stream = torch.cuda.Stream(tier.keys.device)  # type: ignore[no-untyped-call]
        spec = tier.spec
        shape = (2, spec.num_layers, spec.num_kv_heads, spec.block_size, spec.head_dim)
        self._pinned = torch.empty(shape, dtype=tier.keys.dtype, pin_memory=True)
        raw = self._pinned.view(torch.uint8).numpy().reshape(2, *part_shape(spec))
        self._view = BlockView(raw[0], raw[1])

    def read(self, block_id: int) -> BlockView:
        with torch.cuda.stream(self._stream), torch.inference_mode():
            for number, tensor in enumerate((self._tier.keys, self._tier.values)):
                block = tensor[:, block_id].transpose(1, 2).contiguous()
                self._pinned[number].copy_(block, non_blocking=True)
        self._stream.synchronize()
        return self._view

    def target(self, block_id: int) -> BlockView:
        return self._view

    def commit(self, block_id: int) -> None:
        with torch.cuda.stream(self._stream), torch.inference_mode():
            on_device = self._pinned.to(self._tier.keys.device, non_blocking=True)
            self._tier.keys[:, block_id] = on_device[0].transpose(1, 2)
            self._tier.values[:, block_id] = on_device[1].transpose(1, 2)
        self._stream.synchronize()


def _raw(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """(layers, kv_heads, blocks, block_size, head bytes) over the same memory, heads first."""
    heads_first = tensor.permute(0, 3, 1, 2, 4)
    assert heads_first.is_contiguous(), "the CPU's tensors lie heads first"
    raw: NDArray[np.uint8] = heads_first.view(torch.uint8).numpy()
    return raw
