"""What drafts may cost: the expected gain, the allowance, and the bound on what is lost."""

from __future__ import annotations

import pytest

from model_worker.draft_account import (
    GRACE,
    LOSS_SHARE,
    MAX_BALANCE,
    MAX_DRAFT_TOKENS,
    PROBE_LENGTH,
    Acceptance,
    DraftAccount,
    best_length,
)


def cheap(count: int) -> float:
    return 0.07 * count


def test_acceptance_starts_with_its_prior_and_follows_what_is_measured() -> None:
    acceptance = Acceptance(prior_weight=2.0, memory=1.0)
    assert acceptance.rate(0.3) == pytest.approx(0.3)
    acceptance.add(8, 8)
    assert acceptance.rate(0.3) == pytest.approx((8 + 0.6) / 10)
    # Of eight drafts whose third is wrong, three were tested.
    acceptance.add(8, 2)
    assert acceptance.rate(0.3) == pytest.approx((10 + 0.6) / 13)


def test_acceptance_forgets() -> None:
    acceptance = Acceptance(prior_weight=2.0, memory=0.5)
    acceptance.add(4, 4)
    for _ in range(20):
        acceptance.add(4, 0)
    assert acceptance.rate(0.9) == pytest.approx(1.8 / 4, abs=1e-3)


@pytest.mark.parametrize(
    ("rate", "cost", "wanted"),
    [
        (1.0, 0.07, MAX_DRAFT_TOKENS),
        (1.0, 1.01, 0),
        (0.9, 0.07, 24),  # 0.9^24 = 0.08
        (0.5, 0.07, 3),  # 0.5^4 = 0.06
        (0.3, 0.32, 0),
        (0.4, 0.32, 1),
        (0.05, 0.07, 0),
    ],
)
def test_drafts_are_as_long_as_they_are_expected_to_pay(
    rate: float, cost: float, wanted: int
) -> None:
    credit = 99.0 if wanted else GRACE
    assert best_length(rate, 99, credit, lambda count: cost * count).length == wanted


def test_the_limit_and_the_credit_cut_a_draft() -> None:
    assert best_length(1.0, 5, 99.0, cheap).length == 5
    assert best_length(1.0, 1, 99.0, cheap).length == 1
    assert best_length(1.0, 99, 0.30, cheap).length == 4
    assert best_length(1.0, 99, 0.06, cheap).length == 0


def test_where_nothing_is_expected_the_allowance_pays_for_a_trial() -> None:
    def dear(count: int) -> float:
        return 0.4 * count

    assert best_length(0.1, 99, GRACE + 0.79, dear).length == 0
    assert best_length(0.1, 99, GRACE + 0.81, dear).length == PROBE_LENGTH
    assert best_length(0.1, 99, GRACE + 0.81, dear).gain == 0.0
    assert best_length(0.1, 1, GRACE + 0.41, dear).length == 1


def test_a_request_that_only_loses_loses_no_more_than_the_share() -> None:
    account, acceptance = DraftAccount(), Acceptance(2.0, 0.85)
    spent = 0.0
    for num_output in range(1000):
        credit = account.credit(num_output)
        length = best_length(acceptance.rate(0.8), 99, credit, cheap).length
        account.spend(cheap(length))
        spent += cheap(length)
        if length:
            acceptance.add(length, 0)
    assert 0.2 < spent <= GRACE + LOSS_SHARE * 1000


def test_what_was_won_pays_for_long_drafts_but_not_for_ever() -> None:
    account = DraftAccount()
    assert account.credit(0) == GRACE
    account.earn(3)
    account.spend(0.5)
    assert account.credit(100) == pytest.approx(2.5 + GRACE + 1.0)
    account.earn(1000)
    assert account.credit(0) == MAX_BALANCE + GRACE
