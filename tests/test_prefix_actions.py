import numpy as np
import pytest

from cache_store.cache import PrefixReport
from cache_store.events import Tier
from tests.tier_kit import NAMESPACE, TierWorld, moves, prompt, tokens

SHARED = prompt(1, 2)
OWN = tokens(SHARED, prompt(2, 2))
OTHER = tokens(SHARED, prompt(3, 2))


def stored(*prompts: np.ndarray, num_host: int = 16, num_disk: int = 0) -> TierWorld:
    world = TierWorld(32, num_host, num_disk)
    for ids in prompts:
        world.store(ids)
    return world


def num_matched(world: TierWorld, ids: np.ndarray) -> int:
    return world.cache.match(NAMESPACE, ids).num_tokens


# ------------------------------------------------------------ inspect


def test_inspect_counts_tokens_by_tier_and_changes_nothing() -> None:
    world = stored(SHARED, tokens(OWN, 7, 8))
    world.cache.demote(NAMESPACE, tokens(OWN, 7, 8), 8)
    world.settle()
    before = world.cache.stats()
    report = world.cache.inspect(NAMESPACE, tokens(OWN, 7, 8, 9))
    assert report == PrefixReport(num_device_tokens=8, num_host_tokens=10)
    assert world.cache.inspect(NAMESPACE, prompt(9, 2)) == PrefixReport()
    assert world.cache.stats() == before


# ------------------------------------------------------------ demote


def test_demote_takes_a_prefix_down_leaves_first() -> None:
    world = stored(OWN)
    report = world.cache.demote(NAMESPACE, OWN, 0)
    assert report == PrefixReport(num_device_tokens=16, num_blocks_changed=4)
    assert moves(world.executor.orders) == [("device", "host", 4)]
    world.settle()
    assert world.cache.inspect(NAMESPACE, OWN) == PrefixReport(num_host_tokens=16)
    assert world.cache.demote(NAMESPACE, OWN, 0).num_blocks_changed == 0


@pytest.mark.parametrize(("keep", "num_left"), [(0, 0), (4, 4), (5, 8), (8, 8), (16, 16), (99, 16)])
def test_demote_keeps_what_it_is_told_to_in_whole_blocks(keep: int, num_left: int) -> None:
    world = stored(OWN)
    report = world.cache.demote(NAMESPACE, OWN, keep)
    world.settle()
    assert world.cache.inspect(NAMESPACE, OWN) == PrefixReport(num_left, 16 - num_left)
    assert report.num_blocks_changed == (16 - num_left) // 4


def test_demote_leaves_what_others_share() -> None:
    world = stored(OWN, OTHER)
    assert world.cache.demote(NAMESPACE, OWN, 0).num_blocks_changed == 2
    world.settle()
    assert world.copies(OWN) == ["D", "H"]
    assert world.copies(OTHER) == ["D", "D"]


def test_demote_leaves_what_somebody_holds_and_says_how_much() -> None:
    world = stored(OWN)
    lease = world.start(tokens(SHARED, 5))
    report = world.cache.demote(NAMESPACE, OWN, 4)
    assert (report.num_blocks_changed, report.num_blocks_left) == (2, 1)
    world.settle()
    world.end(lease, tokens(SHARED, 5), 0)
    assert world.copies(OWN) == ["D", "D", "H"]


def test_demote_without_a_lower_tier_changes_nothing() -> None:
    world = stored(OWN, num_host=0)
    assert world.cache.demote(NAMESPACE, OWN, 0).num_blocks_changed == 0
    assert num_matched(world, OWN) == 16


def test_demote_of_what_is_on_disk_already_is_at_once() -> None:
    world = stored(OWN, num_host=0, num_disk=16)
    world.advance()
    world.settle()
    assert world.cache.demote(NAMESPACE, OWN, 0).num_blocks_changed == 4
    assert world.executor.orders == []
    assert world.num_free() == 32


# ------------------------------------------------------------ prefetch


def test_prefetch_brings_a_prefix_back_before_anybody_asks() -> None:
    world = stored(OWN)
    world.cache.demote(NAMESPACE, OWN, 4)
    world.settle()
    report = world.cache.prefetch(NAMESPACE, OWN)
    assert report == PrefixReport(num_device_tokens=4, num_host_tokens=12, num_blocks_changed=3)
    assert world.cache.prefetch(NAMESPACE, OWN).num_blocks_changed == 0  # on its way
    world.settle()
    lease = world.start(tokens(OWN, 5))
    assert not lease.is_loading
    assert (lease.num_cached_tokens, lease.num_host_tokens) == (16, 0)
    world.end(lease, tokens(OWN, 5))


def test_prefetch_does_nothing_where_computing_is_quicker() -> None:
    world = stored(OWN)
    world.cache.demote(NAMESPACE, OWN, 0)
    world.settle()
    world.token_s = 0.001
    world.planner.record(Tier.HOST, 1, 1.0)
    assert world.cache.prefetch(NAMESPACE, OWN).num_blocks_changed == 0
    assert world.executor.orders == []
    world.check()


def test_prefetch_that_can_never_fit_evicts_nothing() -> None:
    world = TierWorld(6, num_host=16)
    world.store(prompt(1, 4))
    world.cache.demote(NAMESPACE, prompt(1, 4), 0)
    world.settle()
    holder = world.start(prompt(2, 3))
    world.store(prompt(3, 2))
    assert world.cache.prefetch(NAMESPACE, prompt(1, 4)).num_blocks_changed == 0
    assert world.executor.orders == []
    assert world.copies(prompt(3, 2)) == ["D"]
    world.end(holder, prompt(2, 3), 0)


def test_a_prefetch_that_fails_is_a_miss_at_once() -> None:
    world = stored(OWN)
    world.cache.demote(NAMESPACE, OWN, 0)
    world.settle()
    world.cache.prefetch(NAMESPACE, OWN)
    world.finish(1)
    assert num_matched(world, OWN) == 0
    assert world.num_free() == 32
    assert world.num_free(Tier.HOST) == 16


# ------------------------------------------------------------ drop


@pytest.mark.parametrize("tier", list(Tier))
def test_drop_reaches_every_tier(tier: Tier) -> None:
    world = stored(OWN, num_host=8 if tier is Tier.HOST else 0, num_disk=8)
    world.advance()
    world.settle()
    if tier is not Tier.DEVICE:
        world.cache.demote(NAMESPACE, OWN, 0)
        world.settle()
    assert {node.tier for node in world.path(OWN)} == {tier}
    assert world.cache.drop(NAMESPACE, OWN, 0).num_blocks_changed == 4
    world.check()
    assert num_matched(world, OWN) == 0
    assert all(pool.num_free == pool.num_blocks for pool in world.tiers.pools.values())
    deleted = [block_id for where, ids in world.executor.deleted for block_id in ids]
    assert len(deleted) == (4 if tier is not Tier.HOST else 8)


@pytest.mark.parametrize(("keep", "num_left"), [(0, 0), (4, 4), (5, 8), (16, 16), (99, 16)])
def test_drop_keeps_what_it_is_told_to_in_whole_blocks(keep: int, num_left: int) -> None:
    world = stored(OWN)
    report = world.cache.drop(NAMESPACE, OWN, keep)
    assert report.num_blocks_changed == (16 - num_left) // 4
    assert num_matched(world, OWN) == num_left
    world.check()


def test_drop_leaves_what_others_share() -> None:
    world = stored(OWN, OTHER)
    assert world.cache.drop(NAMESPACE, OWN, 0).num_blocks_changed == 2
    assert (num_matched(world, OWN), num_matched(world, OTHER)) == (8, 16)
    assert world.cache.drop(NAMESPACE, OTHER, 0).num_blocks_changed == 4
    assert not world.tree.roots


def test_drop_takes_the_sequels_of_the_whole_prompt() -> None:
    world = stored(tokens(OWN, prompt(4, 1)), tokens(OWN, prompt(5, 2)), OTHER)
    assert world.cache.drop(NAMESPACE, OWN, 0).num_blocks_changed == 5
    assert num_matched(world, OWN) == 8
    assert num_matched(world, OTHER) == 16


def test_sequels_that_begin_within_a_block_are_told_from_their_neighbours() -> None:
    cut = tokens(SHARED, 70, 71)
    first, second = tokens(cut, 72, 73, 74), tokens(cut, 82, 83, 84, 85, 86)
    neighbour = tokens(SHARED, 70, 91, 92, 93)
    world = stored(first, second, neighbour)
    assert world.cache.drop(NAMESPACE, cut, 0).num_blocks_changed == 4
    world.check()
    assert num_matched(world, neighbour) == 12
    assert num_matched(world, first) == 9  # the rows of the neighbour that it shares
    assert num_matched(world, second) == 9


def test_a_prompt_that_is_not_stored_whole_has_no_sequels() -> None:
    world = stored(OWN)
    gone_on = tokens(SHARED, prompt(2, 1), 5)
    assert world.cache.drop(NAMESPACE, gone_on, 0).num_blocks_changed == 0
    assert num_matched(world, OWN) == 16


def test_drop_takes_a_partly_filled_block_along() -> None:
    world = stored(tokens(OWN, 7, 8))
    assert world.cache.drop(NAMESPACE, tokens(OWN, 7, 8), 8).num_blocks_changed == 3
    assert num_matched(world, OWN) == 8


def test_drop_leaves_what_somebody_holds_and_says_how_much() -> None:
    held, free = tokens(OWN, prompt(4, 1)), tokens(OWN, prompt(5, 1))
    world = stored(held, free)
    lease = world.start(held)
    report = world.cache.drop(NAMESPACE, OWN, 4)
    assert (report.num_blocks_changed, report.num_blocks_left) == (1, 4)
    assert (num_matched(world, held), num_matched(world, free)) == (20, 16)
    world.end(lease, held)
    assert world.cache.drop(NAMESPACE, OWN, 0).num_blocks_changed == 5
    assert not world.tree.roots


def test_what_is_being_copied_is_held() -> None:
    world = stored(OWN)
    world.cache.demote(NAMESPACE, OWN, 0)
    report = world.cache.drop(NAMESPACE, OWN, 0)
    assert (report.num_blocks_changed, report.num_blocks_left) == (0, 4)
    world.settle()
    assert world.cache.drop(NAMESPACE, OWN, 0).num_blocks_changed == 4


def test_other_namespaces_are_not_touched() -> None:
    world = stored(OWN)
    other = type(NAMESPACE)("f", cache_salt="s")
    assert world.cache.drop(other, OWN, 0) == PrefixReport()
    assert world.cache.demote(other, OWN, 0) == PrefixReport()
    assert world.cache.prefetch(other, OWN) == PrefixReport()
    assert num_matched(world, OWN) == 16


def test_the_tail_of_an_earlier_turn_makes_no_prefix_shared() -> None:
    """It was being written to disk when the longer block came, and goes once it is written."""
    world = TierWorld(16, 16, 16)
    turn = tokens(prompt(1, 2), 7, 8)
    world.store(turn)
    world.advance()
    assert moves(world.executor.orders) == [("device", "disk", 3)]
    longer = tokens(turn, 9, 10, 11)
    assert world.store(longer) == 10
    world.settle()
    assert len(world.path(longer)) == 3
    report = world.cache.demote(NAMESPACE, longer, 0)
    assert (report.num_blocks_changed, report.num_blocks_left) == (4, 0)
    world.settle()
    assert world.copies(longer) == ["Hd", "Hd", "Hd"]
    assert world.cache.drop(NAMESPACE, longer, 0).num_blocks_changed == 4
    assert not world.tree.roots
