"""What a start can use of the records found on disk, and in which order.

Owns the choice among what a scan found: one record per key, only what hangs together from a root,
and no more than there is room for. Pure: it reads no file.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from cache_store.tiers.disk_segment import Record
from cache_store.transfer import BlockKey


@dataclass(frozen=True, slots=True)
class FoundBlock:
    """A block on disk. ``stored_at`` is in seconds since the epoch; ``ref`` is the store's own
    name of the record until it is adopted or discarded."""

    key: BlockKey
    stored_at: float
    ref: Record


def choose(
    found: Sequence[FoundBlock], own: set[Record], block_tokens: int, limit: int
) -> list[FoundBlock]:
    """The blocks to keep, parents before their children, at most ``limit``.

    Of records with one key the one in ``own`` stays, and among those the newest. A block whose
    parent is not there can never be matched and goes. Where there are too many, what was stored
    longest ago goes first, a block never before its children. ``block_tokens`` is the number of
    bytes of a full block's token ids: only such a block has children.
    """
    newest: dict[BlockKey, FoundBlock] = {}
    for block in found:
        rival = newest.get(block.key)
        if rival is None or _rank(block, own) > _rank(rival, own):
            newest[block.key] = block
    ordered = _from_roots(list(newest.values()), block_tokens)
    if len(ordered) <= limit:
        return ordered
    recency = _recency(ordered)
    by_recency = sorted(range(len(ordered)), key=lambda i: (-recency[i], i))
    return [ordered[index] for index in sorted(by_recency[:limit])]


def _rank(block: FoundBlock, own: set[Record]) -> tuple[bool, float]:
    return (block.ref in own, block.stored_at)


def _from_roots(blocks: Sequence[FoundBlock], block_tokens: int) -> list[FoundBlock]:
    """Those that hang together from a root, level by level.

    Two full blocks with one hash but other tokens (a forged collision, or a damaged disk) have no
    children: whose they are, the hash does not say.
    """
    children: dict[tuple[bytes, bytes], list[FoundBlock]] = defaultdict(list)
    namesakes: Counter[tuple[bytes, bytes]] = Counter()
    for block in blocks:
        key = block.key
        children[key.root_hash, key.parent_hash].append(block)
        namesakes[key.root_hash, key.block_hash] += len(key.tokens) == block_tokens
    roots = [(root, parent) for root, parent in children if root == parent]
    level = [block for root in roots for block in children.pop(root)]
    ordered: list[FoundBlock] = []
    while level:
        ordered += level
        names = [
            (block.key.root_hash, block.key.block_hash)
            for block in level
            if len(block.key.tokens) == block_tokens
        ]
        # taken out as they are found, so that no loop of hashes can go round
        level = [
            child for name in names if namesakes[name] == 1 for child in children.pop(name, ())
        ]
    return ordered


def _recency(ordered: Sequence[FoundBlock]) -> list[float]:
    """Of each block the time at which it or anything below it was stored last."""
    place = {(b.key.root_hash, b.key.block_hash): index for index, b in enumerate(ordered)}
    recency = [block.stored_at for block in ordered]
    for index in range(len(ordered) - 1, -1, -1):
        key = ordered[index].key
        parent = place.get((key.root_hash, key.parent_hash))
        if parent is not None and parent < index:
            recency[parent] = max(recency[parent], recency[index])
    return recency
