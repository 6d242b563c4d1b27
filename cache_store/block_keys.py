"""The names that the blocks of a node bear where they are kept outside of the tree."""

from __future__ import annotations

from collections.abc import Iterator

from cache_store.block_hash import HASH_BYTES
from cache_store.radix_node import RadixNode, path_of
from cache_store.radix_tree import RadixTree
from cache_store.transfer import BlockKey


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
