from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_store.block_hash import Namespace
from cache_store.events import Tier
from cache_store.restore import StoredBlock
from cache_store.transfer_orders import block_keys
from tests.tier_kit import NAMESPACE, TierWorld, prompt, tokens

OTHER = Namespace("f", cache_salt="s")


def stored_blocks(world: TierWorld) -> list[StoredBlock]:
    """What a disk that holds all of the tree would find, parents before children."""
    keys = [key for node in world.tree.nodes() for key in block_keys(world.tree, node)]
    return [StoredBlock(key, float(number)) for number, key in enumerate(keys)]


def restored(found: list[StoredBlock], num_disk: int = 64) -> tuple[TierWorld, list[int | None]]:
    world = TierWorld(64, num_disk=num_disk)
    ids = world.cache.restore(found)
    world.check()
    taken = [block_id for block_id in ids if block_id is not None]
    assert len(set(taken)) == len(taken) == world.num_cached(Tier.DISK)
    assert world.num_free(Tier.DISK) == num_disk - len(taken)
    return world, ids


def blocks_of(*prompts: np.ndarray) -> list[StoredBlock]:
    world = TierWorld(64)
    for ids in prompts:
        world.store(ids)
    return stored_blocks(world)


@settings(max_examples=80, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=1, max_size=8),
    probes=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=26), max_size=5),
    salted=st.sets(st.integers(0, 7)),
)
def test_a_restored_tree_gives_the_same_matches(
    prompts: list[list[int]], probes: list[list[int]], salted: set[int]
) -> None:
    before = TierWorld(200)
    for number, ids in enumerate(prompts):
        array = tokens(ids)
        lease = before.cache.acquire(
            before.cache.match(OTHER if number in salted else NAMESPACE, array)
        )
        assert before.cache.allocate(lease, len(array))
        if lease.pending_copy is not None:
            before.cache.copied(lease)
        before.cache.release(lease, array, len(array))
    found = stored_blocks(before)
    after, restored_ids = restored(found, num_disk=200)
    assert None not in restored_ids
    for ids in (*prompts, *probes):
        for namespace in (NAMESPACE, OTHER):
            known = before.cache.match(namespace, tokens(ids))
            match = after.cache.match(namespace, tokens(ids))
            assert match.num_tokens == known.num_tokens
            assert match.num_disk_tokens == match.num_block_tokens == known.num_block_tokens
    assert after.cache.restore(found) == [None] * len(found)  # all is there already


def test_ids_are_those_under_which_blocks_are_loaded() -> None:
    ids = prompt(1, 4)
    world, disk_ids = restored(blocks_of(ids))
    lease = world.start(tokens(ids, 5))
    (order,) = world.executor.orders
    assert list(order.source_ids) == disk_ids
    assert [key.tokens for key in order.keys] == [each.key.tokens for each in blocks_of(ids)]
    world.settle()
    assert lease.num_disk_tokens == 16
    world.end(lease, tokens(ids, 5))


def test_blocks_without_their_parent_are_of_no_use() -> None:
    found = blocks_of(prompt(1, 4))
    world, ids = restored([found[0], found[2], found[3]])
    assert [block_id is None for block_id in ids] == [False, True, True]
    assert world.cache.match(NAMESPACE, prompt(1, 4)).num_tokens == 4


def test_children_that_come_before_their_parent_are_orphans() -> None:
    found = blocks_of(prompt(1, 2))
    _, ids = restored(found[::-1])
    assert [block_id is None for block_id in ids] == [True, False]


def test_a_block_that_is_there_twice_costs_nothing_but_itself() -> None:
    found = blocks_of(prompt(1, 4))
    twice = [found[0], found[1], found[1], found[0], found[2], found[2], found[3]]
    world, ids = restored(twice)
    assert [block_id is None for block_id in ids] == [False, False, True, True, False, True, False]
    assert world.cache.match(NAMESPACE, prompt(1, 4)).num_tokens == 16


def test_a_partly_filled_block_that_is_there_twice() -> None:
    found = blocks_of(tokens(prompt(1, 1), 7, 8))
    assert len(found) == 2
    world, ids = restored([*found, found[1]])
    assert [block_id is None for block_id in ids] == [False, False, True]
    assert world.cache.match(NAMESPACE, tokens(prompt(1, 1), 7, 8, 9)).num_tokens == 6


def test_a_block_that_is_not_what_its_hash_says_is_left_out_with_all_below() -> None:
    found = blocks_of(prompt(1, 4))
    wrong = replace(found[1].key, tokens=found[2].key.tokens)
    world, ids = restored([found[0], StoredBlock(wrong, 0.0), found[2], found[3]])
    assert [block_id is None for block_id in ids] == [False, True, True, True]
    assert world.cache.match(NAMESPACE, prompt(1, 4)).num_tokens == 4


def test_blocks_of_another_size_are_left_out() -> None:
    key = blocks_of(prompt(1, 1))[0].key
    for tokens_of in (b"", key.tokens * 2, key.tokens[:-2]):
        _, ids = restored([StoredBlock(replace(key, tokens=tokens_of), 0.0)])
        assert ids == [None]


def test_a_block_of_another_namespace_is_no_parent() -> None:
    found = blocks_of(prompt(1, 2))
    moved = replace(found[1].key, root_hash=OTHER.root_hash)
    _, ids = restored([found[0], StoredBlock(moved, 0.0)])
    assert [block_id is None for block_id in ids] == [False, True]


def test_what_is_beyond_the_pool_is_left_out() -> None:
    found = blocks_of(prompt(1, 6))
    world, ids = restored(found, num_disk=4)
    assert [block_id is None for block_id in ids] == [False] * 4 + [True] * 2
    assert world.cache.match(NAMESPACE, prompt(1, 6)).num_tokens == 16


def test_what_was_stored_first_goes_first() -> None:
    early, late = blocks_of(prompt(1, 1))[0], blocks_of(prompt(2, 1))[0]
    world, _ = restored([replace(late, stored_at=9.0), replace(early, stored_at=5.0)], num_disk=2)
    assert world.tiers.make_room(Tier.DISK, 1)
    assert world.cache.match(NAMESPACE, prompt(1, 1)).num_tokens == 0
    assert world.cache.match(NAMESPACE, prompt(2, 1)).num_tokens == 4


def test_one_chain_is_one_edge_however_long() -> None:
    world, _ = restored(blocks_of(prompt(1, 30)))
    assert len(world.path(prompt(1, 30))) == 1
