"""The speculator in earnest: what it finds, when it holds back, and what it may cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from cache_store.cache import Cache
from cache_store.eviction import make_eviction_policy
from cache_store.null_cache import NullCache
from cache_store.prefix_cache import PrefixCache
from model_worker.batch import ScheduledRequest
from model_worker.draft_account import GRACE, LOSS_SHARE, MAX_DRAFT_TOKENS
from model_worker.request import Request
from model_worker.speculation import AdaptiveSpeculator
from model_worker.step_costs import StepCosts
from tests.request_kit import make_request
from tests.scheduler_kit import World, answer_of, prompt

PERIOD = [11, 12, 13, 14, 15, 16, 17, 18]


def adaptive(cache: Cache, costs: StepCosts) -> AdaptiveSpeculator:
    """Without a clock: its own search takes no time."""
    return AdaptiveSpeculator(cache, costs, lambda: 0.0)


def measured(step_s: float = 0.040, draft_s: float = 0.002) -> StepCosts:
    costs = StepCosts()
    for size in (1, 2, 4, 8, 16, 32, 64, 128):
        costs.record(size, 0, step_s)
    costs.record(0, 100, step_s + 100 * draft_s)
    return costs


def running(cache: Cache, request: Request) -> ScheduledRequest:
    """In its decode: all but the last token are computed."""
    request.lease = cache.acquire(cache.match(request.namespace, request.token_ids[:0]))
    assert cache.allocate(request.lease, request.num_tokens)
    request.num_computed_tokens = request.num_tokens - 1
    return ScheduledRequest.next_of(request, 1)


def say(request: Request, *token_ids: int) -> None:
    """The step that computed all but the last of them is over."""
    for token_id in token_ids:
        request.append(token_id)
    request.num_computed_tokens = request.num_tokens - 1


def repeating(number: int = 0, **params: object) -> Request:
    return make_request([1, 2, *PERIOD, *PERIOD], name=f"r{number}", max_tokens=400, **params)


def test_an_answer_given_again_comes_from_the_tree() -> None:
    """Of an answer that says nothing twice: its own text has no drafts to give."""
    world = World(speculator=adaptive, max_batched=64)
    world.add("first", prompt(11), 13)
    world.run()
    assert len(world.runner.batches) == 13
    assert world.scheduler.counters.draft_tokens == 0
    world.add("again", prompt(11), 13)
    world.run()
    assert world.tokens("first") == world.tokens("again") == answer_of(prompt(11), 13)
    # All but the answer's last token is stored: 11 drafts behind the prompt's last one.
    assert len(world.runner.batches) == 13 + 2
    stats = world.engine.stats()
    assert (stats.num_draft_tokens_total, stats.num_accepted_tokens_total) == (11, 11)


def test_answers_of_another_salt_are_not_drafted_from() -> None:
    world = World(speculator=adaptive, max_batched=64)
    for salt in ("theirs", "mine"):
        world.add(salt, prompt(11), 13, salt=salt)
        world.run()
    assert world.scheduler.counters.draft_tokens == 0
    assert len(world.runner.batches) == 2 * 13


@pytest.mark.parametrize("is_caching", [True, False])
def test_it_forgets_who_has_ended(is_caching: bool) -> None:
    made: list[AdaptiveSpeculator] = []

    def build(cache: Cache, costs: StepCosts) -> AdaptiveSpeculator:
        made.append(adaptive(cache, costs))
        return made[0]

    world = World(speculator=build, is_caching=is_caching)
    for number in range(5):
        world.add(f"r{number}", prompt(5 + number, number), 7)
    world.run()
    assert made[0].num_requests == 0


def test_nothing_is_proposed_before_a_step_was_measured_or_without_budget() -> None:
    cache = NullCache(64, 4)
    item = running(cache, repeating())
    assert adaptive(cache, StepCosts()).propose([item], 50) == {}
    assert adaptive(cache, measured()).propose([item], 0) == {}
    assert adaptive(cache, measured()).propose([], 50) == {}
    assert len(adaptive(cache, measured()).propose([item], 50)) == 1


def test_chunks_of_prompts_and_last_tokens_get_none() -> None:
    cache = NullCache(64, 4)
    chunk = running(cache, repeating(0)).request
    chunk.num_computed_tokens = 4
    in_prompt = ScheduledRequest.next_of(chunk, 1)
    at_end = running(cache, make_request([1, 2, *PERIOD, *PERIOD], name="e", max_tokens=1))
    third = running(cache, make_request([1, 2, *PERIOD, *PERIOD], name="f", max_tokens=2))
    proposed = adaptive(cache, measured()).propose([in_prompt, at_end, third], 50)
    assert proposed == {2: (11,)}


def test_what_the_step_has_left_is_shared_evenly() -> None:
    cache = NullCache(400, 4)
    speculator = adaptive(cache, measured(draft_s=0.0))
    items = [running(cache, repeating(number)) for number in range(4)]
    drafts = speculator.propose(items, 10)
    assert {index: len(draft) for index, draft in drafts.items()} == {0: 2, 1: 2, 2: 3, 3: 3}
    drafts = speculator.propose(items, 3)
    assert sum(len(draft) for draft in drafts.values()) == 3


def test_where_rows_are_free_drafts_are_long_and_where_they_are_dear_there_are_none() -> None:
    lengths = []
    for draft_s in (0.0, 0.002, 0.015, 0.2):
        cache = NullCache(400, 4)
        speculator = adaptive(cache, measured(draft_s=draft_s))
        item = running(cache, repeating())
        for _ in range(8):
            draft = speculator.propose([item], 500).get(0, ())
            if draft:
                speculator.verified(item.request, len(draft), len(draft))
        lengths.append(len(draft))
    assert lengths == [MAX_DRAFT_TOKENS, MAX_DRAFT_TOKENS, MAX_DRAFT_TOKENS, 0]


def test_in_a_large_batch_a_row_must_earn_its_share_of_the_step() -> None:
    """What pays alone does not where 64 share a step that extra rows make longer."""
    lengths = {}
    for num_requests in (1, 64):
        cache = NullCache(4000, 4)
        speculator = adaptive(cache, measured(draft_s=0.002))
        items = [running(cache, repeating(number)) for number in range(num_requests)]
        lengths[num_requests] = [len(d) for d in speculator.propose(items, 1000).values()]
    assert lengths[1] == [6]
    assert lengths[64] == []


def live(accept: Callable[[int], int], num_steps: int, **cost: float) -> tuple[float, int, int]:
    """One request over many steps: (tokens spent, drafts, accepted); ``accept`` of a draft's
    length is how many of them are right."""
    cache = NullCache(4000, 4)
    costs = measured(**cost)
    speculator = adaptive(cache, costs)
    request = make_request([1, 2, *PERIOD * 3], max_tokens=4000)
    item = running(cache, request)
    spent, num_drafts, num_accepted = 0.0, 0, 0
    for number in range(num_steps):
        draft: Sequence[int] = speculator.propose([item], 500).get(0, ())
        count = accept(len(draft))
        if draft:
            spent += costs.drafts_s(1, len(draft)) / 0.040
            speculator.verified(request, len(draft), count)
            num_drafts += len(draft)
            num_accepted += count
        start = (request.num_tokens - 2) % len(PERIOD)
        say(request, *(PERIOD * 6)[start : start + count + 1])
        assert request.num_output_tokens == number + 1 + num_accepted
    return spent, num_drafts, num_accepted


def test_drafts_that_are_never_right_cost_no_more_than_the_share() -> None:
    spent, num_drafts, _ = live(lambda length: 0, 600)
    assert num_drafts > 0
    assert spent <= GRACE + LOSS_SHARE * 600


def test_drafts_that_are_always_right_grow_to_the_longest() -> None:
    spent, num_drafts, num_accepted = live(lambda length: length, 60)
    assert num_accepted == num_drafts > 60 * 0.9 * MAX_DRAFT_TOKENS
    assert spent < num_accepted / 5


def test_drafts_that_are_right_for_a_while_are_about_as_long() -> None:
    _, num_drafts, num_accepted = live(lambda length: min(length, 3), 300, draft_s=0.004)
    assert num_accepted > 2 * 300
    assert num_drafts < 3 * num_accepted


def test_the_search_is_paid_for_too() -> None:
    """A search as long as a step is soon given up, one in a hundred steps."""
    cache = NullCache(400, 4)
    ticks = iter(range(10**6))
    speculator = AdaptiveSpeculator(cache, measured(), lambda: 0.040 * next(ticks))
    request = make_request([1, 2, 3, 4, 5], max_tokens=4000)
    item = running(cache, request)
    searches = 0
    guesses = speculator._begin(request)
    find = guesses.finder.find

    def counting(*arguments: object) -> object:
        nonlocal searches
        searches += 1
        return find(*arguments)  # type: ignore[arg-type]

    guesses.finder.find = counting  # type: ignore[assignment, method-assign]
    for token in range(400):
        speculator.propose([item], 50)
        say(request, 100 + token)
    assert 3 <= searches <= 6


def test_a_tree_that_is_wrong_leaves_the_word_to_the_text() -> None:
    """Every answer of the tree's is another than what comes."""
    cache = PrefixCache(2000, 4, make_eviction_policy("lru"))
    speculator = adaptive(cache, measured(draft_s=0.004))
    request = make_request([1, 2, *PERIOD * 3], max_tokens=4000)
    item = running(cache, request)
    firsts = []
    for _ in range(40):
        store(cache, [*request.token_ids.tolist(), 70, 71, 72, 73])
        drafts = speculator.propose([item], 50)
        start = (request.num_tokens - 2) % len(PERIOD)
        coming = (PERIOD * 6)[start : start + MAX_DRAFT_TOKENS]
        num_right = 0
        if 0 in drafts:
            firsts.append(drafts[0][0])
            num_right = len(drafts[0]) if drafts[0][0] == coming[0] else 0
            speculator.verified(request, len(drafts[0]), num_right)
        say(request, *coming[: num_right + 1])
    assert firsts[0] == 70
    assert firsts.count(70) <= 3
    assert len(firsts) > 20


def store(cache: Cache, token_ids: list[int]) -> None:
    ids = np.asarray(token_ids, dtype=np.int32)
    lease = cache.acquire(cache.match(make_request().namespace, ids))
    assert cache.allocate(lease, len(ids))
    if lease.pending_copy is not None:
        cache.copied(lease)
    cache.release(lease, ids, len(ids))


def in_flight(request: Request) -> ScheduledRequest:
    """Its last known token is being computed; the next is drawn meanwhile."""
    return ScheduledRequest.next_of(request, 1)


def test_drafts_are_expected_where_the_known_tokens_have_some() -> None:
    cache = NullCache(64, 4)
    plain = running(cache, make_request(range(10, 30), max_tokens=400, name="plain"))
    periodic = running(cache, repeating())
    speculator = adaptive(cache, measured())
    assert not speculator.expects_drafts([])
    assert not speculator.expects_drafts([in_flight(plain.request)])
    assert speculator.expects_drafts([in_flight(plain.request), in_flight(periodic.request)])
    assert not adaptive(cache, StepCosts()).expects_drafts([in_flight(periodic.request)])


@pytest.mark.parametrize(("launch_s", "expects"), [(0.001, True), (0.5, False)])
def test_drafts_that_promise_less_than_the_wait_costs_are_not_waited_for(
    launch_s: float, expects: bool
) -> None:
    cache = NullCache(64, 4)
    costs = measured()
    costs.record_launch(launch_s)
    item = running(cache, repeating())
    assert adaptive(cache, costs).expects_drafts([in_flight(item.request)]) == expects


def test_who_makes_all_wait_for_nothing_rests_in_the_end() -> None:
    """Its drafts never come to anything, and each wait costs half a token."""
    cache = NullCache(64, 4)
    costs = measured()
    costs.record_launch(0.020)
    item = running(cache, repeating())
    speculator = adaptive(cache, costs)
    waits = [speculator.expects_drafts([in_flight(item.request)]) for _ in range(20)]
    assert waits[0]
    assert not any(waits[5:])


def test_behind_a_token_that_is_not_known_nothing_is_proposed() -> None:
    cache = NullCache(64, 4)
    request = running(cache, repeating()).request
    request.num_in_flight_tokens, request.num_placeholders = 1, 1
    item = ScheduledRequest.next_of(request, 1)
    assert item.takes_drawn
    assert adaptive(cache, measured()).propose([item], 50) == {}
