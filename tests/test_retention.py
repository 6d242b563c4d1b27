"""Priority and retention: an order of leaving that time undoes, and never a pin."""

import numpy as np
import pytest

from cache_store.events import Tier
from tests.tier_kit import NAMESPACE, TierWorld, prompt

POLICIES = pytest.mark.parametrize("policy", ["lru", "adaptive"])


def make_world(num_device: int, num_host: int = 0, policy: str = "lru") -> TierWorld:
    """Its clock has run for a while, as clocks have."""
    world = TierWorld(num_device, num_host, policy=policy)
    world.now_s = 10_000.0
    return world


def is_stored(world: TierWorld, number: int) -> bool:
    return world.cache.match(NAMESPACE, prompt(number, 2)).num_tokens > 0


def order_of_leaving(world: TierWorld, numbers: range) -> list[int]:
    order: list[int] = []
    while len(order) < len(numbers):
        assert world.tiers.make_room(Tier.DEVICE, world.num_free() + 2)
        order += [n for n in numbers if n not in order and not is_stored(world, n)]
    return order


@POLICIES
@pytest.mark.parametrize(
    ("bonuses", "order"),
    [
        ((0.0, 0.0, 0.0, 0.0), [1, 2, 3, 4]),
        ((600.0, 0.0, 0.0, 0.0), [2, 3, 4, 1]),
        ((600.0, 300.0, 0.0, 0.0), [3, 4, 2, 1]),
        ((0.0, 0.0, 0.0, -600.0), [4, 1, 2, 3]),
        ((0.0, -60.0, 0.0, -600.0), [4, 2, 1, 3]),
        ((600.0, 600.0, 600.0, 600.0), [1, 2, 3, 4]),
    ],
)
def test_a_bonus_shifts_the_order_of_leaving(
    bonuses: tuple[float, ...], order: list[int], policy: str
) -> None:
    world = make_world(8, policy=policy)
    for number, bonus_s in enumerate(bonuses, 1):
        world.now_s += 1.0
        world.store(prompt(number, 2), bonus_s)
    assert order_of_leaving(world, range(1, 5)) == order


@POLICIES
def test_time_undoes_a_bonus(policy: str) -> None:
    for passed_s, first in ((590.0, 2), (610.0, 1)):
        world = make_world(4, policy=policy)
        world.store(prompt(1, 2), 600.0)
        world.now_s += passed_s
        world.store(prompt(2, 2))
        assert order_of_leaving(world, range(1, 3))[0] == first


@POLICIES
def test_a_later_use_without_a_bonus_takes_nothing_away(policy: str) -> None:
    world = make_world(4, policy=policy)
    world.store(prompt(1, 2), 600.0)
    world.now_s += 10.0
    world.store(prompt(1, 2))
    world.now_s += 10.0
    world.store(prompt(2, 2))
    assert order_of_leaving(world, range(1, 3)) == [2, 1]


@POLICIES
def test_with_everything_boosted_eviction_still_works(policy: str) -> None:
    world = make_world(8, policy=policy)
    for number in range(1, 41):
        world.now_s += 1.0
        world.store(prompt(number, 2), 1e9)
    assert [number for number in range(1, 41) if is_stored(world, number)] == [37, 38, 39, 40]
    world.store(prompt(99, 8))  # somebody without any bonus has the pool to itself
    assert world.num_cached(Tier.DEVICE) == 8


@POLICIES
def test_a_bonus_holds_in_lower_tiers_too(policy: str) -> None:
    world = make_world(4, num_host=4, policy=policy)
    world.store(prompt(1, 2), 600.0)
    world.store(prompt(2, 2))
    for number in (1, 2):
        world.cache.demote(NAMESPACE, prompt(number, 2), 0)
        world.settle()
    assert world.tiers.make_room(Tier.HOST, 2)
    assert is_stored(world, 1)
    assert not is_stored(world, 2)


@POLICIES
def test_what_others_share_inherits_the_bonus_of_one(policy: str) -> None:
    world = make_world(8, policy=policy)
    shared = prompt(1, 2)
    boosted = np.concatenate([shared, prompt(5, 2)])
    world.store(boosted, 600.0)
    world.now_s += 1.0
    world.store(prompt(2, 2))
    assert world.tiers.make_room(Tier.DEVICE, 4)
    assert world.cache.match(NAMESPACE, boosted).num_tokens == 16
    assert not is_stored(world, 2)


def test_use_without_a_bonus_undoes_a_negative_one() -> None:
    world = make_world(4)
    world.store(prompt(1, 2))
    world.store(prompt(2, 2), -600.0)
    world.store(prompt(2, 2), -600.0)
    world.store(prompt(2, 2))
    assert order_of_leaving(world, range(1, 3)) == [1, 2]


@POLICIES
def test_a_negative_bonus_takes_nothing_from_others_blocks(policy: str) -> None:
    world = make_world(4, policy=policy)
    for number in (1, 2):
        world.now_s += 1.0
        world.store(prompt(number, 2))
    world.store(prompt(2, 2), -600.0)
    assert order_of_leaving(world, range(1, 3)) == [1, 2]
