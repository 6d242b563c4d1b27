"""How the stream of block events looks on the wire: as vLLM's, so that its routers can read it.

Owns the form of a batch (vllm.distributed.kv_events, as published since vLLM 0.24: an array of
time, events and rank, each event a map with its type and its fields by name). Token ids are left
out: they are what a user wrote, and the stream is open to whoever can reach it. Knows nothing of
sockets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec
import numpy as np

from cache_store.block_hash import HASH_BYTES
from cache_store.events import AllBlocksCleared, CopyEvent, CopyRemoved, CopyStored, Tier

__all__ = ["MEDIA", "StreamEvent", "encode_batch", "wire_hashes"]

StreamEvent = CopyEvent | AllBlocksCleared

# What vLLM calls the places that blocks are in, whatever the device is.
MEDIA: Mapping[Tier, str] = MappingProxyType(
    {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.DISK: "STORAGE"}
)
_WORDS = HASH_BYTES // 8


class _Stored(msgspec.Struct, frozen=True, tag="BlockStored", gc=False):
    """vLLM's decoder wants every one of these fields; what is not said is None or empty."""

    block_hashes: list[int]
    parent_block_hash: int | None
    block_size: int  # tokens
    medium: str
    token_ids: tuple[int, ...] = ()
    lora_id: int | None = None
    lora_name: str | None = None


class _Removed(msgspec.Struct, frozen=True, tag="BlockRemoved", gc=False):
    block_hashes: list[int]
    medium: str


class _Cleared(msgspec.Struct, frozen=True, tag="AllBlocksCleared", gc=False):
    pass


class _Batch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    ts: float
    events: list[_Stored | _Removed | _Cleared]
    data_parallel_rank: int = 0


_encoder = msgspec.msgpack.Encoder()


def encode_batch(at_s: float, events: Sequence[StreamEvent], block_size: int) -> bytes:
    """As MessagePack. ``at_s``: seconds since 1970."""
    return _encoder.encode(_Batch(at_s, [_wire_event(event, block_size) for event in events]))


def wire_hashes(joined: bytes) -> list[int]:
    """Of block hashes, joined: the last 8 bytes of each, big-endian, which is what vLLM makes of
    its own. Enough to find a block by; nobody is to trust it as proof."""
    words: list[int] = np.frombuffer(joined, ">u8")[_WORDS - 1 :: _WORDS].tolist()
    return words


def _wire_event(event: StreamEvent, block_size: int) -> _Stored | _Removed | _Cleared:
    match event:
        case CopyStored(tier, parent_hash, joined):
            parent = wire_hashes(parent_hash)
            return _Stored(
                wire_hashes(joined), parent[0] if parent else None, block_size, MEDIA[tier]
            )
        case CopyRemoved(tier, joined):
            return _Removed(wire_hashes(joined), MEDIA[tier])
        case AllBlocksCleared():
            return _Cleared()
