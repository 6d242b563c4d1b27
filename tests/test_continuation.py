"""What the tree says comes next: along edges, through splits, in one namespace, without a trace."""

from __future__ import annotations

import numpy as np

from cache_store.block_hash import Namespace
from cache_store.cache import Lease
from cache_store.continuation import MAX_CANDIDATES
from cache_store.eviction import make_eviction_policy
from cache_store.null_cache import NullCache
from cache_store.prefix_cache import PrefixCache

BLOCK = 4
NAMESPACE = Namespace("f")


def make_cache(num_blocks: int = 64) -> PrefixCache:
    return PrefixCache(num_blocks, BLOCK, make_eviction_policy("lru"))


def ids(*runs: range) -> np.ndarray:
    return np.array([token for run in runs for token in run], dtype=np.int32)


def begin(cache: PrefixCache, tokens: np.ndarray, namespace: Namespace = NAMESPACE) -> Lease:
    """Admitted: all that is stored of ``tokens`` but the last is locked and copied."""
    lease = cache.acquire(cache.match(namespace, tokens[:-1]))
    assert cache.allocate(lease, len(tokens))
    if lease.pending_copy is not None:
        cache.copied(lease)
    return lease


def serve(cache: PrefixCache, tokens: np.ndarray, namespace: Namespace = NAMESPACE) -> None:
    lease = begin(cache, tokens, namespace)
    cache.release(lease, tokens, len(tokens))


def guess(cache: PrefixCache, lease: Lease, tokens: np.ndarray, count: int = 6) -> list[int]:
    found: list[int] = cache.continuation(lease, tokens, count).tolist()
    return found


def test_a_stored_answer_is_guessed_to_its_last_token() -> None:
    cache = make_cache()
    serve(cache, ids(range(30)))
    for length in range(1, 30):
        lease = begin(cache, ids(range(length)))
        assert guess(cache, lease, ids(range(length))) == list(range(length, min(length + 6, 30)))
        cache.release(lease, ids(range(length)), length - 1)


def test_while_the_answer_is_given_again_its_path_is_followed() -> None:
    """Each commit moves the lease down the path and splits it where the lease now ends."""
    cache = make_cache()
    serve(cache, ids(range(41)))
    tokens = ids(range(41))
    lease = begin(cache, tokens[:9])
    for length in range(9, 41):
        assert guess(cache, lease, tokens[:length], 3) == list(range(length, min(length + 3, 41)))
        assert cache.allocate(lease, length)
        cache.commit(lease, tokens[:length], length - 1)
    assert guess(cache, lease, tokens) == []
    cache.release(lease, tokens, 40)
    cache.check_integrity([])


def test_who_leaves_the_path_is_told_nothing_more() -> None:
    cache = make_cache()
    serve(cache, ids(range(30)))
    for length in (9, 12, 13):
        other = ids(range(length), range(70, 71))
        lease = begin(cache, other)
        assert guess(cache, lease, other) == []
        cache.release(lease, other, length)


def test_of_several_paths_the_latest_used_is_taken() -> None:
    cache = make_cache()
    first = ids(range(10), range(50, 60))
    second = ids(range(10), range(30, 40))
    serve(cache, first)
    serve(cache, second)
    lease = begin(cache, ids(range(10)))
    assert guess(cache, lease, ids(range(10)), 3) == [30, 31, 32]
    serve(cache, first)
    assert guess(cache, lease, ids(range(10)), 3) == [50, 51, 52]
    cache.release(lease, ids(range(10)), 9)


def test_asking_counts_as_no_use() -> None:
    cache = make_cache()
    old, new = ids(range(10), range(50, 60)), ids(range(10), range(30, 40))
    serve(cache, old)
    serve(cache, new)
    on_old = begin(cache, ids(range(10), range(50, 51)))
    cache.release(on_old, ids(range(10)), 10)
    serve(cache, new)
    before = cache.stats()
    lease = begin(cache, ids(range(10)))
    for _ in range(5):
        guess(cache, lease, ids(range(10), range(50, 51)), 3)
    assert guess(cache, lease, ids(range(10)), 1) == [30]
    cache.release(lease, ids(range(10)), 9)
    assert cache.stats().num_cached == before.num_cached


def test_another_namespace_never_speaks() -> None:
    cache = make_cache()
    salted = Namespace("f", cache_salt="s")
    serve(cache, ids(range(30)), salted)
    lease = begin(cache, ids(range(9)))
    assert guess(cache, lease, ids(range(9))) == []
    mine = begin(cache, ids(range(9)), salted)
    assert guess(cache, mine, ids(range(9)), 2) == [9, 10]


def test_what_was_evicted_or_reset_under_a_lease_is_gone() -> None:
    cache = make_cache()
    serve(cache, ids(range(30)))
    lease = begin(cache, ids(range(9)))
    assert guess(cache, lease, ids(range(9)), 2) == [9, 10]
    cache.reset()
    assert guess(cache, lease, ids(range(9))) == []
    cache.release(lease, ids(range(9)), 8)
    cache.check_integrity([])


def test_among_very_many_only_some_are_looked_at() -> None:
    cache = make_cache(2000)
    for number in range(400):
        serve(cache, ids(range(8), range(1000 + 7 * number, 1007 + 7 * number)))
    lease = begin(cache, ids(range(9)))
    (first,) = guess(cache, lease, ids(range(8)), 1)
    assert first in {1000 + 7 * number for number in range(MAX_CANDIDATES)}
    for number in (0, 17, 399):
        start = 1000 + 7 * number
        asked = ids(range(8), range(start, start + 1))
        assert guess(cache, lease, asked, 2) == [start + 1, start + 2]


def test_a_cache_that_stores_nothing_has_nothing_to_say() -> None:
    cache = NullCache(8, BLOCK)
    lease = cache.acquire(cache.match(NAMESPACE, ids(range(9))))
    found = cache.continuation(lease, ids(range(9)), 4)
    assert (len(found), found.dtype) == (0, np.int32)
