"""Fairness between tenants: the counters, and what the scheduler makes of them."""

from __future__ import annotations

import math

import numpy as np

from cache_store.block_hash import Namespace
from model_worker.batch import ScheduledRequest
from model_worker.fair_queue import (
    ANSWER_TOKEN_COST,
    CREDIT_STEPS,
    RECENT_STEPS,
    FairQueue,
)
from model_worker.protocol import SamplingParams, TenantPolicy, TenantUsage
from model_worker.request import Request, RequestKey
from tests.scheduler_kit import LINK, World, answer_of, prompt

STEP = 16  # tokens of the largest step
CREDIT = float(CREDIT_STEPS * STEP)


def make_request(tenant: str, order: int, num_tokens: int = 100) -> Request:
    return Request.create(
        RequestKey(LINK, f"r{order}"),
        Namespace("f"),
        np.zeros(num_tokens, dtype=np.int32),
        SamplingParams(max_tokens=10),
        seed=0,
        arrival_s=0.0,
        order=order,
        max_model_len=1000,
        tenant=tenant,
    )


def served(queue: FairQueue) -> dict[str, float]:
    return {account.tenant: account.served for account in queue.accounts()}


def serve(queue: FairQueue, request: Request, num_tokens: int) -> None:
    queue.charge([ScheduledRequest.next_of(request, num_tokens)], num_tokens, 0)


def test_who_comes_is_lifted_to_the_least_served_less_a_credit() -> None:
    queue = FairQueue(STEP)
    first = make_request("a", 0)
    queue.came(first)
    assert served(queue) == {"a": -CREDIT}
    serve(queue, first, 1000 + CREDIT_STEPS * STEP)
    second, third = make_request("b", 1), make_request("c", 2)
    queue.came(second)
    queue.came(third)
    assert served(queue) == {"a": 1000.0, "b": 1000 - CREDIT, "c": 1000 - CREDIT}
    queue.left(third, was_running=False)
    serve(queue, second, 30)
    queue.left(second, was_running=False)
    serve(queue, first, 10)
    queue.came(second)  # what is left of its credit, and what the other has had meanwhile
    assert served(queue) == {"a": 1010.0, "b": 1030 - CREDIT}
    queue.left(second, was_running=False)
    serve(queue, first, 5000)
    queue.came(second)
    assert served(queue) == {"a": 6010.0, "b": 6010 - CREDIT}


def test_nobody_gains_by_leaving_and_coming_back() -> None:
    queue = FairQueue(STEP)
    first, second = make_request("a", 0), make_request("b", 1)
    queue.came(first)
    queue.came(second)
    for _ in range(5):
        serve(queue, second, 40)
        serve(queue, first, 1)
        queue.left(second, was_running=False)
        queue.came(second)
    assert served(queue) == {"a": 5 - CREDIT, "b": 200 - CREDIT}


def test_who_had_more_than_its_part_pays_for_it_when_it_returns() -> None:
    queue = FairQueue(STEP)
    first, second = make_request("a", 0), make_request("b", 1)
    queue.came(first)
    queue.came(second)
    serve(queue, first, 500)
    queue.left(first, was_running=False)
    queue.came(first)
    assert served(queue) == {"a": 500 - CREDIT, "b": -CREDIT}


def test_served_tokens_count_by_weight_and_those_of_answers_more() -> None:
    queue = FairQueue(STEP)
    queue.set_weights({"b": 4.0})
    long, short = make_request("a", 0), make_request("b", 1, num_tokens=1)
    queue.came(long)
    queue.came(short)
    before = served(queue)
    queue.charge([ScheduledRequest.next_of(long, 12), ScheduledRequest.next_of(short, 1)], 12, 1)
    after = served(queue)
    assert after["a"] - before["a"] == 12.0
    assert after["b"] - before["b"] == ANSWER_TOKEN_COST / 4
    queue.left(short, was_running=False)
    queue.charge([ScheduledRequest.next_of(long, 12)], 7, 3)
    assert served(queue)["a"] - after["a"] == 7 + 3 * ANSWER_TOKEN_COST


def test_turns_are_in_the_order_of_what_was_served() -> None:
    queue = FairQueue(STEP)
    requests = [make_request(tenant, order) for order, tenant in enumerate("aabcb")]
    for request in requests:
        queue.came(request)
    serve(queue, requests[0], 50)
    serve(queue, requests[3], 10)
    turns = queue.turns([], requests, STEP)
    waiting = [[request.order for request in turn.waiting] for turn in turns]
    assert waiting == [[2, 4], [3], [0, 1]]
    assert [turn.max_tokens for turn in turns] == [STEP, STEP // 4, STEP // 4]
    assert [turn.is_paced for turn in turns] == [False, True, True]


def test_one_tenant_has_one_turn_whoever_it_is() -> None:
    queue = FairQueue(STEP)
    requests = [make_request("a", order) for order in range(3)]
    for request in requests:
        queue.came(request)
    (turn,) = queue.turns(requests[:1], requests[1:], STEP)
    assert (turn.running, turn.waiting) == (requests[:1], requests[1:])
    assert (turn.max_tokens, turn.num_reserved, turn.num_least) == (STEP, 0, 0)
    assert turn.is_paced
    assert turn.budget(7, []) == 7


def test_steps_are_short_while_others_were_here_a_little_while_ago() -> None:
    queue = FairQueue(STEP)
    first, second = make_request("a", 0), make_request("b", 1)
    queue.came(first)
    queue.came(second)
    queue.left(second, was_running=False)
    assert queue.turns([], [first], STEP)[0].max_tokens == STEP // 4
    for _ in range(RECENT_STEPS + 100):
        serve(queue, first, 1)
        queue.turns([], [first], STEP)
    assert queue.turns([], [first], STEP)[0].max_tokens == STEP


def test_tenants_that_are_gone_are_forgotten() -> None:
    queue = FairQueue(STEP)
    stays = make_request("stays", 0)
    queue.came(stays)
    for number in range(1000):
        guest = make_request(f"t{number}", number + 1)
        queue.came(guest)
        queue.left(guest, was_running=False)
        serve(queue, stays, 100)
        for _ in range(10):
            queue.turns([], [stays], STEP)
    assert len(queue._accounts) < 900
    queue.check_integrity([], [stays])


def test_the_youngest_of_the_tenant_with_most_gives_way() -> None:
    queue = FairQueue(STEP)
    running = [make_request(tenant, order) for order, tenant in enumerate("abaab")]
    for request in running:
        queue.came(request)
        queue.admitted(request)
    assert queue.victim(running).order == 3
    queue.set_weights({"a": 3.0})
    assert queue.victim(running).order == 4
    assert queue.victim(running[:1]).order == 0
    assert queue.victim(running[:2]).order == 1  # never the oldest, if there is another


def test_one_without_a_place_gets_that_of_who_has_more_than_its_part() -> None:
    queue = FairQueue(STEP)
    running = [make_request("a", order) for order in range(4)]
    newcomer = make_request("b", 9)
    for request in running:
        queue.came(request)
        queue.admitted(request)
    assert queue.displaced_by(running[0], running) is None
    queue.came(newcomer)
    assert queue.displaced_by(newcomer, running) is running[3]
    assert queue.displaced_by(newcomer, running[:1]) is None
    queue.admitted(newcomer)
    assert queue.displaced_by(newcomer, [*running, newcomer]) is None  # it has one already


def test_a_full_queue_takes_those_of_tenants_that_have_less_than_their_part() -> None:
    queue = FairQueue(STEP)
    for order in range(8):
        assert queue.may_wait("a", 8)
        queue.came(make_request("a", order))
    assert not queue.may_wait("a", 8)
    for order in range(4):
        assert queue.may_wait("b", 8)
        queue.came(make_request("b", 100 + order))
    assert not queue.may_wait("b", 8)
    assert queue.may_wait("c", 8)


# ------------------------------------------------------------ in the scheduler


def flood(world: World, count: int, size: int = 20, max_tokens: int = 8) -> None:
    for number in range(count):
        ids = prompt(size, 100 + number)
        world.add(f"a{number}", ids, max_tokens, salt="a", tenant="a")


def steps_until(world: World, name: str) -> int:
    """Until the first token."""
    for number in range(1, 200):
        world.step()
        if world.tokens(name):
            return number
    raise AssertionError("it never came")


def test_a_newcomer_does_not_wait_for_a_flood() -> None:
    world = World(num_blocks=400, max_num_seqs=8, max_batched=16)
    flood(world, 8)
    world.step()
    world.add("b", prompt(12, 1), 2, salt="b", tenant="b")
    assert steps_until(world, "b") == 1
    world.run()
    assert world.tokens("b") == answer_of(prompt(12, 1), 2)
    assert world.tokens("a7") == answer_of(prompt(20, 107), 8)


def test_as_one_tenant_it_waits() -> None:
    world = World(num_blocks=400, max_num_seqs=8, max_batched=16)
    flood(world, 8)
    world.step()
    world.add("b", prompt(12, 1), 2, salt="b", tenant="a")
    assert steps_until(world, "b") > 8


def test_the_oldest_progresses_at_every_step_whoever_is_served_first() -> None:
    world = World(num_blocks=400, max_num_seqs=8, max_batched=16)
    world.add("oldest", prompt(60), 2, salt="a", tenant="a")
    world.step()
    for number in range(12):
        world.add(f"b{number}", prompt(30, number), 2, salt="b", tenant="b")
    for _ in range(6):
        world.step()
        items = world.runner.batches[-1].scheduled
        assert any(item.request.key.request_id == "oldest" for item in items)
    world.run()
    assert world.tokens("oldest") == answer_of(prompt(60), 2)


def test_floods_of_two_tenants_share_the_prefill() -> None:
    world = World(num_blocks=400, max_num_seqs=16, max_batched=16)
    world.engine.set_tenant_policies([TenantPolicy(tenant="b", weight=2.0)])
    for number in range(10):
        world.add(f"a{number}", prompt(40, number), 1, salt="a", tenant="a")
        world.add(f"b{number}", prompt(40, 50 + number), 1, salt="b", tenant="b")
    computed = {"a": 0, "b": 0}
    for _ in range(60):
        world.step()
        for item in world.runner.batches[-1].scheduled:
            computed[item.request.tenant] += item.num_scheduled_tokens
    assert sum(computed.values()) < 800  # both are still busy
    assert math.isclose(computed["b"] / computed["a"], 2.0, rel_tol=0.25)


def test_a_place_among_the_running_is_made_for_who_has_none() -> None:
    world = World(num_blocks=400, max_num_seqs=4, max_batched=64)
    flood(world, 6, size=8, max_tokens=40)
    world.step()
    world.step()
    assert world.engine.stats().num_running == 4
    world.add("b", prompt(8, 1), 3, salt="b", tenant="b")
    assert steps_until(world, "b") == 1
    assert world.engine.stats().preemptions_total == 1
    world.run()
    for number in range(6):
        assert world.tokens(f"a{number}") == answer_of(prompt(8, 100 + number), 40)


def test_room_is_made_for_who_has_nothing_running() -> None:
    world = World(num_blocks=40, max_num_seqs=16, max_batched=64)
    flood(world, 4, size=30, max_tokens=30)
    for _ in range(12):
        world.step()
    world.add("b", prompt(40, 1), 3, salt="b", tenant="b")
    assert steps_until(world, "b") <= 4
    world.run()
    assert world.tokens("b") == answer_of(prompt(40, 1), 3)


def test_a_flood_is_not_admitted_at_the_cost_of_anothers_cache() -> None:
    world = World(num_blocks=40, max_num_seqs=16, max_batched=64)
    world.add("b", prompt(40, 1), 1, salt="b", tenant="b")
    world.run()
    flood(world, 12, size=40, max_tokens=4)
    world.run()
    world.add("again", prompt(40, 1), 1, salt="b", tenant="b")
    world.run()
    assert world.outputs["again"][0].num_cached_tokens == 39


def test_who_has_what_is_reported_and_a_lone_nameless_tenant_is_not() -> None:
    world = World(num_blocks=60)
    world.add("x", prompt(9), 2)
    world.run()
    assert world.engine.stats().tenants == ()
    flood(world, 6, size=8, max_tokens=30)
    for _ in range(20):
        world.step()
    usage = {each.tenant: each for each in world.engine.stats().tenants}
    assert usage[""] == TenantUsage("", num_device_blocks=3)
    assert (usage["a"].num_running, usage["a"].num_waiting) == (4, 2)
    assert usage["a"].num_device_blocks >= 8
    world.run()


def test_caps_of_a_policy_are_in_bytes() -> None:
    world = World(num_blocks=60, block_bytes=1000)
    world.engine.set_tenant_policies([TenantPolicy(tenant="a", max_device_bytes=4999)])
    flood(world, 4, size=20, max_tokens=1)
    world.run()
    (usage,) = world.cache.tenant_usage()
    assert sum(usage.num_blocks.values()) == 4
