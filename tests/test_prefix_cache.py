import numpy as np
import pytest

from cache_store.block_hash import HASH_BYTES, BlockHashes, Namespace, hash_blocks
from cache_store.cache import Lease, RowCopy
from cache_store.eviction import make_eviction_policy
from cache_store.prefix_cache import PrefixCache

BLOCK_SIZE = 4
NAMESPACE = Namespace("f")


def make_cache(num_blocks: int = 16, policy: str = "lru") -> PrefixCache:
    return PrefixCache(num_blocks, BLOCK_SIZE, make_eviction_policy(policy))


def tokens(*runs: range) -> np.ndarray:
    return np.array([token for run in runs for token in run], dtype=np.int32)


def begin(cache: PrefixCache, ids: np.ndarray, namespace: Namespace = NAMESPACE) -> Lease:
    return cache.acquire(cache.match(namespace, ids))


def serve(cache: PrefixCache, ids: np.ndarray, namespace: Namespace = NAMESPACE) -> int:
    """A whole request; how many of its tokens were cached."""
    lease = begin(cache, ids, namespace)
    assert cache.allocate(lease, len(ids))
    if lease.pending_copy is not None:
        cache.copied(lease)
    cache.release(lease, ids, len(ids))
    cache.check_integrity([])
    return lease.num_cached_tokens


def test_the_second_of_two_equal_prompts_is_cached_to_the_token() -> None:
    cache = make_cache()
    assert serve(cache, tokens(range(10))) == 0
    assert serve(cache, tokens(range(10))) == 10
    assert cache.stats().num_cached == 3


def test_the_next_turn_hits_through_the_end_of_the_answer() -> None:
    cache = make_cache()
    serve(cache, tokens(range(10)))
    assert serve(cache, tokens(range(17))) == 10
    assert serve(cache, tokens(range(30))) == 17
    assert cache.stats().num_cached == 8  # the partial leaves before were dropped


def test_a_partial_hit_is_ordered_as_a_row_copy_into_the_first_own_block() -> None:
    cache = make_cache()
    serve(cache, tokens(range(12)))
    lease = begin(cache, tokens(range(6), range(90, 99)))
    assert (lease.block_ids, lease.num_cached_tokens, lease.pending_copy) == ([0], 6, None)
    assert cache.allocate(lease, 6)
    target = lease.block_ids[1]
    assert lease.pending_copy == RowCopy(source_block_id=1, target_block_id=target, num_rows=2)
    assert target not in (0, 1, 2)
    before = cache.stats().num_evictable
    cache.copied(lease)
    assert lease.pending_copy is None
    assert cache.stats().num_evictable == before + 1
    cache.check_integrity([lease])


def test_more_blocks_do_not_move_the_copy() -> None:
    cache = make_cache()
    serve(cache, tokens(range(12)))
    lease = begin(cache, tokens(range(6), range(90, 99)))
    assert cache.allocate(lease, 7)
    first = lease.pending_copy
    assert cache.allocate(lease, 15)
    assert lease.pending_copy == first
    assert len(lease.block_ids) == 4


def test_commit_before_the_copy_is_an_error() -> None:
    cache = make_cache()
    ids = tokens(range(6), range(90, 99))
    serve(cache, tokens(range(12)))
    lease = begin(cache, ids)
    assert cache.allocate(lease, len(ids))
    with pytest.raises(AssertionError, match="never copied"):
        cache.commit(lease, ids, 8)


def test_rows_that_were_never_copied_are_not_stored() -> None:
    cache = make_cache()
    ids = tokens(range(6), range(90, 99))
    serve(cache, tokens(range(12)))
    lease = begin(cache, ids)
    assert cache.allocate(lease, len(ids))
    cache.release(lease, ids, 15)
    cache.check_integrity([])
    assert lease.pending_copy is None
    assert cache.match(NAMESPACE, ids).num_tokens == 6
    assert cache.stats().num_cached == 3


def test_a_released_lease_before_any_allocate_leaves_no_lock() -> None:
    cache = make_cache()
    serve(cache, tokens(range(12)))
    lease = begin(cache, tokens(range(6)))
    assert cache.stats().num_locked == 2
    cache.release(lease, tokens(range(6)), 6)
    cache.check_integrity([])
    assert cache.stats().num_locked == 0


def test_hashes_that_the_lease_brings_are_taken_at_their_word() -> None:
    cache = make_cache()
    ids = tokens(range(16))
    lease = begin(cache, ids)
    assert cache.allocate(lease, 16)
    right = hash_blocks(NAMESPACE, ids, 4)
    lease.block_hashes = BlockHashes(right.joined[: 2 * HASH_BYTES])
    cache.commit(lease, ids, 4)
    cache.commit(lease, ids, 16)  # one that is known, two that are not
    cache.check_integrity([lease])
    other = tokens(range(50, 58))
    wrong = begin(cache, other)
    assert cache.allocate(wrong, 8)
    wrong.block_hashes = BlockHashes(right.joined[:HASH_BYTES])
    cache.commit(wrong, other, 8)
    with pytest.raises(AssertionError, match="under another hash"):
        cache.check_integrity([lease, wrong])


def test_committed_blocks_are_shared_while_their_request_runs() -> None:
    cache = make_cache()
    ids = tokens(range(10))
    lease = begin(cache, ids)
    assert cache.allocate(lease, 10)
    cache.commit(lease, ids, 7)
    assert cache.match(NAMESPACE, ids).num_tokens == 4
    cache.commit(lease, ids, 10)
    follower = begin(cache, ids)
    assert follower.block_ids == lease.block_ids[:2]
    cache.check_integrity([lease, follower])
    cache.release(lease, ids, 10)
    assert cache.stats().num_locked == 2
    cache.release(follower, ids, 8)
    cache.check_integrity([])


def test_a_token_without_kv_is_not_stored() -> None:
    cache = make_cache()
    ids = tokens(range(9))
    lease = begin(cache, ids)
    assert cache.allocate(lease, 9)
    cache.release(lease, ids, 8)
    assert cache.match(NAMESPACE, ids).num_tokens == 8


def test_a_duplicate_stays_private_until_release() -> None:
    cache = make_cache()
    ids = tokens(range(8))
    first, second = begin(cache, ids), begin(cache, ids)
    assert cache.allocate(first, 8)
    assert cache.allocate(second, 8)
    table = list(second.block_ids)
    cache.commit(first, ids, 8)
    cache.commit(second, ids, 8)
    assert second.block_ids == table
    assert cache.stats().num_cached == 2
    cache.check_integrity([first, second])
    cache.release(first, ids, 8)
    assert cache.stats().num_locked == 4
    cache.release(second, ids, 8)
    assert (cache.stats().num_free, cache.stats().num_evictable) == (14, 2)
    cache.check_integrity([])


def test_a_lease_goes_on_after_the_path_it_duplicated() -> None:
    cache = make_cache()
    first_ids, second_ids = tokens(range(8)), tokens(range(4), range(50, 58))
    first, second = begin(cache, first_ids), begin(cache, second_ids)
    assert cache.allocate(first, 8)
    assert cache.allocate(second, 12)
    cache.commit(first, first_ids, 8)
    cache.commit(second, second_ids, 8)
    cache.commit(second, second_ids, 12)
    cache.check_integrity([first, second])
    assert cache.stats().num_cached == 4
    cache.release(second, second_ids, 12)
    cache.release(first, first_ids, 8)
    cache.check_integrity([])


def test_allocate_evicts_only_what_is_missing() -> None:
    cache = make_cache(num_blocks=8)
    serve(cache, tokens(range(24)))
    lease = begin(cache, tokens(range(50, 62)))
    assert cache.allocate(lease, 12)
    stats = cache.stats()
    assert (stats.evicted_total, stats.num_free, stats.num_cached) == (1, 0, 5)
    assert cache.match(NAMESPACE, tokens(range(24))).num_tokens == 20


def test_allocate_is_all_or_nothing() -> None:
    cache = make_cache(num_blocks=8)
    serve(cache, tokens(range(24)))
    holder = begin(cache, tokens(range(16)))
    lease = begin(cache, tokens(range(50, 70)))
    before = cache.stats()
    assert not cache.allocate(lease, 20)
    assert cache.stats() == before
    assert lease.block_ids == []
    assert cache.allocate(lease, 16)
    assert not cache.allocate(lease, 16, num_lookahead_tokens=1)
    cache.check_integrity([holder, lease])


def test_lookahead_tokens_get_blocks() -> None:
    cache = make_cache()
    lease = begin(cache, tokens(range(4)))
    assert cache.allocate(lease, 4, num_lookahead_tokens=5)
    assert len(lease.block_ids) == 3
    cache.release(lease, tokens(range(4)), 4)
    assert cache.stats().num_free == 15


def test_a_lone_request_gives_up_the_partial_rows_rather_than_fail() -> None:
    """It needs every block of the pool, the source of its own row copy included."""
    cache = make_cache(num_blocks=4)
    serve(cache, tokens(range(16)))
    ids = tokens(range(6), range(50, 60))
    lease = begin(cache, ids)
    assert (lease.block_ids, lease.num_cached_tokens) == ([0], 6)
    assert cache.allocate(lease, 16)
    assert (lease.num_cached_tokens, lease.pending_copy) == (4, None)
    assert lease.block_ids[0] == 0
    assert sorted(lease.block_ids) == [0, 1, 2, 3]
    cache.commit(lease, ids, 16)
    cache.check_integrity([lease])


def test_rows_once_promised_are_not_given_up() -> None:
    cache = make_cache(num_blocks=4)
    serve(cache, tokens(range(16)))
    ids = tokens(range(6), range(50, 60))
    lease = begin(cache, ids)
    assert cache.allocate(lease, 6)
    assert not cache.allocate(lease, 16)
    assert lease.pending_copy is not None
    cache.copied(lease)
    assert cache.allocate(lease, 16)


def test_a_preempted_request_resumes_as_a_hit() -> None:
    cache = make_cache()
    ids = tokens(range(14))
    lease = begin(cache, ids)
    assert cache.allocate(lease, 14)
    cache.commit(lease, ids, 11)
    cache.release(lease, ids, 11)
    again = begin(cache, ids)
    assert again.num_cached_tokens == 11


def test_reset_drops_all_but_what_is_locked() -> None:
    cache = make_cache()
    serve(cache, tokens(range(12)))
    serve(cache, tokens(range(50, 58)))
    lease = begin(cache, tokens(range(8)))
    assert cache.reset() == 3
    stats = cache.stats()
    assert (stats.num_cached, stats.num_locked, stats.evicted_total) == (2, 2, 0)
    cache.check_integrity([lease])
    cache.release(lease, tokens(range(8)), 8)
    assert cache.reset() == 2
    assert cache.stats().num_free == 16


def test_salts_that_are_no_longer_used_leave_nothing_behind() -> None:
    cache = make_cache(num_blocks=4)
    for salt in range(100):
        namespace = Namespace("f", cache_salt=str(salt))
        assert serve(cache, tokens(range(10)), namespace) == 0
    assert cache.stats().num_namespaces == 2  # a pool of 4 holds one prompt and a part
    assert cache.reset() == 4
    assert cache.stats().num_namespaces == 0


def test_counts_over_the_life_of_a_cache() -> None:
    cache = make_cache(num_blocks=4)
    serve(cache, tokens(range(16)))
    serve(cache, tokens(range(50, 60)))
    stats = cache.stats()
    assert (stats.stored_total, stats.evicted_total) == (7, 3)
    assert stats.num_blocks == stats.num_free + stats.num_evictable + stats.num_locked
    assert (stats.num_cached, stats.num_leases) == (4, 0)


def test_sequences_of_one_prompt_are_consecutive() -> None:
    cache = make_cache(num_blocks=64)
    lease = begin(cache, tokens(range(40)))
    for length in range(1, 41):
        assert cache.allocate(lease, length)
    assert lease.block_ids == list(range(lease.block_ids[0], lease.block_ids[0] + 10))


def test_evicted_blocks_continue_the_table_where_they_can() -> None:
    cache = make_cache(num_blocks=8)
    lease = begin(cache, tokens(range(100, 104)))
    assert cache.allocate(lease, 4)
    other = begin(cache, tokens(range(28)))
    assert cache.allocate(other, 28)
    cache.release(other, tokens(range(28)), 28)
    table = lease.block_ids[0]
    assert cache.stats().num_free == 0
    assert cache.allocate(lease, 32)
    assert lease.block_ids == [(table + offset) % 8 for offset in range(8)]
    assert cache.stats().evicted_total == 7
    cache.check_integrity([lease])


@pytest.mark.parametrize("damage", ["lock", "owner", "lost"])
def test_integrity_notices_damage(damage: str) -> None:
    cache = make_cache()
    lease = begin(cache, tokens(range(8)))
    assert cache.allocate(lease, 8)
    cache.commit(lease, tokens(range(8)), 8)
    cache.check_integrity([lease])
    root = cache._tree.roots[NAMESPACE.root_hash]
    if damage == "lock":
        root.lock_ref += 1
    elif damage == "owner":
        lease.block_ids.append(lease.block_ids[0])
    else:
        cache._pool.allocate(1)
    with pytest.raises(AssertionError):
        cache.check_integrity([lease])


def test_integrity_notices_a_lease_that_somebody_lost() -> None:
    cache = make_cache()
    begin(cache, tokens(range(8)))
    with pytest.raises(AssertionError, match="leases lost"):
        cache.check_integrity([])


@pytest.mark.parametrize("policy", ["lru", "adaptive", "lfu", "fifo"])
def test_every_policy_survives_pressure(policy: str) -> None:
    cache = make_cache(num_blocks=12, policy=policy)
    rng = np.random.default_rng(3)
    for _ in range(200):
        start = int(rng.integers(0, 6)) * 2
        ids = tokens(range(start), range(100 * start, 100 * start + int(rng.integers(1, 20))))
        serve(cache, ids)
    assert cache.stats().evicted_total > 100
