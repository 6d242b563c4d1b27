"""Blocks as payloads on the device itself, many at once: what ``codec`` does in numpy, in torch.

Owns the arithmetic, which gives the same bytes. So the link to the host carries payloads only, in
long copies, and no core of the host touches a number. Knows nothing of streams or of the host.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch

from cache_store.tiers.codec import BlockCodec, ExactCodec, Int8Codec
from cache_store.tiers.device import DeviceTier

_INT8_MAX = 127.0
# Bytes are moved as integers: every element type has one of its size, and no kernel looks at them.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PayloadCoder(Protocol):
    """``ids`` int64 (blocks,) and ``payloads`` uint8 (blocks, payload_bytes), on the device."""

    def encode(self, ids: torch.Tensor, payloads: torch.Tensor) -> None: ...

    def decode(self, payloads: torch.Tensor, ids: torch.Tensor) -> None: ...


def payload_coder(tier: DeviceTier, codec: BlockCodec) -> PayloadCoder:
    """Raises TypeError for a codec that has no form on the device."""
    if isinstance(codec, ExactCodec):
        return _ExactCoder(tier)
    if isinstance(codec, Int8Codec):
        return _Int8Coder(tier)
    raise TypeError(f"no form of {codec.name} on the device")


class _ExactCoder:
    def __init__(self, tier: DeviceTier) -> None:
        self._tensors = [t.view(_INTEGERS[t.element_size()]) for t in tier.tensors]
        sizes = [math.prod(_payload_shape(t)) * t.element_size() for t in tier.tensors]
        self._ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]

    def encode(self, ids: torch.Tensor, payloads: torch.Tensor) -> None:
        start = 0
        for tensor, end in zip(self._tensors, self._ends, strict=True):
            part = _heads_first(tensor.index_select(1, ids)).contiguous()
            payloads[:, start:end] = part.flatten(1).view(torch.uint8)
            start = end

    def decode(self, payloads: torch.Tensor, ids: torch.Tensor) -> None:
        start = 0
        for tensor, end in zip(self._tensors, self._ends, strict=True):
            numbers = payloads[:, start:end].contiguous().view(tensor.dtype)
            part = numbers.view(len(ids), *_payload_shape(tensor))
            tensor.index_copy_(1, ids, _rows_first(part))
            start = end


class _Int8Coder:
    """Over a device that holds floating-point numbers; see Int8Codec."""

    def __init__(self, tier: DeviceTier) -> None:
        self._tensors = (tier.keys, tier.values)
        self._shape = _payload_shape(tier.keys)
        self._num_numbers = math.prod(self._shape)

    def encode(self, ids: torch.Tensor, payloads: torch.Tensor) -> None:
        numbers, scales = [], []
        for tensor in self._tensors:
            values = _heads_first(tensor.index_select(1, ids)).float()
            scale = values.abs().amax(dim=-1, keepdim=True) / _INT8_MAX
            steps = torch.where(scale == 0.0, 1.0, scale)
            numbers.append((values / steps).round_().to(torch.int8).flatten(1))
            scales.append(scale.flatten(1))
        parts = (torch.cat(numbers, dim=1), torch.cat(scales, dim=1))
        payloads.copy_(torch.cat([part.view(torch.uint8) for part in parts], dim=1))

    def decode(self, payloads: torch.Tensor, ids: torch.Tensor) -> None:
        split = 2 * self._num_numbers
        numbers = payloads[:, :split].contiguous().view(torch.int8).float()
        scales = payloads[:, split:].contiguous().view(torch.float32)
        shape = (len(ids), 2, *self._shape)
        values = numbers.view(shape) * scales.view(*shape[:-1], 1)
        for number, tensor in enumerate(self._tensors):
            tensor.index_copy_(1, ids, _rows_first(values[:, number]).to(tensor.dtype))


def _payload_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """(layers, kv_heads, block_size[, head_dim]): of one block of the tier, heads first."""
    layers, _, block_size, kv_heads, *vector = tensor.shape
    return (layers, kv_heads, block_size, *vector)


def _heads_first(blocks: torch.Tensor) -> torch.Tensor:
    """(layers, blocks, block_size, kv_heads[, ..]) as (blocks, layers, kv_heads, block_size..)."""
    return blocks.movedim(1, 0).transpose(2, 3)


def _rows_first(blocks: torch.Tensor) -> torch.Tensor:
    """The inverse of ``_heads_first``."""
    return blocks.transpose(2, 3).movedim(0, 1)
