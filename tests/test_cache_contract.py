"""What a scheduler may rely on, whichever cache it is given."""

from collections.abc import Callable

import numpy as np
import pytest

from cache_store.block_hash import Namespace
from cache_store.cache import Cache, Lease
from cache_store.eviction import make_eviction_policy
from cache_store.null_cache import NullCache
from cache_store.prefix_cache import PrefixCache

CacheFactory = Callable[[int, int], Cache]
NAMESPACE = Namespace("f")


def make_prefix_cache(num_blocks: int, block_size: int) -> Cache:
    return PrefixCache(num_blocks, block_size, make_eviction_policy("lru"))


def make_null_cache(num_blocks: int, block_size: int) -> Cache:
    return NullCache(num_blocks, block_size)


@pytest.fixture(params=[make_prefix_cache, make_null_cache])
def make_cache(request: pytest.FixtureRequest) -> CacheFactory:
    factory: CacheFactory = request.param
    return factory


def tokens(count: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.int32)


def begin(cache: Cache, ids: np.ndarray) -> Lease:
    return cache.acquire(cache.match(NAMESPACE, ids))


def test_a_cold_request_has_nothing_cached(make_cache: CacheFactory) -> None:
    cache = make_cache(8, 4)
    match = cache.match(NAMESPACE, tokens(9))
    assert (match.num_tokens, match.num_block_tokens, match.partial) == (0, 0, None)
    lease = cache.acquire(match)
    assert (lease.namespace, lease.block_ids, lease.num_cached_tokens) == (NAMESPACE, [], 0)
    assert lease.pending_copy is None
    assert cache.block_size == 4


def test_the_table_grows_to_cover_the_tokens_and_never_changes_its_head(
    make_cache: CacheFactory,
) -> None:
    cache = make_cache(8, 4)
    lease = begin(cache, tokens(9))
    for num_tokens, num_blocks in ((1, 1), (4, 1), (5, 2), (3, 2), (9, 3), (0, 3)):
        head = list(lease.block_ids)
        assert cache.allocate(lease, num_tokens)
        assert len(lease.block_ids) == num_blocks
        assert lease.block_ids[: len(head)] == head
    assert cache.allocate(lease, 9, num_lookahead_tokens=4)
    assert len(lease.block_ids) == 4
    cache.check_integrity([lease])


def test_commit_leaves_the_table_alone(make_cache: CacheFactory) -> None:
    cache = make_cache(8, 4)
    lease = begin(cache, tokens(9))
    assert cache.allocate(lease, 9)
    table = list(lease.block_ids)
    for num_computed in (0, 3, 4, 8, 8, 9):
        cache.commit(lease, tokens(9), num_computed)
        cache.check_integrity([lease])
    assert lease.block_ids == table


def test_a_full_pool_refuses_and_changes_nothing(make_cache: CacheFactory) -> None:
    cache = make_cache(4, 4)
    first, second = begin(cache, tokens(9)), begin(cache, tokens(9, 100))
    assert cache.allocate(first, 9)
    before = cache.stats()
    assert not cache.allocate(second, 8)
    assert cache.stats() == before
    assert second.block_ids == []
    assert cache.allocate(second, 4)
    cache.check_integrity([first, second])


def test_no_block_is_lost_over_many_requests(make_cache: CacheFactory) -> None:
    cache = make_cache(6, 4)
    rng = np.random.default_rng(5)
    for _ in range(100):
        ids = tokens(int(rng.integers(1, 24)), start=int(rng.integers(0, 3)))
        lease = begin(cache, ids)
        assert cache.allocate(lease, len(ids))
        if lease.pending_copy is not None:
            cache.copied(lease)
        num_computed = int(rng.integers(lease.num_cached_tokens, len(ids) + 1))
        cache.release(lease, ids, num_computed)
        cache.check_integrity([])
    stats = cache.stats()
    assert (stats.num_locked, stats.num_leases) == (0, 0)
    assert stats.num_free + stats.num_evictable == 6


def test_reset_gives_every_unlocked_block_back(make_cache: CacheFactory) -> None:
    cache = make_cache(8, 4)
    lease = begin(cache, tokens(9))
    assert cache.allocate(lease, 9)
    cache.release(lease, tokens(9), 9)
    kept = cache.stats().num_evictable
    assert cache.reset() == kept
    assert cache.stats().num_free == 8
    assert cache.reset() == 0


def test_a_released_lease_is_of_no_more_use(make_cache: CacheFactory) -> None:
    cache = make_cache(8, 4)
    lease = begin(cache, tokens(4))
    cache.release(lease, tokens(4), 0)
    for use in (
        lambda: cache.allocate(lease, 4),
        lambda: cache.commit(lease, tokens(4), 4),
        lambda: cache.copied(lease),
        lambda: cache.release(lease, tokens(4), 4),
    ):
        with pytest.raises(AssertionError, match="was released"):
            use()


def test_a_copy_that_is_not_pending_cannot_be_reported(make_cache: CacheFactory) -> None:
    cache = make_cache(8, 4)
    lease = begin(cache, tokens(4))
    with pytest.raises(AssertionError, match="no copy was pending"):
        cache.copied(lease)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0)])
def test_empty_sizes_are_refused(
    make_cache: CacheFactory, num_blocks: int, block_size: int
) -> None:
    with pytest.raises(ValueError, match="block"):
        make_cache(num_blocks, block_size)


def test_the_null_cache_never_stores() -> None:
    cache = NullCache(8, 4)
    for _ in range(2):
        lease = begin(cache, tokens(8))
        assert lease.num_cached_tokens == 0
        assert cache.allocate(lease, 8)
        cache.commit(lease, tokens(8), 8)
        cache.release(lease, tokens(8), 8)
        assert (cache.stats().num_cached, cache.stats().num_free) == (0, 8)
