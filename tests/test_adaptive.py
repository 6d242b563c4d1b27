import numpy as np

from cache_store.adaptive import AdaptivePolicy
from cache_store.block_hash import Namespace
from cache_store.eviction import make_eviction_policy
from cache_store.prefix_cache import PrefixCache

NAMESPACE = Namespace("f")
SYSTEM = range(10)


def make_cache(num_blocks: int) -> tuple[PrefixCache, AdaptivePolicy]:
    policy = AdaptivePolicy()
    return PrefixCache(num_blocks, 1, policy), policy


def serve(cache: PrefixCache, ids: list[int]) -> int:
    """One request with blocks of one token; how many of them were found."""
    prompt = np.array(ids, dtype=np.int32)
    lease = cache.acquire(cache.match(NAMESPACE, prompt))
    assert cache.allocate(lease, len(prompt))
    cache.release(lease, prompt, len(prompt))
    cache.check_integrity([])
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


def num_found(policy_of_cache: PrefixCache, requests: list[list[int]]) -> int:
    return sum(serve(policy_of_cache, ids) for ids in requests)


def test_chats_outlive_one_offs_that_would_flush_them_under_lru() -> None:
    """Ten chats of some 40 blocks fit; between two turns of one, 600 blocks of others come."""
    requests = mixed_traffic(1200)
    lru = num_found(PrefixCache(450, 1, make_eviction_policy("lru")), requests)
    adaptive = num_found(make_cache(450)[0], requests)
    shared = 10 * len(requests)
    assert lru - shared < 0.1 * (adaptive - shared)
