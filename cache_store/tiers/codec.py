"""How the keys and values of a block are coded below the device.

Owns the two codings: the exact bytes, and int8 with one scale for each token and head, which is
close and not equal. A device that holds int8 already goes down as it is, whatever is asked for:
coded once, a number is never coded again. Knows nothing of where payloads are kept.

A payload is K and then V, each (layers, kv_heads, block_size, head_dim) in C order; int8 has its
scales, float32 (2, layers, kv_heads, block_size), after the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cache_store.block import KVCacheSpec

Payload = NDArray[np.uint8]  # 1-D

CODEC_NAMES = ("exact", "int8")
_SCALE_BYTES = 4
_INT8_MAX = 127.0


@dataclass(frozen=True, slots=True)
class PayloadRows:
    """Some payloads of many: rows ``row_ids`` of ``memory`` (payloads, payload_bytes)."""

    memory: NDArray[np.uint8]
    row_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class BlockView:
    """The device's own numbers as bytes: each (layers, kv_heads, block_size, vector bytes), not
    necessarily contiguous. The scales are None unless the device holds int8."""

    keys: NDArray[np.uint8]
    values: NDArray[np.uint8]
    key_scales: NDArray[np.uint8] | None = None
    value_scales: NDArray[np.uint8] | None = None

    @property
    def parts(self) -> tuple[NDArray[np.uint8], ...]:
        """In the order in which they lie in a payload."""
        if self.key_scales is None or self.value_scales is None:
            return (self.keys, self.values)
        return (self.keys, self.values, self.key_scales, self.value_scales)


class BlockCodec(Protocol):
    """``payload_bytes`` per block."""

    name: str
    payload_bytes: int

    def encode(self, block: BlockView, payload: Payload) -> None: ...

    def decode(self, payload: Payload, block: BlockView) -> None: ...

    def clear_rows(self, payload: Payload, num_rows: int) -> None:
        """Zero the rows from ``num_rows`` on: they were never written by who stores the block."""
        ...


def make_codec(name: str, spec: KVCacheSpec) -> BlockCodec:
    """Raises ValueError for a name that is not in CODEC_NAMES."""
    if name not in CODEC_NAMES:
        raise ValueError(f"{name!r} is none of {', '.join(CODEC_NAMES)}")
    return ExactCodec(spec) if name == "exact" or spec.dtype == "int8" else Int8Codec(spec)


def part_shapes(spec: KVCacheSpec) -> tuple[tuple[int, int, int, int], ...]:
    """Of the bytes of each part of a block, as BlockView has them."""
    rows = (spec.num_layers, spec.num_kv_heads, spec.block_size)
    numbers = (*rows, spec.head_dim * spec.bytes_per_element)
    if not spec.scale_bytes:
        return (numbers, numbers)
    scales = (*rows, spec.scale_bytes)
    return (numbers, numbers, scales, scales)


class ExactCodec:
    def __init__(self, spec: KVCacheSpec) -> None:
        self.name = f"exact:{spec.coding}"
        self.payload_bytes = spec.bytes_per_block
        self._shapes = part_shapes(spec)
        self._ends = np.cumsum([math.prod(shape) for shape in self._shapes]).tolist()

    def encode(self, block: BlockView, payload: Payload) -> None:
        for target, source in zip(self._parts(payload), block.parts, strict=True):
            np.copyto(target, source)

    def decode(self, payload: Payload, block: BlockView) -> None:
        for source, target in zip(self._parts(payload), block.parts, strict=True):
            np.copyto(target, source)

    def clear_rows(self, payload: Payload, num_rows: int) -> None:
        for part in self._parts(payload):
            part[:, :, num_rows:] = 0

    def _parts(self, payload: Payload) -> list[Payload]:
        pieces = np.split(payload, self._ends[:-1])
        return [piece.reshape(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]


class Int8Codec:
    """Absolute maximum of each head's vector to 127; the error is at most half a step of that."""

    def __init__(self, spec: KVCacheSpec) -> None:
        self.name = "int8"
        self._spec = spec
        self._rows = (2, spec.num_layers, spec.num_kv_heads, spec.block_size)
        self._num_numbers = math.prod(self._rows) * spec.head_dim
        self.payload_bytes = self._num_numbers + math.prod(self._rows) * _SCALE_BYTES

    def encode(self, block: BlockView, payload: Payload) -> None:
        parts = zip((block.keys, block.values), *self._parts(payload), strict=True)
        with np.errstate(all="ignore"):  # rows that were never written hold anything, NaN included
            for part, numbers, scales in parts:
                values = self._to_float(part)
                np.max(np.abs(values), axis=-1, out=scales)
                scales /= _INT8_MAX
                steps = np.where(scales == 0.0, np.float32(1.0), scales)[..., None]
                np.copyto(numbers, np.rint(values / steps).astype(np.int8))

    def decode(self, payload: Payload, block: BlockView) -> None:
        parts = zip((block.keys, block.values), *self._parts(payload), strict=True)
        with np.errstate(all="ignore"):
            for part, numbers, scales in parts:
                self._from_float(numbers.astype(np.float32) * scales[..., None], part)

    def clear_rows(self, payload: Payload, num_rows: int) -> None:
        for part in self._parts(payload):
            part[:, :, :, num_rows:] = 0

    def _parts(self, payload: Payload) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
        numbers = payload[: self._num_numbers].view(np.int8)
        scales = payload[self._num_numbers :].view(np.float32)
        return numbers.reshape(*self._rows, self._spec.head_dim), scales.reshape(self._rows)

    def _to_float(self, block: NDArray[np.uint8]) -> NDArray[np.float32]:
        block = np.ascontiguousarray(block)
        if self._spec.dtype == "bfloat16":  # the upper half of a float32, which numpy lacks
            return (block.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        numbers: NDArray[Any] = block.view(np.dtype(self._spec.dtype))
        return numbers.astype(np.float32)

    def _from_float(self, values: NDArray[np.float32], block: NDArray[np.uint8]) -> None:
        if self._spec.dtype == "bfloat16":
            bits = np.ascontiguousarray(values).view(np.uint32)
            rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
            np.copyto(block, rounded.view(np.uint8))
        else:
            numbers = values.astype(np.dtype(self._spec.dtype))
            np.copyto(block, numbers.view(np.uint8))
