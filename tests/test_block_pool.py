import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_store.block_pool import BlockPool


def test_one_sequence_gets_consecutive_ids() -> None:
    pool = BlockPool(64)
    first = pool.allocate(3)
    assert first == [0, 1, 2]
    assert pool.allocate(2, after=2) == [3, 4]
    assert pool.num_free == 59


def test_sequences_leave_each_other_room_to_grow() -> None:
    pool = BlockPool(100)
    tables = [pool.allocate(1) for _ in range(3)]
    for _ in range(20):
        for table in tables:
            table += pool.allocate(1, after=table[-1])
    assert all(table == list(range(table[0], table[0] + 21)) for table in tables)
    pool.check_integrity()


def test_a_run_that_is_not_much_longer_than_needed_is_taken_from_its_start() -> None:
    pool = BlockPool(10)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(2) == [3, 4]  # 7 free: less than four times 2


def test_the_rest_comes_from_elsewhere_when_the_next_blocks_are_taken() -> None:
    pool = BlockPool(8)
    pool.allocate(8)
    pool.free([1, 2, 5, 6, 7])
    assert pool.allocate(4, after=0) == [1, 2, 5, 6]
    assert list(pool.free_runs()) == [(7, 1)]


def test_after_the_last_block_there_is_nothing_to_continue() -> None:
    pool = BlockPool(4)
    pool.allocate(4)
    pool.free([0])
    assert pool.allocate(1, after=3) == [0]


def test_freed_neighbours_are_joined() -> None:
    pool = BlockPool(10)
    pool.allocate(10)
    pool.free([2, 3])
    pool.free([6])
    assert (list(pool.free_runs()), pool.num_free_runs) == ([(2, 2), (6, 1)], 2)
    pool.free([5, 4])
    assert (list(pool.free_runs()), pool.num_free_runs) == ([(2, 5)], 1)
    assert pool.largest_free_run() == 5
    pool.check_integrity()


@pytest.mark.parametrize("block_ids", [[5], [0, 5], [1, 1]])
def test_a_double_free_is_an_error(block_ids: list[int]) -> None:
    pool = BlockPool(8)
    pool.allocate(4)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(block_ids)


@pytest.mark.parametrize("block_id", [-1, 8])
def test_a_foreign_block_is_an_error(block_id: int) -> None:
    pool = BlockPool(8)
    pool.allocate(8)
    with pytest.raises(AssertionError, match=f"no block {block_id}"):
        pool.free([block_id])


def test_more_than_is_free_is_an_error() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="3 of 2 free blocks"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_an_exhausted_pool_recovers() -> None:
    pool = BlockPool(3)
    assert sorted(pool.allocate(3)) == [0, 1, 2]
    assert (pool.num_free, pool.largest_free_run()) == (0, 0)
    assert pool.allocate(0) == []
    pool.free([0, 1, 2])
    assert list(pool.free_runs()) == [(0, 3)]


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_pool_without_blocks_is_refused(num_blocks: int) -> None:
    with pytest.raises(ValueError, match="a pool needs"):
        BlockPool(num_blocks)


def test_integrity_notices_a_wrong_mark() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    pool._is_free[0] = 1
    with pytest.raises(AssertionError):
        pool.check_integrity()


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_against_a_set(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 40))
    pool = BlockPool(size)
    used: list[int] = []
    for _ in range(data.draw(st.integers(1, 40))):
        if used and data.draw(st.booleans()):
            count = data.draw(st.integers(1, len(used)))
            chosen = data.draw(st.permutations(used))[:count]
            pool.free(chosen)
            used = [block_id for block_id in used if block_id not in chosen]
        else:
            count = data.draw(st.integers(0, size - len(used)))
            after = data.draw(st.none() | st.sampled_from(used)) if used else None
            taken = pool.allocate(count, after)
            assert len(set(taken)) == count
            assert set(taken).isdisjoint(used)
            if after is not None and after + 1 < size and after + 1 not in used and count:
                assert taken[0] == after + 1
            used += taken
        assert pool.num_free == size - len(used)
        pool.check_integrity()
