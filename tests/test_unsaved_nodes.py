import pytest

from cache_store.events import Tier
from cache_store.radix_node import RadixNode, path_of
from cache_store.unsaved_nodes import UnsavedNodes
from tests.tier_kit import NAMESPACE, TierWorld, prompt, tokens

BASE = prompt(1, 2)
LEFT, RIGHT = tokens(BASE, prompt(2, 2)), tokens(BASE, prompt(3, 2))


def world_and_queue() -> tuple[TierWorld, UnsavedNodes]:
    world = TierWorld(64, num_host=64)
    for ids in (BASE, LEFT, RIGHT, prompt(4, 3)):
        world.store(ids)
    return world, UnsavedNodes(world.tree)


def end_of(world: TierWorld, ids: object) -> RadixNode:
    return world.path(ids)[-1]  # type: ignore[arg-type]


def starts(batch: list[RadixNode]) -> list[tuple[int, int]]:
    return [(node.start, node.num_blocks) for node in batch]


def test_a_path_is_taken_parents_first_and_once() -> None:
    world, queue = world_and_queue()
    for ids in (LEFT, RIGHT, LEFT):
        queue.add(end_of(world, ids))
    batch = queue.next_batch(64)
    assert starts(batch) == [(0, 2), (2, 2), (2, 2)]
    assert len(set(batch)) == 3
    assert not queue


@pytest.mark.parametrize("max_blocks", [1, 2, 3, 5])
def test_a_batch_is_no_larger_than_allowed_and_the_rest_stays(max_blocks: int) -> None:
    world, queue = world_and_queue()
    queue.add(end_of(world, LEFT))
    queue.add(end_of(world, prompt(4, 3)))
    saved: list[tuple[int, int]] = []
    number = 0
    while queue:
        batch = queue.next_batch(max_blocks)
        assert 0 < sum(node.num_blocks for node in batch) <= max_blocks
        for node in batch:
            parent = node.parent
            assert parent is not None
            assert parent.parent is None or parent.disk_ids is not None or parent in batch
            node.disk_ids = (node.block_ids or [])[:]  # type: ignore[assignment]
        saved += starts(batch)
        number += 1
    assert sum(num_blocks for _, num_blocks in saved) == 7
    assert number == -(-7 // max_blocks)


def test_what_is_on_disk_is_not_asked_for_again() -> None:
    world, queue = world_and_queue()
    base = path_of(end_of(world, LEFT))[0]
    base.disk_ids = base.block_ids
    queue.add(base)
    assert not queue
    queue.add(end_of(world, LEFT))
    assert starts(queue.next_batch(64)) == [(2, 2)]


def test_a_batch_is_of_one_tier() -> None:
    world, queue = world_and_queue()
    world.cache.demote(NAMESPACE, prompt(4, 3), 0)
    world.settle()
    queue.add(end_of(world, LEFT))
    queue.add(end_of(world, prompt(4, 3)))
    assert {node.tier for node in queue.next_batch(64)} == {Tier.DEVICE}
    assert {node.tier for node in queue.next_batch(64)} == {Tier.HOST}
    assert not queue


def test_what_a_transfer_has_waits_and_lets_others_pass() -> None:
    world, queue = world_and_queue()
    queue.add(end_of(world, LEFT))
    queue.add(end_of(world, prompt(4, 3)))
    world.cache.demote(NAMESPACE, LEFT, 8)
    assert starts(queue.next_batch(64)) == [(0, 2), (0, 3)]  # its parent goes ahead
    assert len(queue) == 1
    world.settle()
    batch = queue.next_batch(64)
    assert {node.tier for node in batch} <= {Tier.DEVICE}
    assert len(queue) == 1  # of another tier than the batch
    path_of(end_of(world, LEFT))[0].disk_ids = path_of(end_of(world, LEFT))[0].block_ids
    assert starts(queue.next_batch(64)) == [(2, 2)]


def test_what_left_the_tree_leaves_the_queue() -> None:
    world, queue = world_and_queue()
    queue.add(end_of(world, prompt(4, 3)))
    world.cache.drop(NAMESPACE, prompt(4, 3), 0)
    assert queue.next_batch(64) == []
    assert not queue
    world.check()


def test_roots_and_the_gone_are_not_taken() -> None:
    world, queue = world_and_queue()
    queue.add(world.tree.roots[NAMESPACE.root_hash])
    assert not queue


def test_the_oldest_are_forgotten_beyond_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    world, queue = world_and_queue()
    monkeypatch.setattr("cache_store.unsaved_nodes.MAX_NODES", 2)
    for ids in (prompt(4, 3), LEFT, RIGHT):
        queue.add(end_of(world, ids))
    assert len(queue) == 2
    assert starts(queue.next_batch(64)) == [(0, 2), (2, 2), (2, 2)]
