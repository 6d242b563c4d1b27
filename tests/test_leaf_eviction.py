from __future__ import annotations

import numpy as np
import pytest

from cache_store.block_hash import Namespace, hash_blocks
from cache_store.cache import Lease
from cache_store.events import BlockRemoved, BlockStored
from cache_store.eviction import EVICTION_POLICIES, make_eviction_policy
from cache_store.prefix_cache import PrefixCache

NAMESPACE = Namespace("f")
CHUNK_BLOCKS = 4  # of 64 tokens, so that every fourth makes an event


def make_cache(num_blocks: int, policy: str = "lru", block_size: int = 1) -> PrefixCache:
    return PrefixCache(num_blocks, block_size, make_eviction_policy(policy), has_events=True)


def admit(cache: PrefixCache, ids: np.ndarray) -> Lease:
    lease = cache.acquire(cache.match(NAMESPACE, ids))
    assert cache.allocate(lease, len(ids))
    return lease


def store(cache: PrefixCache, first: int, count: int) -> np.ndarray:
    """A path of tokens that no other path begins with."""
    ids = np.arange(first, first + count, dtype=np.int32)
    cache.release(admit(cache, ids), ids, count)
    return ids


def num_stored(cache: PrefixCache, ids: np.ndarray) -> int:
    return cache.match(NAMESPACE, ids).num_tokens


def filled(num_blocks: int, path: int, policy: str = "lru") -> tuple[PrefixCache, list[np.ndarray]]:
    cache = make_cache(num_blocks, policy)
    paths = [store(cache, 1000 * first, path) for first in range(num_blocks // path)]
    assert cache.stats().num_free == num_blocks % path
    return cache, paths


def test_in_a_small_pool_no_block_goes_that_is_not_wanted() -> None:
    cache, paths = filled(1023, 3)
    lease = admit(cache, np.zeros(0, dtype=np.int32))
    for count in range(1, 8):
        assert cache.allocate(lease, count)
        assert cache.stats().num_free == 0
    assert [num_stored(cache, ids) for ids in paths[:4]] == [0, 0, 2, 3]
    assert cache.stats().evicted_total == 7
    cache.check_integrity([lease])


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_in_a_large_pool_blocks_go_by_so_many_at_once(policy: str) -> None:
    cache, paths = filled(8192, 8, policy)
    lease = admit(cache, np.zeros(0, dtype=np.int32))
    free = []
    for count in range(1, 10):
        assert cache.allocate(lease, count)
        free.append(cache.stats().num_free)
    assert free == [7, 6, 5, 4, 3, 2, 1, 0, 7]
    assert sorted(num_stored(cache, ids) for ids in paths)[:3] == [0, 0, 8]
    cache.check_integrity([lease])


def test_what_many_paths_had_goes_to_one_lease_in_the_order_of_the_ids() -> None:
    cache, paths = filled(4000, 2)
    lease = admit(cache, np.zeros(0, dtype=np.int32))
    assert cache.allocate(lease, 1001)
    assert lease.block_ids == sorted(set(lease.block_ids))
    assert (cache.stats().num_free, cache.stats().evicted_total) == (0, 1001)
    assert [num_stored(cache, paths[i]) for i in (0, 499, 500, 501)] == [0, 0, 1, 2]
    cache.check_integrity([lease])


def test_a_pool_that_is_too_full_loses_nothing() -> None:
    cache, paths = filled(8192, 8)
    held = admit(cache, paths[5])
    lease = admit(cache, np.zeros(0, dtype=np.int32))
    assert not cache.allocate(lease, 8185)
    assert (cache.stats().evicted_total, cache.stats().num_free) == (0, 0)
    assert cache.allocate(lease, 8184)
    assert num_stored(cache, paths[5]) == 8
    assert not cache.allocate(lease, 8185)
    cache.check_integrity([held, lease])


def test_one_event_tells_of_all_that_went_together() -> None:
    cache = make_cache(30, block_size=64)
    paths = [store(cache, 10_000 * first, 10 * 64) for first in range(3)]
    stored = cache.take_events()
    assert [len(e.block_hashes) // 16 for e in stored if isinstance(e, BlockStored)] == [2, 2, 2]
    lease = admit(cache, np.zeros(0, dtype=np.int32))
    assert cache.allocate(lease, 23 * 64)
    whole = [hash_blocks(NAMESPACE, ids, 64) for ids in paths]
    gone = b"".join(each[i] for each in whole[:2] for i in (CHUNK_BLOCKS - 1, 2 * CHUNK_BLOCKS - 1))
    # and of the third path, of which 7 are left
    end = whole[2][2 * CHUNK_BLOCKS - 1]
    assert list(cache.take_events()) == [BlockRemoved(gone), BlockRemoved(end)]
    assert cache.allocate(lease, 24 * 64)
    assert list(cache.take_events()) == []
    assert cache.allocate(lease, 26 * 64)
    assert num_stored(cache, paths[2]) == 4 * 64
    cache.check_integrity([lease])


def test_a_parent_follows_its_last_child_within_one_call() -> None:
    cache = make_cache(12)
    trunk = np.arange(4, dtype=np.int32)
    for last in (100, 200):
        ids = np.concatenate([trunk, np.arange(last, last + 4, dtype=np.int32)])
        cache.release(admit(cache, ids), ids, 8)
    lease = admit(cache, np.zeros(0, dtype=np.int32))
    assert cache.allocate(lease, 10)
    assert num_stored(cache, trunk) == 2
    cache.check_integrity([lease])
    assert cache.allocate(lease, 12)
    assert cache.stats().num_namespaces == 1  # the lease's own lock
    cache.check_integrity([lease])
