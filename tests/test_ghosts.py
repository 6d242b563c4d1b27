"""What has left the cache is remembered: which blocks, when, from where and why."""

from __future__ import annotations

import numpy as np
import pytest

from cache_store.block_hash import BlockHashes, Namespace, hash_blocks
from cache_store.events import Tier
from cache_store.ghosts import MIN_GHOSTS, Cause, DepartedPrefix, GhostList
from cache_store.null_cache import NullCache
from cache_store.tenant_shares import TenantLimits
from model_worker.protocol import EvictedPrefix, PrefixAction
from tests.scheduler_kit import BLOCK, World, prompt
from tests.tier_kit import BLOCK_SIZE, NAMESPACE, TierWorld, tokens


def named(*numbers: int) -> BlockHashes:
    return BlockHashes(b"".join(number.to_bytes(16, "little") for number in numbers))


class Clock:
    now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


# ------------------------------------------------------------ the list


def test_only_what_left_is_found_as_far_as_it_goes_without_a_gap() -> None:
    clock = Clock()
    ghosts = GhostList(clock)
    ghosts.left(named(2, 3).joined, Tier.DEVICE)
    clock.now_ns = 3_000_000_000
    ghosts.left(named(5).joined, Tier.DISK)
    clock.now_ns = 5_000_000_000
    prefix = named(1, 2, 3, 4, 5)
    assert ghosts.find(prefix, 0) is None
    assert ghosts.find(prefix, 1) == DepartedPrefix(2, 5.0, Tier.DEVICE, Cause.CAPACITY)
    assert ghosts.find(prefix, 2) == DepartedPrefix(1, 5.0, Tier.DEVICE, Cause.CAPACITY)
    assert ghosts.find(prefix, 3) is None
    assert ghosts.find(prefix, 4) == DepartedPrefix(1, 2.0, Tier.DISK, Cause.CAPACITY)
    assert ghosts.find(prefix, 5) is None


def test_the_last_departure_counts_and_its_cause() -> None:
    ghosts = GhostList(Clock())
    with ghosts.because(Cause.RESET):
        ghosts.left(named(1).joined, Tier.HOST)
        with ghosts.because(Cause.LOST):
            ghosts.left(named(2).joined, Tier.DISK)
        ghosts.left(named(3).joined, Tier.HOST)
    ghosts.left(named(1).joined, Tier.DEVICE)
    causes = [found.cause for number in (1, 2, 3) if (found := ghosts.find(named(number), 0))]
    assert causes == [Cause.CAPACITY, Cause.LOST, Cause.RESET]


def test_the_list_is_bounded() -> None:
    ghosts = GhostList(Clock())
    for first in range(0, 4 * MIN_GHOSTS, 64):
        ghosts.left(named(*range(first, first + 64)).joined, Tier.DEVICE)
        assert len(ghosts) <= 2 * MIN_GHOSTS + 64
    assert ghosts.find(named(0), 0) is None
    assert ghosts.find(named(3 * MIN_GHOSTS), 0) is not None


# ------------------------------------------------------------ what the cache tells it


def departed(world: TierWorld, ids: np.ndarray, first: int) -> DepartedPrefix | None:
    return world.cache.departed(hash_blocks(NAMESPACE, ids, BLOCK_SIZE), first)


def path(start: int, num_blocks: int) -> np.ndarray:
    return np.arange(start, start + num_blocks * BLOCK_SIZE, dtype=np.int32)


def test_leaves_that_made_room() -> None:
    world = TierWorld(num_device=4)
    first = path(100, 3)
    world.store(first)
    world.now_s = 10.0
    world.store(path(200, 3))
    world.now_s = 12.5
    assert departed(world, first, 0) is None  # the root of it is still there
    assert departed(world, first, 1) == DepartedPrefix(2, 2.5, Tier.DEVICE, Cause.CAPACITY)


def test_what_leaves_the_last_tier_and_not_what_moves() -> None:
    world = TierWorld(num_device=4, num_host=4)
    first = path(100, 3)
    world.store(first)
    world.cache.demote(NAMESPACE, first, 0)
    world.settle()
    assert departed(world, first, 0) is None
    for start in (200, 300, 400):
        world.store(path(start, 3))
        world.cache.demote(NAMESPACE, path(start, 3), 0)
        world.settle()
    found = departed(world, first, 0)
    assert found == DepartedPrefix(3, 0.0, Tier.HOST, Cause.CAPACITY)


def test_what_was_dropped_on_request_and_by_a_reset() -> None:
    world = TierWorld(num_device=16)
    dropped, emptied = path(100, 3), path(200, 2)
    world.store(dropped)
    world.store(emptied)
    world.cache.drop(NAMESPACE, dropped, BLOCK_SIZE)
    assert departed(world, dropped, 1) == DepartedPrefix(2, 0.0, Tier.DEVICE, Cause.DROPPED)
    world.cache.reset()
    assert departed(world, dropped, 0) == DepartedPrefix(3, 0.0, Tier.DEVICE, Cause.RESET)
    assert departed(world, emptied, 0) == DepartedPrefix(2, 0.0, Tier.DEVICE, Cause.RESET)


def test_what_could_not_be_read_back() -> None:
    world = TierWorld(num_device=4, num_host=4)
    ids = path(100, 3)
    world.store(ids)
    world.cache.demote(NAMESPACE, ids, 0)
    world.settle()
    lease = world.start(ids)
    world.finish(0)
    world.end(lease, ids, 0)
    assert departed(world, ids, 0) == DepartedPrefix(3, 0.0, Tier.HOST, Cause.LOST)


@pytest.mark.parametrize("num_host", [0, 8])
def test_what_was_beyond_its_tenants_cap(num_host: int) -> None:
    world = TierWorld(num_device=16, num_host=num_host)
    cap = {Tier.DEVICE: 2, Tier.HOST: 0}
    world.cache.set_tenant_limits({"a": TenantLimits(max_blocks=cap)})
    ids = path(100, 4)
    lease = world.cache.acquire(world.cache.match(NAMESPACE, ids), tenant="a")
    assert world.cache.allocate(lease, len(ids))
    world.cache.release(lease, ids, len(ids))
    world.settle()
    assert departed(world, ids, 2) == DepartedPrefix(2, 0.0, Tier.DEVICE, Cause.TENANT_CAP)


def test_a_partly_filled_block_has_no_name() -> None:
    world = TierWorld(num_device=16)
    world.store(tokens(path(100, 1), 7))
    world.cache.reset()
    assert len(world.tree.residency.ghosts) == 1


def test_a_cache_that_stores_nothing_has_lost_nothing() -> None:
    hashes = hash_blocks(Namespace("f"), path(0, 2), BLOCK_SIZE)
    assert NullCache(4, BLOCK_SIZE).departed(hashes, 0) is None


# ------------------------------------------------------------ what a request is told


def evicted_of(world: World, name: str) -> list[EvictedPrefix]:
    return [output.evicted for output in world.outputs[name] if output.evicted is not None]


def test_a_request_is_told_once_what_was_there_before() -> None:
    world = World(16)
    long = prompt(5 * BLOCK + 1)
    world.add("a", long)
    world.run()
    assert evicted_of(world, "a") == []
    world.engine.reset_cache()
    world.add("b", [*long, 3, 5])
    world.run()
    assert evicted_of(world, "b") == [
        EvictedPrefix(num_tokens=5 * BLOCK, ago_s=0.0, tier="device", cause="reset")
    ]
    world.add("c", [*long, 3, 5])  # which is there again, whatever the ghosts say
    world.run()
    assert evicted_of(world, "c") == []


def test_what_is_evicted_counts_from_the_last_cached_token_to_the_last_that_could_be() -> None:
    world = World(16)
    ids = prompt(3 * BLOCK)
    world.add("a", ids, 1)
    world.run()
    world.act(PrefixAction.DROP, ids, keep=BLOCK)
    world.add("b", ids, 1)
    world.run()
    (found,) = evicted_of(world, "b")
    assert (found.num_tokens, found.cause) == (2 * BLOCK - 1, "dropped")


def test_a_prompt_that_is_computed_whole_misses_nothing() -> None:
    world = World(16)
    ids = prompt(3 * BLOCK)
    world.add("a", ids)
    world.run()
    world.engine.reset_cache()
    world.add("b", ids, num_prompt_logprobs=0)
    world.run()
    assert evicted_of(world, "b") == []


def test_other_namespaces_are_told_nothing() -> None:
    world = World(16)
    ids = prompt(3 * BLOCK)
    world.add("a", ids, salt="one")
    world.run()
    world.engine.reset_cache()
    world.add("b", ids, salt="two")
    world.run()
    assert evicted_of(world, "b") == []
