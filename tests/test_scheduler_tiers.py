"""Requests whose blocks come from below the device: they wait, others go on, every one ends."""

from __future__ import annotations

import pytest

from cache_store.events import Tier
from model_worker.protocol import FinishReason, PrefixAction
from tests.scheduler_kit import BLOCK, LINK, World, answer_of, prompt


def world_with_stored(ids: list[int], num_blocks: int = 64, max_batched: int = 16) -> World:
    """``ids`` are in the host alone."""
    world = World(num_blocks, num_host=64, max_batched=max_batched)
    world.add("before", ids, 0)
    world.run()
    world.act(PrefixAction.DEMOTE, ids)
    world.settle()
    assert world.act(PrefixAction.INSPECT, ids).num_host_tokens == len(ids)
    return world


def account(world: World, name: str) -> tuple[int | None, int, int]:
    first = world.outputs[name][0]
    return first.num_cached_tokens, first.num_host_tokens, first.num_disk_tokens


def test_a_loading_request_holds_up_nobody() -> None:
    world = world_with_stored(prompt(16))
    world.add("loads", [*prompt(16), 5], 4)
    world.add("other", prompt(9, 1), 4)
    for _ in range(4):
        world.step()
    assert world.tokens("other") == answer_of(prompt(9, 1), 4)
    assert "loads" not in world.outputs
    assert world.engine.stats().num_running == 1
    world.step()
    assert world.engine.is_stalled
    world.copier.finish()
    world.step()
    assert len(world.tokens("loads")) == 1  # in the very step after
    world.run()
    assert world.tokens("loads") == answer_of([*prompt(16), 5], 4)
    assert account(world, "loads") == (16, 16, 0)


def test_a_failed_load_is_computed_and_the_account_is_put_right() -> None:
    world = world_with_stored(prompt(16))
    world.add("loads", [*prompt(16), 5], 4)
    world.step()
    world.copier.finish(num_done=2)
    world.run()
    assert world.tokens("loads") == answer_of([*prompt(16), 5], 4)
    assert account(world, "loads") == (0, 0, 0)
    told = [o for o in world.outputs["loads"] if o.num_cached_tokens is not None]
    assert len(told) == 1
    assert world.engine.stats().prompt_tokens_computed_total == 16 + 17


@pytest.mark.parametrize("arrives", [True, False])
def test_abort_while_loading_leaves_no_lock(arrives: bool) -> None:
    world = world_with_stored(prompt(16))
    world.add("loads", [*prompt(16), 5], 4)
    world.step()
    world.engine.abort(LINK, "loads")
    world.collect()
    world.engine.check_integrity()
    assert world.ending("loads").finish_reason is FinishReason.ABORT
    world.copier.finish(num_done=None if arrives else 0)
    world.engine.advance_transfers()
    world.engine.check_integrity()
    stats = world.engine.stats()
    assert (stats.num_locked_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)
    report = world.act(PrefixAction.INSPECT, prompt(16))
    assert report.num_device_tokens == (16 if arrives else 0)
    assert report.num_host_tokens == 0


def test_a_loading_request_is_preempted_like_any_other() -> None:
    world = world_with_stored(prompt(16), num_blocks=12)
    world.add("old", prompt(20, 1), 20)  # 5 blocks at first, 10 in the end
    world.step()
    world.add("loads", [*prompt(16), 5], 4)  # 5 blocks
    for _ in range(12):
        world.step()
    stats = world.engine.stats()
    assert (stats.preemptions_total, stats.num_running, stats.num_waiting) == (1, 1, 1)
    world.run()
    assert world.tokens("old") == answer_of(prompt(20, 1), 20)
    assert world.tokens("loads") == answer_of([*prompt(16), 5], 4)
    told = [o for o in world.outputs["loads"] if o.num_cached_tokens is not None]
    assert len(told) == 1


def test_a_running_request_waits_for_a_copy_instead_of_preempting() -> None:
    world = World(12, num_host=64, max_batched=64)
    world.add("before", prompt(16, 1), 0)
    world.run()
    world.add("old", prompt(16, 2), 12)  # 8 blocks in the end
    world.add("young", prompt(8, 3), 12)  # 5 blocks in the end
    for _ in range(30):
        world.step()
        if world.engine.is_stalled:
            break
    assert world.cache.is_room_coming
    assert world.engine.stats().preemptions_total == 0
    world.copier.finish()
    world.step()
    assert not world.engine.is_stalled
    world.run()
    assert world.tokens("old") == answer_of(prompt(16, 2), 12)
    assert world.tokens("young") == answer_of(prompt(8, 3), 12)


def test_the_oldest_is_not_preempted_for_a_copy_that_holds_blocks() -> None:
    world = World(8, num_disk=16, max_batched=64)
    world.add("before", prompt(12, 1), 0)
    world.run()
    world.engine.advance_transfers()
    assert [order.target for order in world.copier.orders] == [Tier.DISK]  # three blocks are held
    world.add("old", prompt(16, 2), 9)  # 4 blocks at first, 7 in the end
    for _ in range(7):
        world.step()
    assert world.engine.is_stalled
    assert len(world.tokens("old")) == 5  # up to the end of its fifth block
    assert world.engine.stats().preemptions_total == 0
    world.copier.finish()
    world.run()
    assert world.tokens("old") == answer_of(prompt(16, 2), 9)
    assert world.engine.stats().preemptions_total == 0


@pytest.mark.parametrize("is_stored", [False, True])
def test_max_tokens_0_computes_the_prompt_and_says_nothing(is_stored: bool) -> None:
    ids = prompt(18)
    world = world_with_stored(ids) if is_stored else World(64, num_host=64)
    world.add("warm", ids, 0)
    world.run()
    ending = world.ending("warm")
    assert ending.finish_reason is FinishReason.LENGTH
    assert world.tokens("warm") == []
    assert account(world, "warm") == ((17, 17, 0) if is_stored else (0, 0, 0))
    world.add("next", [*ids, 3], 4)
    world.run()
    assert world.tokens("next") == answer_of([*ids, 3], 4)
    assert account(world, "next") == (18, 0, 0)


def test_a_burst_on_one_loading_prefix_loads_it_once() -> None:
    world = world_with_stored(prompt(24), max_batched=64)
    for number in range(4):
        world.add(f"r{number}", [*prompt(24), 1 + number, 2], 3)
    world.step()
    (order,) = world.copier.orders
    assert len(order.source_ids) == 24 // BLOCK
    world.copier.finish()
    world.run()
    for number in range(4):
        assert world.tokens(f"r{number}") == answer_of([*prompt(24), 1 + number, 2], 3)
        assert account(world, f"r{number}") == (24, 24, 0)


def test_a_burst_on_a_prefix_that_is_lost_computes_it_once() -> None:
    world = world_with_stored(prompt(24), max_batched=64)
    for number in range(4):
        world.add(f"r{number}", [*prompt(24), 1 + number, 2], 3)
    world.step()
    world.copier.finish(num_done=0)
    world.run()
    for number in range(4):
        assert world.tokens(f"r{number}") == answer_of([*prompt(24), 1 + number, 2], 3)
    assert [account(world, f"r{number}")[0] for number in range(4)] == [0, 24, 24, 24]
    assert world.engine.stats().prompt_tokens_computed_total == 24 + 26 + 3 * 2


def test_waiting_for_room_that_is_coming_ends_with_a_failed_copy_too() -> None:
    world = World(8, num_host=8, max_batched=64)
    world.add("before", prompt(28, 1), 0)
    world.run()
    world.add("new", prompt(20, 2), 4)
    world.step()
    assert world.engine.is_stalled
    world.copier.finish(num_done=0)
    world.step()  # the host rests: what is in the way is dropped
    assert len(world.tokens("new")) == 1
    world.run()
    assert world.tokens("new") == answer_of(prompt(20, 2), 4)
