"""How old blocks come to be, in a cache whose clock is set by hand."""

from __future__ import annotations

from collections.abc import Iterable

from cache_store.events import Tier
from cache_store.eviction import make_eviction_policy
from cache_store.prefix_cache import PrefixCache
from cache_store.stats import AGE_BOUNDS_S, AgeCounts
from tests.tier_kit import BLOCK_SIZE, TierWorld, prompt


class Device(TierWorld):
    """Of a device alone."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.cache = PrefixCache(
            num_blocks,
            BLOCK_SIZE,
            make_eviction_policy("lru"),
            clock_ns=lambda: int(self.now_s * 1e9),
        )


def ages(*counted: tuple[float, int]) -> AgeCounts:
    """``counted`` are ages and how many blocks had them."""
    counts = [0] * (len(AGE_BOUNDS_S) + 1)
    for age, num_blocks in counted:
        counts[sum(bound < age for bound in AGE_BOUNDS_S)] += num_blocks
    return AgeCounts(tuple(counts), sum(age * num_blocks for age, num_blocks in counted))


def rounded(found: AgeCounts) -> AgeCounts:
    """The tree's clock goes on by a nanosecond with each access."""
    return AgeCounts(found.counts, round(found.sum_s, 6))


def use(world: TierWorld, at: Iterable[float], number: int, num_blocks: int) -> None:
    for now_s in at:
        world.now_s = now_s
        world.store(prompt(number, num_blocks))


def test_blocks_that_make_room_tell_how_old_they_are() -> None:
    world = Device(4)
    use(world, (100.0, 103.0), 1, 2)
    use(world, (104.0,), 2, 2)
    use(world, (110.0,), 3, 3)  # all of the first goes, and the end of the second
    history = world.cache.history()
    assert rounded(history.lifetime) == ages((10.0, 2), (6.0, 1))
    assert rounded(history.idle) == ages((7.0, 2), (6.0, 1))
    assert rounded(history.reuse_gap) == ages((3.0, 2))
    assert history.dropped_total == world.cache.stats().evicted_total == 3
    assert history.demoted_total == 0


def test_the_age_of_a_block_counts_in_whichever_tier_it_ends() -> None:
    world = TierWorld(2, num_host=2)
    use(world, (0.0,), 1, 2)
    world.now_s = 50.0
    lease = world.begin(prompt(2, 2))
    assert not world.cache.allocate(lease, 8)  # the first goes to the host
    world.finish()
    assert world.cache.allocate(lease, 8)
    world.end(lease, prompt(2, 2))
    history = world.cache.history()
    assert (history.demoted_total, history.dropped_total) == (2, 0)
    assert rounded(history.lifetime) == ages()
    world.now_s = 4000.0
    lease = world.begin(prompt(3, 2))
    assert not world.cache.allocate(lease, 8)  # the second does, where the first is in its way
    history = world.cache.history()
    assert history.dropped_total == 0
    assert rounded(history.lifetime) == ages((4000.0, 1))  # half of a tier goes at most
    assert rounded(history.idle) == ages((4000.0, 1))
    (host,) = world.cache.stats().tiers
    assert host.dropped_total == 1


def test_what_is_deleted_or_reset_was_not_evicted() -> None:
    world = Device(8)
    use(world, (1.0,), 1, 4)
    assert world.cache.reset() == 4
    assert rounded(world.cache.history().lifetime) == ages()


def test_a_bonus_makes_no_age_below_nothing() -> None:
    world = Device(2)
    lease = world.begin(prompt(1, 2), bonus_s=60.0)
    assert world.cache.allocate(lease, 8)
    world.end(lease, prompt(1, 2))
    world.now_s = 5.0
    use(world, (5.0,), 2, 2)
    assert rounded(world.cache.history().idle) == ages((0.0, 2))
    assert rounded(world.cache.history().lifetime) == ages((5.0, 2))


def test_transfers_tell_their_time_by_what_they_were_for() -> None:
    world = TierWorld(4, num_host=8)
    world.store(prompt(1, 3))
    lease = world.begin(prompt(2, 3))
    assert not world.cache.allocate(lease, 12)
    world.executor.finish(seconds=0.5)
    world.advance()
    assert world.cache.allocate(lease, 12)
    world.end(lease, prompt(2, 3))
    (host,) = world.cache.stats().tiers
    assert (host.stored_total, host.stored_s_total) == (2, 0.5)
    assert (host.promoted_total, host.promoted_s_total) == (0, 0.0)
    device = world.cache.history()
    assert (device.demoted_total, device.demoted_s_total) == (2, 0.5)
    assert world.tiers.counters[Tier.DEVICE].demoted == 2


def test_time_to_make_room_is_the_engines_own() -> None:
    world = Device(2)
    readings = iter(range(0, 10**12, 10**9))
    world.tree.residency.clock_ns = lambda: next(readings)
    use(world, (0.0,), 1, 2)
    assert world.cache.history().eviction_s_total == 0.0
    use(world, (0.0,), 2, 2)
    assert world.cache.history().eviction_s_total == 1.0
