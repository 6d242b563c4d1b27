"""Room is made and blocks move, every transfer carried out by hand."""

from itertools import pairwise

import numpy as np
import pytest

from cache_store.events import Tier
from cache_store.transfer_desk import REST_AFTER_FAILURE_S
from tests.tier_kit import BLOCK_SIZE, NAMESPACE, TierWorld, moves, prompt, tokens

# ------------------------------------------------------------ room


def test_a_copy_is_made_before_the_block_is_free() -> None:
    world = TierWorld(4, num_host=4)
    world.store(prompt(1, 3))
    lease = world.begin(prompt(2, 3))
    assert not world.cache.allocate(lease, 12)
    assert moves(world.executor.orders) == [("device", "host", 2)]
    assert world.cache.is_room_coming
    assert world.num_free() == 1  # not one more than before, until the copy is there
    assert world.copies(prompt(1, 3)) == ["D", "D"]
    world.check()
    world.finish()
    assert world.copies(prompt(1, 3)) == ["D", "H"]
    assert not world.cache.is_room_coming
    assert world.cache.allocate(lease, 12)
    world.end(lease, prompt(2, 3))
    assert world.cache.match(NAMESPACE, prompt(1, 3)).num_tokens == 12


def test_what_is_on_its_way_is_not_ordered_twice() -> None:
    world = TierWorld(6, num_host=6)
    world.store(prompt(1, 3))
    world.store(prompt(2, 3))
    lease = world.begin(prompt(3, 2))
    for _ in range(3):
        assert not world.cache.allocate(lease, 8)
        world.advance()
    assert moves(world.executor.submitted) == [("device", "host", 2)]
    assert not world.cache.allocate(lease, 12)
    assert moves(world.executor.submitted) == [("device", "host", 2), ("device", "host", 1)]
    # What leads to blocks that are being copied waits for them.
    assert world.cache.stats().num_evictable == 0


def test_the_tail_of_the_least_recently_used_goes_first() -> None:
    world = TierWorld(6, num_host=6)
    for number in (1, 2, 3):
        world.store(prompt(number, 2))
    world.store(prompt(1, 2))
    order = []
    for _ in range(6):
        assert not world.tiers.make_room(Tier.DEVICE, world.num_free() + 1)
        (job,) = world.tiers.desk._jobs.values()
        (node,) = job.targets
        order.append((int.from_bytes(node.tokens[:4], "big") // 1000, node.start))
        world.finish()
    assert order == [(2, 1), (2, 0), (3, 1), (3, 0), (1, 1), (1, 0)]


def test_one_order_carries_what_has_to_go_leaves_first() -> None:
    world = TierWorld(4, num_host=4)
    shared = prompt(1, 1)
    world.store(tokens(shared, prompt(2, 1)))
    world.store(tokens(shared, prompt(3, 1)))
    assert not world.tiers.make_room(Tier.DEVICE, 3)
    (job,) = world.tiers.desk._jobs.values()
    assert [node.start for node in job.targets] == [1, 1]  # their parent follows when they are gone
    world.finish()
    assert world.tiers.make_room(Tier.DEVICE, 3)
    assert not world.tiers.make_room(Tier.DEVICE, 4)
    world.finish()
    assert world.copies(tokens(shared, prompt(2, 1))) == ["H", "H"]
    assert world.num_free() == 4


def test_a_clean_copy_is_dropped_without_another_copy() -> None:
    world = TierWorld(4, num_disk=8)
    world.store(prompt(1, 3))
    world.advance()
    world.finish()
    assert world.copies(prompt(1, 3)) == ["Dd"]
    assert world.tiers.make_room(Tier.DEVICE, 3)
    assert world.copies(prompt(1, 3)) == ["Dd", "d"]
    assert moves(world.executor.submitted) == [("device", "disk", 3)]
    world.check()


def test_without_a_place_below_blocks_are_dropped() -> None:
    world = TierWorld(4, num_host=2)
    world.store(prompt(1, 2))
    world.cache.demote(NAMESPACE, prompt(1, 2), 0)
    world.settle()
    lease = world.begin(prompt(1, 2))  # holds all of the host's blocks
    world.store(prompt(2, 4))
    assert world.tiers.make_room(Tier.DEVICE, 1)
    assert world.executor.orders == []
    assert world.cache.match(NAMESPACE, prompt(2, 4)).num_tokens == 12
    world.end(lease, prompt(1, 2), 0)


def test_room_in_the_host_is_made_towards_the_disk_first() -> None:
    world = TierWorld(2, num_host=2, num_disk=4)
    world.store(prompt(1, 2))
    world.cache.demote(NAMESPACE, prompt(1, 2), 0)
    world.settle()
    world.tiers._unsaved.clear()
    world.store(prompt(2, 2))
    assert world.copies(prompt(1, 2)) in (["H"], ["Hd"])


def test_spare_copies_in_the_host_go_before_what_is_only_there() -> None:
    world = TierWorld(8, num_host=4)
    for number in (1, 2):
        world.store(prompt(number, 2))
        world.cache.demote(NAMESPACE, prompt(number, 2), 0)
        world.settle()
    lease = world.start(prompt(2, 2))
    world.settle()
    assert world.copies(prompt(2, 2)) == ["DH"]
    assert world.tiers.make_room(Tier.HOST, 1)
    assert world.copies(prompt(2, 2)) == ["D"]  # though locked, and newer
    assert world.copies(prompt(1, 2)) == ["H"]
    world.end(lease, prompt(2, 2))


def test_spare_copies_on_disk_go_after_what_is_only_there() -> None:
    world = TierWorld(4, num_disk=4)
    world.store(prompt(1, 2))
    world.advance()
    world.settle()
    world.cache.demote(NAMESPACE, prompt(1, 2), 0)
    world.store(prompt(2, 2))
    world.advance()
    world.settle()
    assert (world.copies(prompt(1, 2)), world.copies(prompt(2, 2))) == (["d"], ["Dd"])
    assert world.tiers.make_room(Tier.DISK, 2)
    assert (world.copies(prompt(1, 2)), world.copies(prompt(2, 2))) == ([], ["Dd"])
    assert not world.tiers.make_room(Tier.DISK, 3, takes_spares=False)
    assert world.tiers.make_room(Tier.DISK, 3)
    assert world.copies(prompt(2, 2)) == ["D"]


def test_a_copy_being_made_is_no_spare_yet() -> None:
    world = TierWorld(8, num_host=2)
    world.store(prompt(1, 2))
    world.cache.demote(NAMESPACE, prompt(1, 2), 0)
    world.settle()
    lease = world.start(prompt(1, 2))
    assert not world.tiers.make_room(Tier.HOST, 1)
    assert world.copies(prompt(1, 2)) == ["H"]
    world.settle()
    assert world.tiers.make_room(Tier.HOST, 1)
    assert world.copies(prompt(1, 2)) == ["D"]
    world.end(lease, prompt(1, 2))


def test_a_reserve_is_kept_free_on_the_device() -> None:
    world = TierWorld(64, num_host=64)
    world.store(prompt(1, 64))
    assert world.num_free() == 0
    world.advance()
    assert moves(world.executor.orders) == [("device", "host", 2)]
    world.settle()
    assert world.num_free() == 2
    world.advance()
    assert world.executor.orders == []


def test_no_more_than_half_of_a_tier_is_emptied_for_one_node() -> None:
    world = TierWorld(8, num_host=4)
    world.store(prompt(1, 4))
    world.cache.demote(NAMESPACE, prompt(1, 4), 0)
    world.settle()
    world.store(prompt(2, 8))
    assert not world.tiers.make_room(Tier.DEVICE, 8)
    assert moves(world.executor.submitted)[1:] == [("device", "host", 2)]
    world.settle()
    assert world.cache.match(NAMESPACE, prompt(1, 4)).num_tokens == 8


# ------------------------------------------------------------ promotion


def stored_below(world: TierWorld, number: int, num_blocks: int, tier: Tier = Tier.HOST) -> None:
    """A prompt that is in ``tier`` alone."""
    ids = prompt(number, num_blocks)
    world.store(ids)
    world.advance()
    world.settle()
    world.cache.demote(NAMESPACE, ids, 0)
    world.settle()
    assert {node.tier for node in world.path(ids)} == {tier}


def test_a_promotion_has_all_its_blocks_or_does_not_begin() -> None:
    world = TierWorld(6, num_host=8)
    stored_below(world, 1, 4)
    holder = world.start(prompt(2, 3))
    num_orders = len(world.executor.submitted)
    lease = world.begin(tokens(prompt(1, 4), 7))
    assert not world.cache.allocate(lease, 17)
    assert not world.cache.allocate(lease, 17)
    assert len(world.executor.submitted) == num_orders
    assert world.num_free() == 3
    assert lease.block_ids == []
    world.end(holder, prompt(2, 3), 0)
    assert world.cache.allocate(lease, 17)
    assert moves(world.executor.orders) == [("host", "device", 4)]
    assert lease.is_loading
    assert len(lease.block_ids) == 5
    world.settle()
    assert not lease.is_loading
    assert (lease.num_cached_tokens, lease.num_host_tokens, lease.num_disk_tokens) == (16, 16, 0)
    world.end(lease, tokens(prompt(1, 4), 7))


def spread_over_tiers(world: TierWorld) -> np.ndarray:
    """A prompt of which one block is on the device, two are in the host, three on disk."""
    head, middle, tail = prompt(1, 1), prompt(2, 2), prompt(3, 3)
    ids = tokens(head, middle, tail)
    for end in (4, 12, 24):
        world.store(ids[:end])
    world.advance()
    world.settle()
    world.tiers.desk._resting_until[Tier.HOST] = world.now_s + 1.0
    world.cache.demote(NAMESPACE, ids, 12)
    world.now_s += 1.0
    world.cache.demote(NAMESPACE, ids, 4)
    world.settle()
    assert world.copies(ids) == ["Dd", "Hd", "d"]
    return ids


def test_each_tier_has_its_own_order_and_the_lease_waits_for_both() -> None:
    world = TierWorld(8, num_host=8, num_disk=8)
    ids = tokens(spread_over_tiers(world), 7)
    lease = world.start(ids)
    assert moves(world.executor.orders) == [("host", "device", 2), ("disk", "device", 3)]
    assert (lease.num_cached_tokens, lease.num_host_tokens, lease.num_disk_tokens) == (24, 8, 12)
    world.finish(index=1)
    assert lease.is_loading
    assert world.copies(ids) == ["Dd", "Hd", "Dd"]
    world.finish()
    assert not lease.is_loading
    world.end(lease, ids)


def test_what_arrived_below_a_failed_promotion_goes_with_it() -> None:
    world = TierWorld(8, num_host=8, num_disk=8)
    ids = tokens(spread_over_tiers(world), 7)
    lease = world.start(ids)
    world.finish(0)
    assert lease.has_failed
    world.end(lease, ids, 0)  # the disk's order goes on, and holds its path
    again = world.start(ids[:7])  # in the midst of what is lost
    assert again.num_cached_tokens == 4
    world.settle()
    world.end(again, ids[:7])
    assert world.copies(ids) == ["Dd", "D"]
    assert world.cache.match(NAMESPACE, ids).num_tokens == 7
    assert world.cache.stats().num_locked == 0
    assert world.num_cached(Tier.HOST) == 0


def test_only_the_tiers_worth_it_are_loaded() -> None:
    world = TierWorld(8, num_host=8, num_disk=8, token_s=0.1)
    ids = tokens(spread_over_tiers(world), 7)
    world.planner.record(Tier.HOST, 1, 0.01)
    world.planner.record(Tier.DISK, 1, 0.5)
    lease = world.start(ids)
    assert moves(world.executor.orders) == [("host", "device", 2)]
    assert (lease.num_cached_tokens, lease.num_host_tokens, lease.num_disk_tokens) == (12, 8, 0)
    world.settle()
    world.end(lease, ids)
    assert world.copies(ids) == ["Dd", "DHd", "Dd", "D"]


def test_a_second_request_waits_for_the_same_promotion() -> None:
    world = TierWorld(8, num_host=8)
    stored_below(world, 1, 2)
    ids, other = tokens(prompt(1, 2), 7), tokens(prompt(1, 2), 8)
    num_orders = len(world.executor.submitted)
    first, second = world.start(ids), world.start(other)
    assert len(world.executor.submitted) == num_orders + 1
    assert first.block_ids[:2] == second.block_ids[:2]
    assert second.is_loading
    world.settle()
    assert not second.is_loading
    world.end(first, ids)
    world.end(second, other)


def test_a_request_that_ends_while_loading_leaves_the_promotion_to_others() -> None:
    world = TierWorld(8, num_host=8)
    stored_below(world, 1, 2)
    ids = tokens(prompt(1, 2), 7)
    world.end(world.start(ids), ids)
    assert world.num_free() == 6
    world.settle()
    assert world.copies(prompt(1, 2)) == ["DH"]
    assert world.cache.stats().num_evictable == 2


def test_a_failed_promotion_drops_its_subtree_and_nothing_else() -> None:
    world = TierWorld(12, num_host=12)
    shared, left, right = prompt(1, 2), prompt(2, 2), prompt(3, 2)
    world.store(tokens(shared, left))
    world.store(tokens(shared, right))
    while not world.tiers.make_room(Tier.DEVICE, 12):
        world.settle()
    assert world.copies(tokens(shared, left)) == ["H", "H"]
    ids = tokens(shared, left, 7)
    lease = world.start(ids)
    world.finish(3)
    assert lease.has_failed
    assert not lease.is_loading
    # Held: a miss for everybody, and dropped as soon as nobody holds it.
    assert world.cache.match(NAMESPACE, ids).num_tokens == 8
    world.end(lease, ids, 0)
    assert world.copies(tokens(shared, left)) == ["DH"]
    assert world.copies(tokens(shared, right)) == ["DH", "H"]
    assert world.num_free() == 10
    assert world.cache.stats().tiers[0].failed_total == 1
    assert world.num_cached(Tier.HOST) == 4


def test_an_edge_that_arrived_in_part_is_lost_whole() -> None:
    world = TierWorld(8, num_host=8)
    stored_below(world, 1, 4)
    ids = tokens(prompt(1, 4), 7)
    lease = world.start(ids)
    world.finish(3)
    world.end(lease, ids, 0)
    assert world.cache.match(NAMESPACE, ids).num_tokens == 0
    assert world.num_free() == 8
    assert world.num_free(Tier.HOST) == 8


def test_what_is_lost_and_held_is_no_match_and_can_be_computed_again() -> None:
    world = TierWorld(16, num_host=8)
    stored_below(world, 1, 4)
    ids, other = tokens(prompt(1, 4), 7), tokens(prompt(1, 2), 8)
    lease = world.start(ids)
    world.finish(0)
    assert lease.has_failed
    again = world.start(other)
    assert again.num_cached_tokens == 0
    world.cache.commit(again, other, 8)  # splits the edge that is lost
    world.check()
    assert world.copies(prompt(1, 4)) == ["D"]
    assert world.store(tokens(prompt(1, 2), 9)) == 8
    world.end(lease, ids, 0)
    world.end(again, other)
    assert world.cache.match(NAMESPACE, ids).num_tokens == 8
    assert world.cache.stats().num_locked == 0
    assert world.num_cached(Tier.HOST) == 0


def test_a_split_of_what_is_lost_leaks_no_lock() -> None:
    world = TierWorld(16, num_host=8)
    stored_below(world, 1, 4)
    ids = tokens(prompt(1, 4), 7)
    lease = world.start(ids)
    world.finish(0)
    node = world.tree.roots[NAMESPACE.root_hash].children
    assert node is not None
    (lost,) = node
    world.tree.split_tail(lost, 1)
    world.check()
    world.end(lease, ids, 0)
    assert not world.tree.roots
    assert world.num_free(Tier.HOST) == 8


def test_a_node_that_is_split_while_it_is_copied_arrives_in_both_halves() -> None:
    world = TierWorld(8, num_host=8)
    world.store(prompt(1, 4))
    world.cache.demote(NAMESPACE, prompt(1, 4), 0)
    lease = world.start(tokens(prompt(1, 2), 7, 8))
    assert world.copies(prompt(1, 4)) == ["D", "D"]
    world.check()
    world.finish()
    assert world.copies(prompt(1, 4)) == ["DH", "H"]
    world.end(lease, tokens(prompt(1, 2), 7, 8))


def test_half_of_a_split_node_may_fail() -> None:
    world = TierWorld(8, num_host=8)
    stored_below(world, 1, 4)
    ids, half = tokens(prompt(1, 4), 7), tokens(prompt(1, 2), 7)
    lease = world.start(ids)
    shorter = world.start(half)
    assert world.copies(prompt(1, 4)) == ["H", "H"]
    world.finish(2)
    # Both rest on the order that failed: what arrived is found again by the next admission.
    assert lease.has_failed
    world.end(lease, ids, 0)
    world.end(shorter, half, 0)
    assert world.copies(prompt(1, 4)) == ["DH"]
    assert world.cache.match(NAMESPACE, ids).num_tokens == 8


def test_a_table_is_whole_though_another_split_what_it_waits_for() -> None:
    world = TierWorld(8, num_host=8)
    stored_below(world, 1, 4)
    ids = tokens(prompt(1, 4), 7)
    lease = world.begin(ids)
    other = world.begin(prompt(1, 2))  # splits the edge between begin and allocate
    assert world.cache.allocate(lease, 17)
    assert moves(world.executor.orders) == [("host", "device", 4)]
    assert len(lease.block_ids) == 5
    world.settle()
    nodes = world.path(prompt(1, 4))
    assert [block_id for node in nodes for block_id in node.block_ids or ()] == lease.block_ids[:4]
    world.end(lease, ids)
    world.end(other, prompt(1, 2), 0)


def test_insert_onto_a_lower_tier_adopts_the_computed_blocks() -> None:
    world = TierWorld(8, num_host=8, token_s=0.001)
    stored_below(world, 1, 3)
    world.planner.record(Tier.HOST, 1, 1.0)  # slower than computing
    lease = world.start(prompt(1, 3))
    assert lease.num_cached_tokens == 0
    assert not lease.is_loading
    blocks = list(lease.block_ids)
    world.end(lease, prompt(1, 3))
    assert world.copies(prompt(1, 3)) == ["DH"]
    assert list(world.path(prompt(1, 3))[0].block_ids or ()) == blocks
    assert world.cache.stats().num_free == 5


# ------------------------------------------------------------ failures


def test_a_failed_demotion_rests_its_tier() -> None:
    world = TierWorld(4, num_host=4)
    world.store(prompt(1, 4))
    assert not world.tiers.make_room(Tier.DEVICE, 2)
    world.finish(0)
    assert world.num_free(Tier.HOST) == 4
    assert not world.cache.is_room_coming
    assert world.cache.match(NAMESPACE, prompt(1, 4)).num_tokens == 16
    assert world.tiers.make_room(Tier.DEVICE, 2)  # dropped: nothing is asked of the host now
    assert len(world.executor.submitted) == 1
    world.store(prompt(2, 2))
    world.now_s += REST_AFTER_FAILURE_S
    assert not world.tiers.make_room(Tier.DEVICE, 2)
    assert len(world.executor.submitted) == 2
    world.settle()
    world.check()


def test_a_demotion_that_failed_half_way_keeps_what_arrived() -> None:
    world = TierWorld(4, num_host=4)
    shared = prompt(1, 2)
    world.store(tokens(shared, prompt(2, 1)))
    world.store(tokens(shared, prompt(3, 1)))
    assert not world.tiers.make_room(Tier.DEVICE, 2)
    world.finish(1)
    assert world.num_free() == 1
    assert world.num_cached(Tier.HOST) == 1
    assert world.num_free(Tier.HOST) == 3


def test_the_disk_takes_over_where_the_host_rests() -> None:
    world = TierWorld(4, num_host=4, num_disk=8)
    world.store(prompt(1, 2))
    world.tiers._unsaved.clear()
    assert not world.tiers.make_room(Tier.DEVICE, 3)
    world.finish(0)
    assert not world.tiers.make_room(Tier.DEVICE, 3)
    assert moves(world.executor.orders) == [("device", "disk", 1)]
    world.settle()
    assert world.copies(prompt(1, 2))[-1] == "d"


def test_what_came_below_a_node_in_the_meantime_keeps_it_from_the_disk() -> None:
    world = TierWorld(4, num_host=4, num_disk=8)
    world.store(prompt(1, 1))
    world.tiers._unsaved.clear()
    world.tiers.desk._resting_until[Tier.HOST] = 5.0
    assert not world.tiers.make_room(Tier.DEVICE, 4)
    assert moves(world.executor.orders) == [("device", "disk", 1)]
    world.now_s = 6.0
    longer = tokens(prompt(1, 1), prompt(2, 1))
    world.store(longer)
    world.tiers._unsaved.clear()
    world.cache.demote(NAMESPACE, longer, 4)
    world.finish(index=1)
    assert world.copies(longer) == ["D", "H"]
    world.finish()
    assert world.copies(longer) == ["Dd", "H"]
    assert world.tiers.make_room(Tier.DEVICE, 4) is False
    world.settle()
    assert world.copies(longer) == ["Hd", "H"]


# ------------------------------------------------------------ write-behind


def test_ended_requests_are_written_in_batches_parents_first() -> None:
    world = TierWorld(16, num_disk=16, write_blocks=3)
    world.store(prompt(1, 2))
    world.store(tokens(prompt(1, 2), prompt(2, 3)))
    sizes = []
    for _ in range(5):
        world.advance()
        assert len(world.executor.orders) <= 1  # one batch at a time
        if world.executor.orders:
            sizes.append(len(world.executor.orders[0].source_ids))
            world.executor.finish()
    world.advance()
    assert sizes == [3, 2]
    written = [key for order in world.executor.submitted for key in order.keys]
    assert written[0].parent_hash == written[0].root_hash
    assert all(a.block_hash == b.parent_hash for a, b in pairwise(written))
    assert len({key.block_hash for key in written}) == 5  # nothing twice
    world.store(tokens(prompt(1, 2), prompt(2, 3)))
    world.advance()
    assert world.executor.orders == []
    assert not world.cache.is_saving


def test_saving_gives_up_where_all_that_is_on_disk_is_in_use() -> None:
    world = TierWorld(8, num_disk=2)
    world.store(prompt(1, 2))
    world.advance()
    world.settle()
    world.store(prompt(2, 2))
    world.advance()
    assert world.executor.orders == []
    assert not world.cache.is_saving
    assert world.copies(prompt(1, 2)) == ["Dd"]
    world.tree.drop(world.path(prompt(1, 2))[0])
    world.advance()
    assert not world.executor.orders
    world.store(prompt(2, 2))  # what is used again is written
    world.advance()
    assert moves(world.executor.orders) == [("device", "disk", 2)]


def test_no_block_is_written_without_the_one_before_it() -> None:
    world = TierWorld(16, num_disk=4)
    world.store(prompt(9, 2))
    world.advance()
    world.settle()  # two of four are in use
    world.store(prompt(1, 4))
    world.store(tokens(prompt(1, 4), prompt(2, 1)))
    world.store(prompt(3, 1))
    world.advance()
    saved = {key.block_hash for order in world.executor.submitted for key in order.keys}
    for order in world.executor.submitted:
        for key in order.keys:
            assert key.parent_hash == key.root_hash or key.parent_hash in saved


def test_a_failed_batch_rests_the_disk_and_nothing_is_lost() -> None:
    world = TierWorld(8, num_disk=8)
    world.store(prompt(1, 2))
    world.advance()
    world.finish(0)
    assert world.executor.orders == []
    assert world.copies(prompt(1, 2)) == ["D"]
    assert world.num_free(Tier.DISK) == 8
    world.store(prompt(1, 2))
    world.advance()
    assert world.executor.orders == []
    world.now_s += REST_AFTER_FAILURE_S
    world.advance()
    assert moves(world.executor.orders) == [("device", "disk", 2)]


# ------------------------------------------------------------ counting


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_hit_that_waits_for_room_is_counted_once(is_slow: bool) -> None:
    world = TierWorld(6, num_host=8, token_s=0.1)
    stored_below(world, 1, 2)
    world.planner.record(Tier.HOST, 1, 9.0 if is_slow else 0.01)
    holder = world.start(prompt(2, 5))
    ids = tokens(prompt(1, 2), 7)
    for _ in range(3):
        lease = world.begin(ids)
        assert not world.cache.allocate(lease, len(ids))
        world.end(lease, ids, 0)
    world.end(holder, prompt(2, 5), 0)
    lease = world.start(ids)
    (host,) = world.cache.stats().tiers
    assert (host.loads_total, host.recomputes_total) == ((0, 1) if is_slow else (1, 0))
    assert host.recompute_s_total == pytest.approx(2 * BLOCK_SIZE * 0.1)
    assert host.load_s_total == pytest.approx(2 * (9.0 if is_slow else 0.01))
    world.settle()
    world.end(lease, ids)


def test_a_node_whose_child_goes_to_make_room_for_it_is_queued_once() -> None:
    world = TierWorld(3, num_host=1, num_disk=1)
    shared, left, right = prompt(1, 1), prompt(2, 1), prompt(3, 1)
    for tail, place in ((left, Tier.DISK), (right, Tier.HOST)):
        world.store(tokens(shared, tail))
        world.tiers._unsaved.clear()
        world.tiers.desk._resting_until[Tier.HOST] = 1.0 if place is Tier.DISK else 0.0
        world.cache.demote(NAMESPACE, tokens(shared, tail), 4)
        world.settle()
    assert world.copies(tokens(shared, left)) == ["D", "d"]
    assert world.copies(tokens(shared, right)) == ["D", "H"]
    world.tiers._unsaved.clear()
    # The host is to take the shared block, the disk the host's, and the disk's has to go.
    assert not world.tiers.make_room(Tier.DEVICE, 3)
    assert moves(world.executor.orders) == [("host", "disk", 1)]
    world.check()
    world.settle()
    assert not world.tiers.make_room(Tier.DEVICE, 3)
    world.settle()
    assert world.copies(tokens(shared, right)) == ["H", "d"]
    assert world.tiers.make_room(Tier.DEVICE, 3)


def test_nothing_arrives_behind_what_failed() -> None:
    world = TierWorld(4, num_host=4)
    world.store(prompt(1, 2))
    world.store(prompt(2, 1))
    assert not world.tiers.make_room(Tier.DEVICE, 4)
    assert moves(world.executor.orders) == [("device", "host", 3)]
    world.finish(1)  # of two blocks that are one node
    assert world.num_cached(Tier.HOST) == 0
    assert world.copies(prompt(2, 1)) == ["D"]
    assert world.num_free(Tier.HOST) == 4


def test_a_device_node_above_the_host_is_dropped_rather_than_left_on_disk_alone() -> None:
    world = TierWorld(2, num_host=2, num_disk=8)
    ids = tokens(prompt(1, 1), prompt(2, 1))
    world.store(ids)
    world.advance()
    world.settle()
    world.cache.demote(NAMESPACE, ids, 4)
    world.settle()
    assert world.copies(ids) == ["Dd", "Hd"]
    world.tiers.desk._resting_until[Tier.HOST] = 1.0
    assert world.tiers.make_room(Tier.DEVICE, 2)
    world.check()
    assert world.copies(ids) == []


def test_both_halves_of_a_split_copy_are_spare() -> None:
    world = TierWorld(8, num_host=4)
    stored_below(world, 1, 4)
    ids = tokens(prompt(1, 4), 7)
    lease = world.start(ids)
    world.settle()
    world.end(world.start(prompt(1, 2)), prompt(1, 2), 0)
    assert world.copies(prompt(1, 4)) == ["DH", "DH"]
    assert world.tiers.make_room(Tier.HOST, 4)
    assert world.copies(prompt(1, 4)) == ["D", "D"]
    world.end(lease, ids)


def test_what_is_on_its_way_down_is_loaded_once_it_is_there() -> None:
    world = TierWorld(4, num_host=2, num_disk=4)
    world.store(prompt(1, 2))
    world.cache.demote(NAMESPACE, prompt(1, 2), 0)
    world.tiers._unsaved.clear()
    world.settle()
    assert not world.tiers.make_room(Tier.HOST, 2)
    assert moves(world.executor.orders) == [("host", "disk", 2)]
    ids = tokens(prompt(1, 2), 7)
    lease = world.begin(ids)
    assert not world.cache.allocate(lease, 9)
    assert len(world.executor.orders) == 1
    world.finish()
    assert world.cache.allocate(lease, 9)
    assert [(order.target, len(order.source_ids)) for order in world.executor.orders] == [
        (Tier.DEVICE, 2)
    ]
    world.settle()
    world.end(lease, ids)


def test_a_session_is_sent_down_whole_when_the_host_is_full() -> None:
    """Room is made for all of its nodes together, at the cost of what has been there longest."""
    world = TierWorld(16, 6)
    for number in (1, 2, 3):
        turn = prompt(number, 3)
        world.store(turn)
        longer = tokens(turn, range(9000, 9002))
        world.store(longer)
        world.cache.demote(NAMESPACE, longer, 0)
        world.settle()
        assert set(world.copies(longer)) == {"H"}
    assert world.num_cached(Tier.DEVICE) == 0
    assert world.num_cached(Tier.HOST) <= 6


def test_nothing_is_demoted_for_a_growth_that_cannot_be_had() -> None:
    world = TierWorld(4, num_host=4)
    world.store(prompt(1, 2))
    assert world.tiers.take(5, None) is None  # of 4 that are free or evictable
    assert not world.cache.has_transfers
    assert world.tiers.take(4, None) is None
    assert world.cache.has_transfers
    world.finish()
    ids = world.tiers.take(4, None)
    assert sorted(ids or ()) == [0, 1, 2, 3]
