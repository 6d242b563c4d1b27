"""What a cache tells others about its blocks: stored, removed, all gone.

Owns the event types and their granularity. Events are hints for routing, never proof: a reader may
have missed some, and a block may be gone before its event is read. Knows nothing of who listens.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

# Prefixes are located in steps of this many tokens: one event and one key of metadata for each,
# since a router gains nothing from telling apart prefixes that differ by less.
EVENT_CHUNK_TOKENS = 256


class Tier(StrEnum):
    """Where the keys and values of a block are, the quickest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"

    def is_below(self, other: Tier) -> bool:
        """Whether it is the slower one."""
        return _RANKS[self] > _RANKS[other]


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """``block_hashes`` (16 bytes each, joined) name the last blocks of chunks; everything before
    such a block is stored too. ``tier`` is the quickest that holds the block now: a later event
    for the same block replaces an earlier one."""

    tier: Tier
    block_hashes: bytes


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """These chunks, and so everything after them, are stored no more in any tier."""

    block_hashes: bytes


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    pass


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


# Told of every block, for those who follow a cache closely; a block may have a copy in each tier.


class CopyStored(msgspec.Struct, frozen=True, gc=False):
    """``tier`` has a copy of these full blocks (16 bytes each, joined), which follow one another
    behind ``parent_hash``: that of a block, or empty where they begin a prompt."""

    tier: Tier
    parent_hash: bytes
    block_hashes: bytes


class CopyRemoved(msgspec.Struct, frozen=True, gc=False):
    """``tier`` has these no more. They need not follow one another."""

    tier: Tier
    block_hashes: bytes


CopyEvent = CopyStored | CopyRemoved

_RANKS = {tier: rank for rank, tier in enumerate(Tier)}
