import random

import xxhash

from cache_store.recency_guard import RecencyGuard


def make_guard(num_blocks: int) -> RecencyGuard:
    guard = RecencyGuard()
    guard.add_capacity(num_blocks)
    return guard


def hashes(names: list[int]) -> bytes:
    return b"".join(xxhash.xxh3_128_digest(name.to_bytes(8, "big")) for name in names)


def serve(guard: RecencyGuard, names: list[int], num_present: int = 0) -> bool:
    guard.count(hashes(names), num_present)
    return guard.finish()


def test_what_lru_would_have_and_was_not_there_is_lost() -> None:
    """40 blocks fit; 1/64 of that may be lost, and 1/400 of what was asked for."""
    guard = make_guard(40)
    assert not serve(guard, list(range(30)))
    assert not serve(guard, list(range(100, 110)))
    assert not serve(guard, list(range(10)), num_present=10)
    assert not guard.is_active
    assert serve(guard, list(range(20)), num_present=18)  # two of them, of 70 and 40
    assert guard.is_active


def test_what_lru_would_have_evicted_is_not_lost() -> None:
    guard = make_guard(40)
    serve(guard, list(range(30)))
    serve(guard, list(range(100, 130)))  # evicts 20 to 29, then 10 to 19: a path goes from its end
    serve(guard, list(range(10, 30)))
    assert not guard.is_active
    serve(guard, list(range(100, 110)))
    assert guard.is_active


def test_a_path_may_come_in_parts_from_its_end() -> None:
    guard = make_guard(4)
    guard.count(hashes([4, 5, 6]), 0)
    guard.count(hashes([1, 2, 3]), 0)
    guard.finish()
    assert len(guard) == 4
    serve(guard, [5, 6])
    assert not guard.is_active
    serve(guard, [1, 2])
    assert guard.is_active


def test_gains_count_for_some_times_what_may_be_lost() -> None:
    """Of 3,000 found that lru would not have, what makes up for 4 times 100 / 64 + 3,000 / 400."""
    guard = make_guard(100)
    for first in range(0, 3_000, 100):
        serve(guard, list(range(first, first + 100)), num_present=100)
    assert not serve(guard, list(range(2_900, 2_945)))
    assert serve(guard, [2_900])


def test_it_stays_active_until_an_eighth_is_left_and_no_longer() -> None:
    guard = make_guard(128)
    serve(guard, list(range(100)))
    assert serve(guard, [0, 1, 2, 3])
    active = 0
    while guard.is_active:
        serve(guard, [1_000 + active])
        active += 1
    # 4 lost are 7/8 of what is allowed at 1,029 asked for: 1/64 of 128, and 1/400 of those
    assert active == 1_029 - 104


def test_a_sample_hits_as_all_blocks_do() -> None:
    """Of a cyclic walk through a little more than the capacity lru finds nothing, and of one
    through a little less all."""
    for num_names, share in ((110_000, 0.0), (90_000, 1.0)):
        guard = make_guard(100_000)
        for _ in range(2):
            for first in range(0, num_names, 1_000):
                serve(guard, list(range(first, first + 1_000)))
        assert len(guard) <= RecencyGuard.MAX_SAMPLES
        assert guard.is_active == bool(share)


def test_memory_is_bounded_by_the_capacity() -> None:
    guard = make_guard(50)
    draw = random.Random(1)
    for _ in range(200):
        serve(guard, [draw.randrange(1_000) for _ in range(10)])
        assert len(guard) <= 50
