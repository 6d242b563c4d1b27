"""Tenants in one cache: whose blocks go, who is charged, and caps."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from cache_store.block_hash import Namespace
from cache_store.cache import Lease
from cache_store.events import Tier
from cache_store.eviction import EVICTION_POLICIES, make_eviction_policy
from cache_store.prefix_cache import PrefixCache
from cache_store.tenant_shares import IDLE_HALF_LIFE_NS, TenantLimits
from tests.tier_kit import TierWorld
from tests.tier_kit import prompt as tier_prompt

SHARED = Namespace("f")


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


class Cache:
    """Blocks of one token, so that numbers of blocks and tokens are the same."""

    def __init__(self, num_blocks: int, policy: str = "lru") -> None:
        self.clock = Clock()
        self.cache = PrefixCache(num_blocks, 1, make_eviction_policy(policy), clock_ns=self.clock)
        self.leases: list[Lease] = []
        self.num_stored = 0

    def start(self, tenant: str, ids: np.ndarray, salt: str | None = None) -> Lease:
        namespace = Namespace("f", cache_salt=tenant if salt is None else salt)
        lease = self.cache.acquire(self.cache.match(namespace, ids), 0.0, tenant)
        assert self.cache.allocate(lease, len(ids))
        self.leases.append(lease)
        return lease

    def end(self, lease: Lease, ids: np.ndarray) -> None:
        self.cache.release(lease, ids, len(ids))
        self.leases.remove(lease)
        self.check()

    def store(self, tenant: str, count: int, salt: str | None = None) -> np.ndarray:
        """A prompt that was never there before."""
        self.num_stored += 1
        ids = np.arange(count, dtype=np.int32) + 1000 * self.num_stored
        self.end(self.start(tenant, ids, salt), ids)
        return ids

    def use(self, tenant: str, ids: np.ndarray) -> int:
        """How much of it was there; it is all there again afterwards."""
        lease = self.start(tenant, ids)
        num_cached = lease.num_cached_tokens
        self.end(lease, ids)
        return num_cached

    def num_found(self, tenant: str, ids: np.ndarray) -> int:
        return self.cache.match(Namespace("f", cache_salt=tenant), ids).num_tokens

    def held(self, tier: Tier = Tier.DEVICE) -> dict[str, int]:
        return {each.tenant: each.num_blocks[tier] for each in self.cache.tenant_usage()}

    def limit(self, **limits: TenantLimits) -> None:
        self.cache.set_tenant_limits(limits)
        self.check()

    def check(self) -> None:
        self.cache.check_integrity(self.leases)


def weighing(weight: float) -> TenantLimits:
    return TenantLimits(weight)


def capped(num_blocks: int, tier: Tier = Tier.DEVICE) -> TenantLimits:
    caps: Mapping[Tier, int] = {tier: num_blocks}
    return TenantLimits(max_blocks=caps)


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_a_flood_takes_nothing_from_who_has_no_more_than_its_part(policy: str) -> None:
    cache = Cache(64, policy)
    paths = [cache.store("b", 10) for _ in range(3)]
    for _ in range(60):
        cache.store("a", 4)
    assert [cache.num_found("b", ids) for ids in paths] == [10, 10, 10]
    assert cache.held() == {"a": 34, "b": 30}


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_as_one_tenant_the_same_flood_takes_all(policy: str) -> None:
    cache = Cache(64, policy)
    paths = [cache.store("", 10) for _ in range(3)]
    for _ in range(60):
        cache.store("", 4)
    assert [cache.num_found("", ids) for ids in paths] == [0, 0, 0]


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_what_one_does_not_use_the_others_do_and_it_comes_back_first(policy: str) -> None:
    cache = Cache(64, policy)
    for _ in range(20):
        cache.store("b", 4)
    assert cache.held() == {"b": 64}
    for _ in range(30):
        cache.store("a", 4)
    assert cache.held() == {"a": 32, "b": 32}


def test_within_a_tenant_the_order_is_the_policys() -> None:
    cache = Cache(30)
    paths = [cache.store("b", 10) for _ in range(3)]
    cache.use("b", paths[0])
    cache.store("a", 10)
    assert [cache.num_found("b", ids) for ids in paths] == [10, 0, 10]


def test_parts_go_by_weight() -> None:
    cache = Cache(64)
    cache.limit(a=weighing(3.0))
    for _ in range(20):
        cache.store("b", 4)
        cache.store("a", 4)
    assert cache.held() == {"a": 48, "b": 16}


def test_many_blocks_at_once_are_taken_down_to_the_next_in_line() -> None:
    cache = Cache(60)
    for _ in range(4):
        cache.store("a", 10)
    cache.store("b", 10)
    cache.store("c", 10)
    cache.store("d", 24)
    assert cache.held() == {"a": 16, "b": 10, "c": 10, "d": 24}


def test_who_asks_for_nothing_keeps_less_and_less() -> None:
    cache = Cache(64)
    for _ in range(8):
        cache.store("b", 4)
    cache.clock.now_ns += IDLE_HALF_LIFE_NS
    for _ in range(30):
        cache.store("a", 4)
    assert cache.held() == {"a": 43, "b": 21}  # 2 : 1
    cache.clock.now_ns += 20 * IDLE_HALF_LIFE_NS
    cache.store("a", 4)
    for _ in range(8):
        cache.store("a", 4)
    assert cache.held() == {"a": 64}


def test_what_runs_counts_as_held() -> None:
    cache = Cache(40)
    paths = [cache.store("b", 10) for _ in range(2)]
    running = cache.start("a", np.arange(15, dtype=np.int32))
    cache.store("a", 5)
    cache.store("a", 5)
    assert [cache.num_found("b", ids) for ids in paths] == [10, 10]
    cache.end(running, np.arange(15, dtype=np.int32))
    assert cache.held() == {"a": 20, "b": 20}


def test_room_that_is_not_others_part() -> None:
    cache = Cache(40)
    for _ in range(3):
        cache.store("b", 10)
    has_room = cache.cache.has_room
    assert has_room(20, "a", at_others_cost=False)  # 10 free, 10 beyond the part of b
    assert not has_room(21, "a", at_others_cost=False)
    assert has_room(40, "a", at_others_cost=True)
    assert not has_room(41, "a", at_others_cost=True)
    assert has_room(40, "b", at_others_cost=False)
    lease = cache.start("a", np.arange(8, dtype=np.int32))
    assert has_room(12, "a", at_others_cost=False)
    assert not has_room(13, "a", at_others_cost=False)
    cache.end(lease, np.arange(8, dtype=np.int32))


def test_leaves_of_several_tenants_below_one_trunk_all_go() -> None:
    cache = Cache(30)
    trunk = np.arange(6, dtype=np.int32)
    for number, tenant in enumerate("abc"):
        ids = np.concatenate([trunk, np.arange(6, dtype=np.int32) + 100 * (number + 1)])
        cache.end(cache.start(tenant, ids, salt="shared"), ids)
    assert cache.held() == {"a": 12, "b": 6, "c": 6}  # the first is charged with the trunk
    lease = cache.start("d", np.arange(30, dtype=np.int32) + 5000)
    assert cache.held() == {"d": 0}
    cache.end(lease, np.arange(30, dtype=np.int32) + 5000)
    assert cache.held() == {"d": 30}


def test_an_answer_that_grows_behind_anothers_leaf_is_charged_to_who_computes_it() -> None:
    cache = Cache(30)
    ids = np.arange(10, dtype=np.int32)
    first, second = cache.start("a", ids, "shared"), cache.start("b", ids, "shared")
    cache.cache.commit(first, ids, 4)
    cache.cache.commit(second, ids, 4)  # duplicates
    cache.end(first, ids[:4])
    cache.cache.commit(second, ids, 10)
    cache.check()
    assert cache.held() == {"a": 4, "b": 6}
    cache.end(second, ids)


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_over_its_cap_a_tenant_gives_up_its_own(policy: str) -> None:
    cache = Cache(100, policy)
    cache.limit(a=capped(10))
    others = [cache.store("b", 4) for _ in range(3)]
    paths = [cache.store("a", 4) for _ in range(5)]
    assert cache.held() == {"a": 10, "b": 12}
    assert [cache.num_found("a", ids) for ids in paths[-2:]] == [4, 4]
    assert [cache.num_found("b", ids) for ids in others] == [4, 4, 4]


def test_what_is_in_use_goes_when_it_is_not_any_more() -> None:
    cache = Cache(100)
    cache.limit(a=capped(6))
    ids = np.arange(20, dtype=np.int32)
    lease = cache.start("a", ids)
    cache.cache.commit(lease, ids, 16)
    assert cache.held() == {"a": 16}
    cache.end(lease, ids)
    assert cache.num_found("a", ids) == 6  # from the end
    assert cache.held() == {"a": 6}


def test_a_cap_of_nothing_stores_nothing() -> None:
    cache = Cache(100)
    cache.limit(a=capped(0))
    cache.store("a", 8)
    assert cache.held() == {}
    assert cache.cache.stats().num_free == 100


def test_a_new_cap_holds_at_once_and_an_old_one_no_more() -> None:
    cache = Cache(100)
    cache.store("a", 20)
    cache.limit(a=capped(5))
    assert cache.held() == {"a": 5}
    cache.limit()
    cache.store("a", 20)
    assert cache.held() == {"a": 25}


def test_what_nobody_owned_is_charged_to_the_first_who_uses_it() -> None:
    cache = Cache(100)
    ids = np.arange(12, dtype=np.int32)
    cache.end(cache.start("", ids, salt="a"), ids)
    cache.store("", 5)
    assert cache.held() == {"": 17}
    assert cache.use("a", ids) == 12
    assert cache.held() == {"": 5, "a": 12}
    for _ in range(30):
        cache.store("b", 4)
    assert cache.use("a", ids) == 12
    cache.cache.reset()
    cache.check()


def test_tenants_without_anything_are_forgotten() -> None:
    cache = Cache(16)
    for number in range(200):
        cache.store(f"t{number}", 4)
    assert sum(cache.held().values()) == 16
    assert len(list(cache.cache._shares)) <= 140


# ------------------------------------------------------------ tiers


def store_for(world: TierWorld, tenant: str, number: int, num_blocks: int) -> np.ndarray:
    ids = tier_prompt(number, num_blocks)
    lease = world.cache.acquire(world.cache.match(SHARED, ids), 0.0, tenant)
    world.leases.append(lease)
    for _ in range(20):
        if world.cache.allocate(lease, len(ids)):
            break
        world.finish()
    world.end(lease, ids)
    world.settle()
    return ids


def in_tiers(world: TierWorld, tenant: str) -> tuple[int, ...]:
    for each in world.cache.tenant_usage():
        if each.tenant == tenant:
            return tuple(each.num_blocks[tier] for tier in world.tiers.pools)
    return (0,) * len(world.tiers.pools)


def test_a_flood_takes_nothing_in_any_tier_from_who_has_its_part() -> None:
    world = TierWorld(16, 16, 16)
    mine = [store_for(world, "b", number, 4) for number in range(2)]
    for number in range(10, 40):
        store_for(world, "a", number, 4)
    assert sum(in_tiers(world, "b")[:2]) >= 8
    for ids in mine:
        match = world.cache.match(SHARED, ids)
        assert match.num_tokens == len(ids)
        assert match.num_disk_tokens == 0


def test_what_is_over_the_cap_of_the_device_goes_below() -> None:
    world = TierWorld(32, 32)
    world.cache.set_tenant_limits({"a": capped(4)})
    for number in range(4):
        store_for(world, "a", number, 4)
    world.check()
    assert in_tiers(world, "a") == (4, 12)


def test_a_cap_holds_in_each_tier() -> None:
    world = TierWorld(8, 16, 16)
    caps = {Tier.HOST: 4, Tier.DISK: 6}
    world.cache.set_tenant_limits({"a": TenantLimits(max_blocks=caps)})
    for number in range(12):
        store_for(world, "a", number, 4)
        store_for(world, "b", 100 + number, 4)
        assert in_tiers(world, "a")[1] <= 4
        assert in_tiers(world, "a")[2] <= 6
    assert sum(in_tiers(world, "b")) > 16


def test_a_tier_that_a_tenant_may_not_use_is_left_out() -> None:
    world = TierWorld(8, 16, 16)
    world.cache.set_tenant_limits({"a": capped(0, Tier.DISK)})
    for number in range(8):
        store_for(world, "a", number, 4)
    assert in_tiers(world, "a")[1] > 0
    assert in_tiers(world, "a")[2] == 0
    assert not [order for order in world.executor.submitted if order.target is Tier.DISK]
