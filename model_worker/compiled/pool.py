"""The device tier's tensors as the kernels take them: arrays, heads first, over the same memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cache_store.tiers.device import DeviceTier

Floats = NDArray[np.float32]


class PoolArrays(NamedTuple):
    """``keys`` and ``values`` (layers, kv_heads, slots, head_dim), float32 or int8; the scales of
    int8 (layers, kv_heads, slots), of no slots for float32."""

    keys: NDArray[Any]
    values: NDArray[Any]
    key_scales: Floats
    value_scales: Floats

    @classmethod
    def of(cls, tier: DeviceTier) -> PoolArrays:
        """Raises RuntimeError where the memory does not lie heads first, as the CPU's does."""
        layers, blocks, block_size, kv_heads, _ = tier.keys.shape
        slots = blocks * block_size
        nothing = np.empty((layers, kv_heads, 0), np.float32)

        def array(tensor: torch.Tensor | None) -> NDArray[Any]:
            if tensor is None:
                return nothing
            heads_first = tensor.movedim(3, 1)
            return heads_first.view(layers, kv_heads, slots, *tensor.shape[4:]).numpy()

        return cls(*map(array, (tier.keys, tier.values, tier.key_scales, tier.value_scales)))

    def layer(self, index: int) -> tuple[NDArray[Any], NDArray[Any], Floats, Floats]:
        return (
            self.keys[index],
            self.values[index],
            self.key_scales[index],
            self.value_scales[index],
        )
