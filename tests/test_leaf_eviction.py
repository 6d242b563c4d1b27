"""Room on a device without a tier below it: which leaves go, how much of the last, who is told."""

from __future__ import annotations

from array import array

import numpy as np

from cache_store.block_hash import Namespace, hash_blocks
from cache_store.events import BlockRemoved, Tier
from cache_store.eviction import make_eviction_policy
from cache_store.integrity import check_tree
from cache_store.leaf_eviction import evict_leaves
from cache_store.prefix_match import PrefixMatch
from cache_store.radix_node import RadixNode
from cache_store.radix_tree import RadixTree
from cache_store.token_bytes import TokenIds, encode_tokens

BLOCK = 4
NAMESPACE = Namespace("leaf-eviction")


def make_tree(event_blocks: int = 0) -> RadixTree:
    return RadixTree(
        {Tier.DEVICE: 100}, BLOCK, make_eviction_policy("lru"), event_blocks=event_blocks
    )


def ids(*values: int) -> TokenIds:
    """Four tokens of each value: a block of each."""
    return np.repeat(np.array(values, dtype=np.int32), BLOCK)


def match(tree: RadixTree, token_ids: TokenIds) -> PrefixMatch:
    return tree.match_prefix(NAMESPACE, token_ids)


def store(tree: RadixTree, token_ids: TokenIds, block_ids: list[int]) -> RadixNode:
    """The end of the stored path, idle; ``block_ids`` for what is not stored yet."""
    prefix = tree.acquire(match(tree, token_ids))
    start = len(token_ids) // BLOCK - len(block_ids)
    encoded = encode_tokens(token_ids[start * BLOCK :])
    end = tree.insert(prefix.node, encoded, block_ids).node
    tree.touch(end)
    tree.unlock(end)
    return end


def gone(tree: RadixTree) -> list[int]:
    return tree.residency.take_given_up(Tier.DEVICE).tolist()


def test_leaves_go_in_the_order_of_their_last_use() -> None:
    tree = make_tree()
    for value in (1, 2, 3):
        store(tree, ids(value, value + 10), [value, value + 10])
    tree.unlock(tree.acquire(match(tree, ids(1, 11))).node)
    assert evict_leaves(tree, 4) == 4
    assert gone(tree) == [2, 12, 3, 13]
    assert evict_leaves(tree, 2) == 2
    assert gone(tree) == [1, 11]


def test_of_the_last_leaf_only_what_is_wanted_goes_and_its_rest_is_the_next() -> None:
    tree = make_tree()
    store(tree, ids(1, 2, 3), [1, 2, 3])
    store(tree, ids(4, 5), [4, 5])
    assert evict_leaves(tree, 2) == 2
    assert gone(tree) == [2, 3]
    assert match(tree, ids(1, 2, 3)).num_tokens == BLOCK
    assert evict_leaves(tree, 2) == 2
    assert gone(tree) == [1, 5]
    check_tree(tree, {})


def test_a_parent_goes_after_its_last_child_and_a_root_that_nothing_needs_with_it() -> None:
    tree = make_tree()
    store(tree, ids(1, 2), [1, 2])
    store(tree, ids(1, 3), [3])
    assert evict_leaves(tree, 10) == 3
    assert gone(tree)[-1] == 1
    assert tree.roots == {}
    assert tree.residency.num_evictable == tree.residency.num_cached[Tier.DEVICE] == 0


def test_what_is_locked_stays_and_less_than_wanted_goes() -> None:
    tree = make_tree()
    store(tree, ids(1, 2), [1, 2])
    store(tree, ids(1, 3), [3])
    held = tree.acquire(match(tree, ids(1, 2)))
    assert evict_leaves(tree, 3) == 1
    assert gone(tree) == [3]
    check_tree(tree, {held.node: 1})


def test_nothing_is_asked_for_and_nothing_goes() -> None:
    tree = make_tree()
    store(tree, ids(1), [1])
    assert evict_leaves(tree, 0) == evict_leaves(tree, -3) == 0
    assert tree.residency.take_given_up(Tier.DEVICE) == array("i")


def test_listeners_are_told_what_is_stored_no_more() -> None:
    tree = make_tree(event_blocks=2)
    store(tree, ids(1, 2, 3, 4), [1, 2, 3, 4])
    tree.residency.take_events()
    assert evict_leaves(tree, 1) == 1
    hashes = hash_blocks(NAMESPACE, ids(1, 2, 3, 4), BLOCK)
    assert tree.residency.take_events() == [BlockRemoved(hashes[3])]
    assert evict_leaves(tree, 3) == 3
    assert tree.residency.take_events() == [BlockRemoved(hashes[1])]


def test_an_evicted_match_is_outdated() -> None:
    tree = make_tree()
    store(tree, ids(1), [1])
    before = match(tree, ids(1))
    assert tree.current(before) is before
    evict_leaves(tree, 1)
    assert tree.current(before).num_tokens == 0
