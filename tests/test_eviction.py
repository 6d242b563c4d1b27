from array import array

import pytest

from cache_store.adaptive import AdaptivePolicy
from cache_store.block_hash import Namespace
from cache_store.events import Tier
from cache_store.eviction import EVICTION_POLICIES, EvictionQueue, make_eviction_policy
from cache_store.radix_node import RadixNode, RootNode
from cache_store.tenant_shares import TenantShare

OWNER = TenantShare("t", make_eviction_policy("lru"), [Tier.DEVICE])


def make_queue(policy: str) -> EvictionQueue:
    rules = make_eviction_policy(policy)
    assert not isinstance(rules, AdaptivePolicy)
    return EvictionQueue(rules, Tier.DEVICE, OWNER)


def make_leaves(count: int) -> list[RadixNode]:
    root = RootNode(Namespace("f").root_hash, 0, OWNER)
    return [make_child(root, index, index + 1) for index in range(count)]


def make_child(parent: RadixNode, block_id: int, created: int) -> RadixNode:
    child = RadixNode(parent, bytearray(block_id.to_bytes(4, "big")), 0, created, OWNER)
    child.block_ids = array("i", [block_id])
    parent.add_child(child)
    parent.count_child(Tier.DEVICE, 1)
    return child


def drain(queue: EvictionQueue) -> list[int]:
    order = []
    while (leaf := queue.pop()) is not None:
        order.append((leaf.block_ids or [])[0])
        leaf.parent = None
    return order


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fifo", [0, 1, 2, 3]),
        ("lru", [3, 1, 0, 2]),
        ("lfu", [1, 2, 3, 0]),
    ],
)
def test_order_of_each_policy(name: str, expected: list[int]) -> None:
    queue = make_queue(name)
    leaves = make_leaves(4)
    for leaf, last_access, num_hits in zip(leaves, (30, 20, 40, 10), (5, 0, 1, 2), strict=True):
        leaf.last_access, leaf.num_hits = last_access, num_hits
        queue.push(leaf)
    assert drain(queue) == expected


def test_a_leaf_touched_after_it_was_queued_moves_back() -> None:
    queue = make_queue("lru")
    leaves = make_leaves(3)
    for leaf in leaves:
        queue.push(leaf)
    leaves[0].last_access = 9
    assert drain(queue) == [1, 2, 0]


def test_locked_leaves_and_inner_nodes_are_passed_over_and_may_return() -> None:
    queue = make_queue("lru")
    leaves = make_leaves(3)
    for leaf in leaves:
        queue.push(leaf)
    leaves[0].lock_ref = 1
    make_child(leaves[1], 9, 9)
    assert drain(queue) == [2]
    leaves[0].lock_ref = 0
    queue.push(leaves[0])
    assert drain(queue) == [0]


def test_keys_that_arrive_out_of_order_come_out_in_order() -> None:
    queue = make_queue("fifo")
    leaves = make_leaves(50)
    for index in (7 * step % 50 for step in range(50)):
        queue.push(leaves[index])
    assert drain(queue) == list(range(50))


def test_a_leaf_that_is_put_back_is_the_next_again() -> None:
    queue = make_queue("lru")
    leaves = make_leaves(3)
    for leaf in reversed(leaves):
        queue.push(leaf)
    first = queue.pop()
    assert first is leaves[0]
    queue.put_back(first)
    assert drain(queue) == [0, 1, 2]


def test_a_node_has_one_entry() -> None:
    queue = make_queue("lru")
    (leaf,) = make_leaves(1)
    queue.push(leaf)
    queue.push(leaf)
    assert len(queue) == 1


def test_entries_of_dead_nodes_do_not_pile_up() -> None:
    queue = make_queue("lru")
    leaves = make_leaves(1000)
    for leaf in leaves:
        queue.push(leaf)
    for leaf in leaves[1:]:
        leaf.parent = None
        queue.forget(leaf)
    assert len(queue) <= 2 * EvictionQueue.MIN_DEAD + 1
    assert drain(queue) == [0]
    assert len(queue) == 0


def test_what_became_anothers_is_passed_over_and_not_counted_for_ever() -> None:
    queue = make_queue("lru")
    other = TenantShare("other", make_eviction_policy("lru"), [Tier.DEVICE])
    leaves = make_leaves(300)
    for leaf in leaves:
        queue.push(leaf)
    for leaf in leaves[1:]:
        leaf.owner = other
        queue.disown(leaf)
        assert not queue.holds(leaf)
        other.queues[Tier.DEVICE].push(leaf)
    assert len(queue) <= 2 * EvictionQueue.MIN_DEAD + 1
    assert drain(queue) == [0]
    assert len(queue) == 0
    assert other.queues[Tier.DEVICE].pop() is leaves[1]


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'mru' is none of lru, adaptive, lfu, fifo"):
        make_eviction_policy("mru")
    assert EVICTION_POLICIES == ("lru", "adaptive", "lfu", "fifo")
