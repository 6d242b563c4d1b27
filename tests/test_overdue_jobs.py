"""A disk that hangs hangs no request: what waits for it goes on without, and it is left alone."""

from __future__ import annotations

from cache_store.events import Tier
from cache_store.overdue_jobs import OVERDUE_S
from tests.tier_kit import NAMESPACE, TierWorld, moves, prompt


def test_room_that_does_not_come_is_not_waited_for() -> None:
    world = TierWorld(4, 0, 16)
    old, new = prompt(1, 4), prompt(2, 4)
    world.store(old)
    lease = world.begin(new)
    assert not world.cache.allocate(lease, len(new))
    assert moves(world.executor.orders) == [("device", "disk", 4)]
    assert world.cache.is_room_coming
    world.now_s += OVERDUE_S + 1
    world.advance()
    assert not world.cache.is_room_coming
    assert not world.cache.allocate(lease, len(new))  # the hanging copy still pins its blocks
    world.finish()
    assert world.cache.allocate(lease, len(new))
    world.end(lease, new)


def test_a_hanging_tier_takes_and_gives_nothing_until_it_returns() -> None:
    world = TierWorld(12, 0, 16)
    first, second, third = prompt(1, 4), prompt(2, 4), prompt(3, 4)
    world.store(first)
    world.advance()
    world.settle()
    world.cache.demote(NAMESPACE, first, 0)
    assert world.copies(first) == ["d"]
    lease = world.start(first)
    assert lease.is_loading
    world.now_s += OVERDUE_S + 1
    world.advance()
    assert lease.has_failed
    world.end(lease, first, 0)
    again = world.start(first)  # computed, since the disk does not answer
    assert (again.num_cached_tokens, again.is_loading) == (0, False)
    world.end(again, first)
    world.store(second)
    world.store(third)  # what has to go for it cannot go to the disk: it is dropped
    world.advance()
    assert [order.target for order in world.executor.orders] == [Tier.DEVICE]
    assert (world.copies(second), world.copies(third)) == ([], ["D"])
    world.finish()
    world.settle()
    assert world.copies(third) == ["Dd"]
