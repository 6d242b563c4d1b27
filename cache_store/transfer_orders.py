"""From nodes of the tree to the order that copies them.

Owns the flat lists of ids and keys that an executor is given. Knows nothing of why nodes move.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from cache_store.block_hash import HASH_BYTES
from cache_store.events import Tier
from cache_store.radix_node import RadixNode, path_of
from cache_store.radix_tree import RadixTree
from cache_store.transfer import BlockKey, TransferOrder


def make_order(
    tree: RadixTree,
    number: int,
    source: Tier,
    target: Tier,
    nodes: Sequence[RadixNode],
    target_ids: Sequence[int],
) -> TransferOrder:
    """Copy the blocks of ``nodes``, in this order, to ``target_ids``."""
    source_ids: list[int] = []
    for node in nodes:
        ids = node.ids_in(source)
        assert ids is not None, "nothing to copy there"
        source_ids.extend(ids)
    has_keys = Tier.DISK in (source, target)
    keys = [key for node in nodes for key in block_keys(tree, node)] if has_keys else []
    return TransferOrder(number, source, target, source_ids, target_ids, keys)


def divide(ids: Sequence[int], nodes: Sequence[RadixNode]) -> dict[RadixNode, array[int]]:
    """The part of ``ids`` that is each node's, in their order."""
    parts: dict[RadixNode, array[int]] = {}
    start = 0
    for node in nodes:
        parts[node] = array("i", ids[start : start + node.num_blocks])
        start += node.num_blocks
    return parts


def block_keys(tree: RadixTree, node: RadixNode) -> Iterator[BlockKey]:
    """One for each block of ``node``, in order."""
    root, parent = path_of(node)[0].parent, node.parent
    assert root is not None
    assert parent is not None
    root_hash, parent_hash = tree.end_hash(root), tree.end_hash(parent)
    hashes = tree.residency.hashes_of(node)
    step = tree.block_bytes
    for index in range(node.num_blocks):
        block_hash = hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]
        tokens = bytes(node.tokens[index * step : (index + 1) * step])
        yield BlockKey(root_hash, parent_hash, block_hash, tokens)
        parent_hash = block_hash
