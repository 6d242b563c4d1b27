"""What a listener hears of single blocks. That it hears of all of them, always, is held by
tests/test_cache_properties.py."""

from __future__ import annotations

import numpy as np

from cache_store.block_hash import Namespace, hash_blocks
from cache_store.events import CopyEvent, CopyRemoved, CopyStored, Tier
from cache_store.eviction import make_eviction_policy
from cache_store.prefix_cache import PrefixCache
from tests.tier_kit import BLOCK_SIZE, NAMESPACE, TierWorld, prompt, tokens


def world_and_events(**sizes: int) -> tuple[TierWorld, list[CopyEvent]]:
    world = TierWorld(**sizes)
    events: list[CopyEvent] = []
    world.tree.residency.tell_copies(events.append)
    return world, events


def hashes(ids: np.ndarray, first: int = 0, stop: int = 100) -> bytes:
    return b"".join(hash_blocks(NAMESPACE, ids, BLOCK_SIZE).between(first, stop))


def test_blocks_come_with_what_they_follow() -> None:
    world, events = world_and_events(num_device=16)
    first = prompt(1, 3)
    world.store(tokens(first, 7))  # and a partly filled block, which is not told of
    branch = tokens(first[: 2 * BLOCK_SIZE], prompt(2, 2))
    world.store(branch)
    assert events == [
        CopyStored(Tier.DEVICE, b"", hashes(first)),
        CopyStored(Tier.DEVICE, hashes(first, 1, 2), hashes(branch, 2)),
    ]


def test_a_growing_answer_is_told_of_block_by_block() -> None:
    world, events = world_and_events(num_device=16)
    ids = prompt(1, 3)
    lease = world.start(ids)
    world.cache.commit(lease, ids, BLOCK_SIZE)
    world.cache.commit(lease, ids, 3 * BLOCK_SIZE)
    assert events == [
        CopyStored(Tier.DEVICE, b"", hashes(ids, 0, 1)),
        CopyStored(Tier.DEVICE, hashes(ids, 0, 1), hashes(ids, 1)),
    ]
    world.end(lease, ids)


def test_each_tier_is_told_of_for_itself() -> None:
    world, events = world_and_events(num_device=2, num_host=8)
    old, new = prompt(1, 2), prompt(2, 2)
    world.store(old)
    world.begin(new)
    (lease,) = world.leases
    while not world.cache.allocate(lease, len(new)):
        world.settle()
    world.end(lease, new)
    world.settle()
    stored = [event for event in events if isinstance(event, CopyStored)]
    removed = [event for event in events if isinstance(event, CopyRemoved)]
    assert (Tier.HOST, hashes(old)) in [(event.tier, event.block_hashes) for event in stored]
    assert b"".join(
        event.block_hashes for event in reversed(removed) if event.tier is Tier.DEVICE
    ) in (hashes(old), hashes(old, 1) + hashes(old, 0, 1))
    events.clear()
    world.cache.reset()
    gone = {(event.tier, event.block_hashes) for event in events}
    assert all(isinstance(event, CopyRemoved) for event in events)
    assert (Tier.HOST, hashes(old)) in gone
    assert (Tier.DEVICE, hashes(new)) in gone


def test_namespaces_share_no_hash() -> None:
    other = Namespace("f", cache_salt="x")
    ids = prompt(1, 2)
    assert hashes(ids) != hash_blocks(other, ids, BLOCK_SIZE).joined


def test_leaves_that_are_evicted_together_are_one_word() -> None:
    events: list[CopyEvent] = []
    cache = PrefixCache(8, BLOCK_SIZE, make_eviction_policy("lru"), on_copy=events.append)
    for number, num_blocks in ((1, 2), (2, 2), (3, 4), (4, 3)):
        ids = prompt(number, num_blocks)
        lease = cache.acquire(cache.match(NAMESPACE, ids))
        assert cache.allocate(lease, len(ids))
        cache.release(lease, ids, len(ids))
    # Three blocks are wanted: the oldest prompt goes, and of the next its end.
    assert [event for event in events if isinstance(event, CopyRemoved)] == [
        CopyRemoved(Tier.DEVICE, hashes(prompt(1, 2))),
        CopyRemoved(Tier.DEVICE, hashes(prompt(2, 2), 1)),
    ]
