from __future__ import annotations

from array import array

import pytest

from cache_store.block_hash import Namespace
from cache_store.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent, Tier
from cache_store.eviction import make_eviction_policy
from cache_store.radix_node import RadixNode, RootNode
from cache_store.residency import MAX_EVENTS, Residency

CAPACITIES = {Tier.DEVICE: 20, Tier.HOST: 20, Tier.DISK: 20}


def make(event_blocks: int = 0) -> tuple[Residency, RootNode]:
    residency = Residency(CAPACITIES, make_eviction_policy("lru"), lambda: 0, event_blocks)
    return residency, RootNode(Namespace("f").root_hash, 0, residency.shares.nobody)


def add_node(residency: Residency, parent: RadixNode, first: int, count: int = 1) -> RadixNode:
    """A node on the device whose block ids, and the first bytes of their hashes, count up."""
    tokens = bytearray(b"".join(bytes([first + i]) * 16 for i in range(count)))
    node = RadixNode(parent, tokens, parent.start + parent.num_blocks, first, parent.owner)
    ids = array("i", range(first, first + count))
    joined = b"".join(hash_of(i) for i in ids)
    residency.set_hashes(Tier.DEVICE, ids, joined)
    residency.add_copy(node, Tier.DEVICE, ids)
    parent.add_child(node)
    return node


def hash_of(number: int) -> bytes:
    return bytes([number]) * 16


def ids(*numbers: int) -> array[int]:
    return array("i", numbers)


def test_a_copy_bears_the_hashes_of_the_first() -> None:
    residency, root = make()
    node = add_node(residency, root, 3, 2)
    residency.add_copy(node, Tier.HOST, ids(8, 5))
    residency.add_copy(node, Tier.DISK, ids(0, 1))
    assert residency.block_hash(Tier.HOST, 5) == residency.block_hash(Tier.DISK, 1) == hash_of(4)
    residency.drop_copy(node, Tier.DEVICE)
    assert residency.hashes_of(node) == hash_of(3) + hash_of(4)
    residency.drop_copy(node, Tier.HOST)
    assert residency.last_hash(node) == hash_of(4)


def test_counts_follow_the_copies() -> None:
    residency, root = make()
    node = add_node(residency, root, 3, 2)
    assert residency.num_cached == {Tier.DEVICE: 2, Tier.HOST: 0, Tier.DISK: 0}
    assert (residency.num_evictable, root.num_device_children) == (2, 1)
    residency.add_copy(node, Tier.HOST, ids(8, 5))
    residency.drop_copy(node, Tier.DEVICE)
    assert residency.num_cached == {Tier.DEVICE: 0, Tier.HOST: 2, Tier.DISK: 0}
    assert residency.num_evictable == 0
    assert (root.num_device_children, root.num_host_children) == (0, 1)
    assert residency.take_given_up(Tier.DEVICE).tolist() == [3, 4]
    assert residency.take_given_up(Tier.DEVICE).tolist() == []
    residency.drop_copy(node, Tier.HOST)
    assert residency.num_given_up(Tier.HOST) == 2
    assert (root.num_device_children, root.num_host_children) == (0, 0)


def test_two_copies_in_one_tier_are_an_error() -> None:
    residency, root = make()
    node = add_node(residency, root, 3)
    with pytest.raises(AssertionError, match="one copy in a tier"):
        residency.add_copy(node, Tier.DEVICE, ids(9))
    with pytest.raises(AssertionError, match="no copy to give up"):
        residency.drop_copy(node, Tier.HOST)


def test_a_parent_may_leave_once_its_last_child_has() -> None:
    residency, root = make()
    parent = add_node(residency, root, 1)
    children = [add_node(residency, parent, 2), add_node(residency, parent, 3)]
    queue = residency.shares.nobody.queues[Tier.DEVICE]
    assert [queue.pop(), queue.pop(), queue.pop()] == [*children, None]
    for number, child in enumerate(children):
        residency.add_copy(child, Tier.HOST, ids(number))
        residency.drop_copy(child, Tier.DEVICE)
    assert queue.pop() is parent
    host = residency.shares.nobody.queues[Tier.HOST]
    assert [host.pop(), host.pop(), host.pop()] == [*children, None]


def test_a_parent_in_the_host_waits_for_its_children_there() -> None:
    residency, root = make()
    parent = add_node(residency, root, 1)
    child = add_node(residency, parent, 2)
    for node, block_id in ((child, 2), (parent, 1)):
        residency.add_copy(node, Tier.HOST, ids(block_id))
        residency.drop_copy(node, Tier.DEVICE)
    assert not parent.is_evictable_from(Tier.HOST)
    residency.add_copy(child, Tier.DISK, ids(2))
    residency.drop_copy(child, Tier.HOST)
    assert parent.is_evictable_from(Tier.HOST)
    assert residency.shares.nobody.queues[Tier.HOST].pop() is parent
    assert child.is_evictable_from(Tier.DISK)


def test_spares_are_what_has_a_quicker_copy_the_oldest_first() -> None:
    residency, root = make()
    nodes = [add_node(residency, root, number) for number in (1, 2, 3)]
    for node, block_id in zip(nodes, (7, 8, 9), strict=True):
        residency.add_copy(node, Tier.HOST, ids(block_id))
    residency.drop_copy(nodes[0], Tier.DEVICE)  # now the quickest there is
    assert residency.pop_spare(Tier.HOST) is nodes[1]
    residency.drop_copy(nodes[1], Tier.HOST)
    assert residency.pop_spare(Tier.HOST) is nodes[2]
    assert residency.pop_spare(Tier.HOST) is None
    residency.add_copy(nodes[0], Tier.DEVICE, ids(11))
    assert residency.pop_spare(Tier.HOST) is nodes[0]


def test_a_copy_below_the_quickest_is_a_spare_whenever_it_came() -> None:
    residency, root = make()
    node = add_node(residency, root, 1)
    residency.add_copy(node, Tier.DISK, ids(4))
    residency.add_copy(node, Tier.HOST, ids(5))
    residency.drop_copy(node, Tier.DEVICE)
    assert residency.pop_spare(Tier.HOST) is None
    assert residency.pop_spare(Tier.DISK) is node


def test_spares_that_move_up_and_down_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Residency, "MIN_STALE_SPARES", 8)
    residency, root = make()
    node = add_node(residency, root, 1)
    residency.add_copy(node, Tier.HOST, ids(4))
    for _ in range(50):
        residency.drop_copy(node, Tier.DEVICE)
        residency.add_copy(node, Tier.DEVICE, ids(1))
    assert len(residency._spares[Tier.HOST]) <= 9
    assert residency.pop_spare(Tier.HOST) is node


# ------------------------------------------------------------ events


def told(residency: Residency) -> list[CacheEvent]:
    return residency.take_events()


def test_the_last_block_of_each_chunk_is_told() -> None:
    residency, root = make(event_blocks=2)
    first = add_node(residency, root, 1, 3)
    assert told(residency) == [BlockStored(Tier.DEVICE, hash_of(2))]
    add_node(residency, first, 4, 3)
    assert told(residency) == [BlockStored(Tier.DEVICE, hash_of(4) + hash_of(6))]
    assert told(residency) == []


def test_a_move_is_told_and_a_spare_is_nobodys_news() -> None:
    residency, root = make(event_blocks=1)
    node = add_node(residency, root, 1)
    told(residency)
    residency.add_copy(node, Tier.HOST, ids(4))
    assert told(residency) == []
    residency.drop_copy(node, Tier.DEVICE)
    assert told(residency) == [BlockStored(Tier.HOST, hash_of(1))]
    residency.add_copy(node, Tier.DEVICE, ids(9))
    assert told(residency) == [BlockStored(Tier.DEVICE, hash_of(1))]
    residency.drop_copy(node, Tier.HOST)
    assert told(residency) == []
    residency.drop_copy(node, Tier.DEVICE)
    assert told(residency) == [BlockRemoved(hash_of(1))]


def test_what_is_added_and_trimmed_at_an_end_is_told() -> None:
    residency, root = make(event_blocks=2)
    node = add_node(residency, root, 1, 3)
    told(residency)
    residency.set_hashes(Tier.DEVICE, ids(4, 5), hash_of(4) + hash_of(5))
    node.tokens += bytes(32)
    residency.extend(node, [4, 5])
    assert told(residency) == [BlockStored(Tier.DEVICE, hash_of(4))]
    residency.trim(node, 2, 32)
    assert told(residency) == [BlockRemoved(hash_of(4))]
    assert residency.take_given_up(Tier.DEVICE).tolist() == [4, 5]
    assert (node.num_blocks, len(node.tokens)) == (3, 48)


def test_events_that_nobody_takes_end_in_a_clearing() -> None:
    residency, root = make(event_blocks=1)
    node = add_node(residency, root, 1)
    for _ in range(MAX_EVENTS):
        residency.add_copy(node, Tier.HOST, ids(2))
        residency.drop_copy(node, Tier.DEVICE)
        residency.add_copy(node, Tier.DEVICE, ids(1))
        residency.drop_copy(node, Tier.HOST)
    events = told(residency)
    assert len(events) <= MAX_EVENTS
    assert events[0] == AllBlocksCleared()
    assert residency.snapshot([node]) == [
        AllBlocksCleared(),
        BlockStored(Tier.DEVICE, hash_of(1)),
    ]
