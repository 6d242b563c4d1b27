"""What a run of cache events comes to: which chunks are held now, which no more.

Owns the folding of events, in order, so that a store writes each chunk once. Knows no store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cache_store.block_hash import HASH_BYTES
from cache_store.events import BlockRemoved, BlockStored, CacheEvent, Tier

__all__ = ["ChunkChanges", "fold_events", "split_hashes"]


@dataclass(slots=True)
class ChunkChanges:
    """Clear first if asked to, then store and remove (no chunk is in both)."""

    is_cleared: bool = False
    stored: dict[bytes, Tier] = field(default_factory=dict)
    removed: dict[bytes, None] = field(default_factory=dict)  # ordered, unlike a set


def fold_events(events: Sequence[CacheEvent]) -> ChunkChanges:
    changes = ChunkChanges()
    for event in events:
        if isinstance(event, BlockStored):
            for chunk in split_hashes(event.block_hashes):
                changes.removed.pop(chunk, None)
                changes.stored[chunk] = event.tier
        elif isinstance(event, BlockRemoved):
            for chunk in split_hashes(event.block_hashes):
                changes.stored.pop(chunk, None)
                changes.removed[chunk] = None
        else:
            changes = ChunkChanges(is_cleared=True)
    return changes


def split_hashes(joined: bytes) -> Iterator[bytes]:
    """Hashes of 16 bytes each; an incomplete last one is left out."""
    for start in range(0, len(joined) - HASH_BYTES + 1, HASH_BYTES):
        yield joined[start : start + HASH_BYTES]
