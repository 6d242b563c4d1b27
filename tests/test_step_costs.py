"""Step costs: what is told from whole steps, by size, and what stands in for the unmeasured."""

from __future__ import annotations

import pytest

from model_worker.step_costs import SMOOTHING, StepCosts


def measured() -> StepCosts:
    costs = StepCosts()
    costs.record(1, 0, 0.040)
    costs.record(0, 100, 0.240)
    return costs


def test_nothing_measured() -> None:
    costs = StepCosts()
    assert (costs.decode_step_s(3), costs.prefill_token_s, costs.drafts_s(1, 4)) == (None, None, 0)
    costs.record(1, 0, 0.1, num_drafts=3)  # of what a step is without drafts nothing is known
    assert costs.drafts_s(1, 3) == 0


def test_drafts_cost_a_prefill_token_each_until_they_are_measured() -> None:
    assert measured().drafts_s(1, 4) == pytest.approx(4 * 0.002)


def test_drafts_cost_what_lies_above_the_step_without() -> None:
    costs = measured()
    for _ in range(200):
        costs.record(1, 0, 0.046, num_drafts=6)
    assert costs.drafts_s(1, 6) == pytest.approx(0.006)
    assert costs.drafts_s(1, 4) == pytest.approx(0.004)  # of the same size of step
    costs.record(1, 0, 0.086, num_drafts=6)
    assert costs.drafts_s(1, 6) == pytest.approx(0.006 + SMOOTHING * 0.040)
    assert costs.decode_step_s(1) == pytest.approx(0.040)


def test_drafts_are_told_apart_by_the_size_of_the_step() -> None:
    costs = measured()
    for _ in range(200):
        costs.record(1, 0, 0.044, num_drafts=1)
        costs.record(1, 0, 0.070, num_drafts=30)
    assert costs.drafts_s(1, 1) == pytest.approx(0.004)
    assert costs.drafts_s(1, 30) == pytest.approx(0.030)
    assert costs.drafts_s(8, 30) == pytest.approx(0.030)  # nearest measured size


def test_a_step_that_was_quicker_than_without_drafts_makes_them_free() -> None:
    costs = measured()
    for _ in range(100):
        costs.record(1, 0, 0.030, num_drafts=2)
    assert costs.drafts_s(1, 2) == 0


def test_drafts_beside_a_prompt_are_part_of_its_chunk() -> None:
    costs = measured()
    costs.record(1, 90, 0.040 + 0.400, num_drafts=10)
    assert costs.prefill_token_s == pytest.approx(0.002 + SMOOTHING * 0.002)


def test_what_was_measured_can_be_forgotten() -> None:
    costs = StepCosts()
    costs.record(1, 0, 5.0)
    costs.record(1, 10, 6.0)
    costs.record(1, 0, 5.0, 0)
    costs.record(1, 0, 7.0, 2)
    costs.clear()
    assert costs.decode_step_s(1) is None
    assert costs.prefill_token_s is None
    assert costs.drafts_s(1, 2) == 0.0


def test_what_the_host_needs_is_nothing_until_it_is_measured_and_is_forgotten() -> None:
    costs = StepCosts()
    assert costs.launch_s == 0.0
    costs.record_launch(0.002)
    costs.record_launch(0.001)
    assert costs.launch_s == pytest.approx(0.002 - SMOOTHING * 0.001)
    costs.clear()
    assert costs.launch_s == 0.0
