import random

import numpy as np

from cache_store.adaptive import AdaptivePolicy
from cache_store.block_hash import Namespace
from cache_store.eviction import make_eviction_policy
from cache_store.prefix_cache import PrefixCache
from cache_store.recency_guard import RecencyGuard

NAMESPACE = Namespace("f")
SYSTEM = range(10)


def make_cache(num_blocks: int) -> tuple[PrefixCache, AdaptivePolicy]:
    policy = AdaptivePolicy()
    return PrefixCache(num_blocks, 1, policy), policy


def serve(cache: PrefixCache, ids: list[int]) -> int:
    """One request with blocks of one token; how many of them were found."""
    num_tokens = find(cache, ids, len(ids))
    cache.check_integrity([])
    return num_tokens


def find(cache: PrefixCache, ids: list[int], num_looked_for: int) -> int:
    prompt = np.array(ids, dtype=np.int32)
    lease = cache.acquire(cache.match(NAMESPACE, prompt[:num_looked_for]))
    assert cache.allocate(lease, len(prompt))
    cache.release(lease, prompt, len(prompt))
    return lease.num_cached_tokens


def chat(number: int, turn: int) -> list[int]:
    """A prompt of 10 shared tokens, then 10 of its own and 3 for each turn so far."""
    start = 1000 * (number + 1)
    return [*SYSTEM, *range(start, start + 10 + 3 * turn)]


def turns(cache: PrefixCache, ids: list[int]) -> int:
    """How often the path to the end of ``ids`` is known to have gone on."""
    position = cache.match(NAMESPACE, np.array(ids, dtype=np.int32)).position
    assert position is not None
    assert position.node.cohort is not None
    return position.node.cohort.turn


def test_a_path_that_goes_on_counts_its_turns() -> None:
    cache, _ = make_cache(100)
    serve(cache, chat(1, 0))
    serve(cache, chat(2, 0))
    for turn in range(4):
        serve(cache, chat(3, turn))
        assert turns(cache, chat(3, turn)) == turn
    assert turns(cache, chat(2, 0)) == 0


def test_turns_are_remembered_of_what_was_evicted() -> None:
    cache, policy = make_cache(60)
    serve(cache, chat(1, 0))
    serve(cache, chat(2, 0))
    serve(cache, chat(2, 1))
    for number in range(3, 20):
        serve(cache, chat(number, 0))
        serve(cache, [90_000 + number])  # something else comes between
    evicted = [n for n in range(1, 20) if cache.match(NAMESPACE, _of(chat(n, 0))).num_tokens < 20]
    assert evicted
    assert policy.num_ghosts > 0
    number = evicted[0]
    before = 1 if number == 2 else 0
    serve(cache, chat(number, before + 1))
    assert turns(cache, chat(number, before + 1)) == before + 1


def _of(ids: list[int]) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def test_ghosts_are_bounded() -> None:
    cache, policy = make_cache(30)
    policy.max_ghosts = 16
    for number in range(200):
        serve(cache, chat(number, 0))
    assert 0 < policy.num_ghosts <= 16


def mixed_traffic(num_requests: int) -> list[list[int]]:
    """Of every four requests three are never heard of again, and one belongs to one of ten chats
    that go on for ever, each at every fortieth request."""
    requests, one_off = [], 0
    for number in range(num_requests):
        if number % 4 == 0:
            which = number // 4 % 10
            requests.append(chat(which, min(number // 40, 8)))
        else:
            one_off += 1
            requests.append([*SYSTEM, *range(10**6 + 100 * one_off, 10**6 + 100 * one_off + 20)])
    return requests


def num_found(cache: PrefixCache, requests: list[list[int]]) -> int:
    num_tokens = sum(find(cache, ids, len(ids)) for ids in requests)
    cache.check_integrity([])
    return num_tokens


def test_chats_outlive_one_offs_that_would_flush_them_under_lru() -> None:
    """Ten chats of some 40 blocks fit; between two turns of one, 600 blocks of others come."""
    requests = mixed_traffic(1200)
    lru = num_found(PrefixCache(450, 1, make_eviction_policy("lru")), requests)
    adaptive = num_found(make_cache(450)[0], requests)
    shared = 10 * len(requests)
    assert lru - shared < 0.1 * (adaptive - shared)


class ActiveGuard(RecencyGuard):
    def __init__(self) -> None:
        super().__init__()
        self.is_active = True

    def finish(self) -> bool:
        return False


def test_under_the_guard_the_order_is_that_of_lru() -> None:
    """Request by request, with chats that go on, branch and are cut short where room is needed."""
    cache, policy = make_cache(450)
    policy.guard = ActiveGuard()
    lru = PrefixCache(450, 1, make_eviction_policy("lru"))
    for ids in mixed_traffic(300):
        assert serve(cache, ids) == find(lru, ids, len(ids))


def test_where_lru_is_better_little_is_lost_to_it() -> None:
    """What was used once never came back, and all at once does, before it would leave lru."""
    draw = random.Random(3)
    requests = mixed_traffic(800)
    for number in range(1600):
        recent = draw.randrange(max(0, number - 15), number + 1)
        requests.append([*SYSTEM, *range(10**7 + 100 * recent, 10**7 + 100 * recent + 20)])
    lru = num_found(PrefixCache(450, 1, make_eviction_policy("lru")), requests)
    adaptive = num_found(make_cache(450)[0], requests)
    assert adaptive > lru - 0.01 * sum(map(len, requests))


def test_the_end_of_a_prompt_that_is_never_looked_for_is_not_lost() -> None:
    """Of a prompt that is all stored the last block is computed again, though it is there."""
    cache, policy = make_cache(100)
    ids = chat(1, 3)
    for _ in range(200):
        find(cache, ids, len(ids) - 1)
    assert not policy.guard.is_active


def test_a_request_counts_as_one_however_many_blocks_it_used() -> None:
    cache, policy = make_cache(1000)
    for turn in range(3):
        serve(cache, chat(1, 30 * turn))
    counted: list[tuple[int, float]] = []
    policy.model.count_reuse = lambda kind, age, share: counted.append((age, share))  # type: ignore[method-assign]
    serve(cache, [10**6])
    serve(cache, chat(1, 90))
    assert {age for age, _ in counted} == {201}  # the last turn's 200 blocks, and one
    assert sum(share for _, share in counted) == 1
