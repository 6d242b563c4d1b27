"""Assertions over the whole cache: every block has one owner, every count is true.

Owns no state. Walks everything, so it is for tests and idle moments, never for a hot path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from cache_store.block_hash import HASH_BYTES, chain_hashes
from cache_store.block_pool import BlockPool
from cache_store.radix_node import RadixNode, RootNode
from cache_store.radix_tree import RadixTree
from cache_store.token_bytes import TOKEN_BYTES


def check_ownership(pool: BlockPool, owned: Sequence[int], private: Sequence[int]) -> None:
    """Assert that each block is free, private to one lease, or owned by the tree once."""
    pool.check_integrity()
    held = [*owned, *private]
    assert len(set(held)) == len(held), "a block has two owners"
    assert not any(pool.is_free(block_id) for block_id in held), "a block in use is free"
    assert len(held) + pool.num_free == pool.num_blocks, "a block was lost"


def check_tree(tree: RadixTree, locks: Mapping[RadixNode, int]) -> list[int]:
    """Assert the tree's structure and counts; the blocks it owns.

    ``locks`` says how often each node was locked by somebody (not counting those below it).
    """
    expected_locks = _path_locks(locks)
    owned: list[int] = []
    num_evictable = 0
    entries = {id(node): key for key, node in tree.queue}
    assert len(entries) == len(tree.queue), "a node is queued twice"
    stack: list[tuple[RadixNode, bytes]] = []
    for namespace, root in tree.roots.items():
        assert root.namespace == namespace, "a root under another namespace"
        assert root.children is not None or root.lock_ref, "an unused root was kept"
        stack.append((root, namespace.root_hash))
    while stack:
        node, parent_hash = stack.pop()
        assert node.lock_ref == expected_locks.pop(node, 0), "lock_ref is not what leases hold"
        if not isinstance(node, RootNode):
            parent_hash = _check_edge(tree, node, parent_hash)
            owned += node.block_ids
            num_evictable += node.num_blocks if node.lock_ref == 0 else 0
        if node.is_evictable_leaf():
            assert node.is_queued, "an evictable leaf is not queued"
            assert entries[id(node)] <= tree.queue.policy.key(node), "a queued key is too large"
        assert node.is_queued == (id(node) in entries), "a node's queue mark is wrong"
        children = _checked_children(node, tree.block_size * TOKEN_BYTES)
        stack.extend((child, parent_hash) for child in children)
    assert not expected_locks, "a lease holds a node that is not in the tree"
    assert tree.num_cached == len(owned), "cached blocks miscounted"
    assert tree.num_evictable == num_evictable, "evictable blocks miscounted"
    return owned


def _path_locks(locks: Mapping[RadixNode, int]) -> dict[RadixNode, int]:
    expected: dict[RadixNode, int] = {}
    for locked, count in locks.items():
        node: RadixNode | None = locked
        while node is not None:
            expected[node] = expected.get(node, 0) + count
            node = node.parent
    return expected


def _check_edge(tree: RadixTree, node: RadixNode, parent_hash: bytes) -> bytes:
    """Assert one edge's form and its block hashes; the hash at its end."""
    block_bytes = tree.block_size * TOKEN_BYTES
    assert node.num_blocks > 0, "an edge without blocks"
    if len(node.tokens) < block_bytes:
        assert node.num_blocks == 1, "a partial leaf of several blocks"
        assert node.tokens, "a partial leaf without tokens"
        assert len(node.tokens) % TOKEN_BYTES == 0, "half a token"
        assert node.children is None, "a partial leaf with children"
        return parent_hash
    assert len(node.tokens) == node.num_blocks * block_bytes, "tokens and blocks disagree"
    hashes = chain_hashes(parent_hash, node.tokens, tree.block_size)
    stored = [tree.block_hash(block_id) for block_id in node.block_ids]
    assert list(hashes) == stored, "a block is stored under another hash"
    assert len(hashes[0]) == HASH_BYTES, "a hash of the wrong size"
    return hashes[len(hashes) - 1]


def _checked_children(node: RadixNode, block_bytes: int) -> list[RadixNode]:
    """The children, asserted to be in order and to differ in their first block."""
    children = [] if node.children is None else list(node.children)
    assert node.children is None or children, "an empty list of children was kept"
    for child in children:
        assert child.parent is node, "a child has another parent"
        assert node.children is not None
        assert node.children.neighbours(child.tokens)[1] is child, "a child cannot be found"
    for left, right in pairwise(children):
        assert left.tokens < right.tokens, "children out of order"
        assert left.tokens[:block_bytes] != right.tokens[:block_bytes], "children share a block"
    return children
