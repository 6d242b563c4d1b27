"""Builds the tree again from blocks that were found on disk.

Owns how single blocks become edges. Knows nothing of files: whoever read them says what each is.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from cache_store.block_hash import chain_hashes
from cache_store.block_pool import BlockPool
from cache_store.radix_node import RadixNode
from cache_store.radix_tree import RadixTree
from cache_store.transfer import BlockKey

_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """``stored_at`` in seconds since 1970."""

    key: BlockKey
    stored_at: float


@dataclass(slots=True)
class _Run:
    """Blocks that follow each other and have nothing else in between: one edge."""

    parent: _Run | bytes  # or the namespace's root hash
    numbers: list[int] = field(default_factory=list)
    node: RadixNode | None = None


def restore_blocks(
    tree: RadixTree, pool: BlockPool, found: Sequence[StoredBlock]
) -> list[int | None]:
    """The disk id that each block got, None for what is of no use: one without its parent, one
    that is not what its hash says, and what is beyond the pool.

    ``found`` has parents before children.
    """
    ids: list[int | None] = [None] * len(found)
    for run in _runs(tree, found, pool.num_free):
        encoded = b"".join(found[number].key.tokens for number in run.numbers)
        hashes = b"".join(found[number].key.block_hash for number in run.numbers)
        parent = run.parent if isinstance(run.parent, bytes) else run.parent.node
        if parent is None:
            continue
        run_ids = pool.allocate(len(run.numbers))
        newest = max(found[number].stored_at for number in run.numbers)
        disk_ids = array("i", run_ids)
        run.node = tree.restore(parent, encoded, disk_ids, hashes, int(newest * _NS_PER_S))
        if run.node is None:
            pool.free(run_ids)
            continue
        for number, disk_id in zip(run.numbers, run_ids, strict=True):
            ids[number] = disk_id
    return ids


def _runs(tree: RadixTree, found: Sequence[StoredBlock], num_blocks: int) -> list[_Run]:
    """Edges in an order in which parents come first, of at most ``num_blocks`` blocks."""
    num_children = Counter((each.key.root_hash, each.key.parent_hash) for each in found)
    run_of: dict[tuple[bytes, bytes], _Run] = {}
    runs: list[_Run] = []
    for number, each in enumerate(found[:num_blocks]):
        key = each.key
        if not _is_itself(tree, key):
            continue
        before = (key.root_hash, key.parent_hash)
        is_full = len(key.tokens) == tree.block_bytes
        if is_full and (key.root_hash, key.block_hash) in run_of:
            continue  # once more
        run = run_of.get(before)
        if run is None and key.parent_hash != key.root_hash:
            continue
        if run is None or num_children[before] > 1 or not is_full:
            run = _Run(key.root_hash if run is None else run)
            runs.append(run)
        run.numbers.append(number)
        if is_full:
            run_of[key.root_hash, key.block_hash] = run
    return runs


def _is_itself(tree: RadixTree, key: BlockKey) -> bool:
    if not 0 < len(key.tokens) <= tree.block_bytes:
        return False
    hashes = chain_hashes(key.parent_hash, key.tokens, tree.block_size)
    return len(hashes) == 1 and hashes[0] == key.block_hash
