from itertools import pairwise

import pytest

from cache_store.reuse_model import (
    NUM_BINS,
    NUM_KINDS,
    NUM_PRIVATE,
    NUM_SIZES,
    ReuseModel,
    bin_edges,
    bin_of,
)

ONE_OFF, SECOND_TURN = 0, NUM_SIZES


def test_bins_are_half_octaves() -> None:
    assert [bin_of(age) for age in (-5, 0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 16)] == [
        0, 0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 8,
    ]  # fmt: skip
    assert bin_of(2**80) == NUM_BINS - 1


def test_each_bin_begins_where_its_edge_is() -> None:
    edges = bin_edges()
    assert len(edges) == NUM_BINS + 1
    for number, edge in enumerate(edges[:NUM_BINS]):
        assert bin_of(int(edge)) == number
        assert number == 0 or bin_of(int(edge) - 1) == number - 1


@pytest.mark.parametrize("kind", [0, NUM_PRIVATE - 1, NUM_PRIVATE, NUM_KINDS - 1])
def test_what_was_never_counted_is_worth_less_the_older_it_is(kind: int) -> None:
    model = ReuseModel()
    worths = [model.worth(kind, number) for number in range(NUM_BINS - 1)]
    assert all(young > old > 0 for young, old in pairwise(worths))


def count(model: ReuseModel, kind: int, reused_at: int, num_reused: int, num_lost: int) -> None:
    """Requests, some used again at that age and the others not for far longer."""
    for number in range(bin_of(reused_at)):
        model.count_survival(kind, number, num_reused + num_lost)
    model.count_reuse(kind, reused_at, num_reused)
    for number in range(bin_of(reused_at), bin_of(reused_at) + 12):
        model.count_survival(kind, number, num_lost)


def test_kinds_that_come_back_are_worth_more_than_those_that_do_not() -> None:
    model = ReuseModel()
    count(model, ONE_OFF, 1000, 5, 195)
    count(model, SECOND_TURN, 1000, 100, 100)
    model.refresh(1)
    age = bin_of(500)
    assert model.worth(SECOND_TURN, age) > 5 * model.worth(ONE_OFF, age)


def test_what_is_about_to_come_back_is_worth_more_than_what_was_just_used() -> None:
    model = ReuseModel()
    count(model, ONE_OFF, 1000, 150, 50)
    model.refresh(1)
    just_used, about, overdue = (model.worth(ONE_OFF, bin_of(age)) for age in (0, 1000, 6000))
    assert overdue < just_used < about


def test_old_counts_fade() -> None:
    model = ReuseModel(half_life=10)
    count(model, ONE_OFF, 1000, 0, 200)
    count(model, SECOND_TURN, 1000, 200, 0)
    model.refresh(0)
    before = model.worth(SECOND_TURN, bin_of(1000)) / model.worth(ONE_OFF, bin_of(1000))
    model.refresh(200)
    after = model.worth(SECOND_TURN, bin_of(1000)) / model.worth(ONE_OFF, bin_of(1000))
    assert before > 10
    assert after < 2


def test_a_size_tells_of_turns_that_were_never_seen_with_it() -> None:
    """What large growth means to one-offs is believed of second turns as well."""
    model = ReuseModel()
    count(model, ONE_OFF + 1, 1000, 100, 100)
    count(model, ONE_OFF + 6, 1000, 2, 198)
    model.refresh(1)
    small, large = (model.worth(SECOND_TURN + size, bin_of(500)) for size in (1, 6))
    assert small > 1.5 * large


def test_what_is_older_than_anything_seen_is_worth_less_than_an_old_one_off() -> None:
    """However often second turns came back, at ages that were seen."""
    model = ReuseModel()
    count(model, ONE_OFF, 1000, 20, 180)
    count(model, SECOND_TURN, 1000, 190, 10)
    model.refresh(1)
    seen, unseen = bin_of(1000) + 2, bin_of(1000) + 26
    assert model.worth(SECOND_TURN, unseen) < 0.01 * model.worth(ONE_OFF, seen)
