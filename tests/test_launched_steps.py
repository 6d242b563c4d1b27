"""The queue in front of the device: how many steps stay open, and what a failure leaves."""

from __future__ import annotations

import pytest

from model_worker.batch import ScheduledBatch, StepResult
from model_worker.launched_steps import LaunchedSteps
from model_worker.model_runner import CompletedStep
from tests.deferred import DeferredRunner


class EmptyRunner:
    def launch(self, batch: ScheduledBatch) -> CompletedStep:
        return CompletedStep(StepResult(()))


def batch(number: int) -> ScheduledBatch:
    return ScheduledBatch((), (), number, 0)


@pytest.mark.parametrize("max_open", [0, 1])
def test_steps_are_taken_in_their_order(max_open: int) -> None:
    steps = LaunchedSteps(EmptyRunner(), max_open)
    for number in (1, 2):
        assert steps.launch(batch(number), float(number)) == max_open
    assert len(steps) == 2
    taken = [steps.take() for _ in range(2)]
    assert [(step.batch, step.started_s) for step in taken] == [(batch(1), 1.0), (batch(2), 2.0)]
    assert taken[0].pending.result() == StepResult(())


def test_behind_a_failed_launch_nothing_stays_open() -> None:
    device = DeferredRunner(EmptyRunner())
    steps = LaunchedSteps(device, 1)
    assert steps.launch(batch(1), 0.0) == 1
    device.fails_launch = True
    assert steps.launch(batch(2), 0.0) == 0
    assert steps.take().pending.result() == StepResult(())
    with pytest.raises(RuntimeError, match="failure of a launch"):
        steps.take().pending.result()


def test_what_is_abandoned_is_waited_for_whatever_it_comes_to() -> None:
    device = DeferredRunner(EmptyRunner())
    steps = LaunchedSteps(device, 1)
    device.fails_result = True
    steps.launch(batch(1), 0.0)
    steps.launch(batch(2), 0.0)
    assert steps.abandon() == [batch(1), batch(2)]
    assert (len(steps), device.num_queued) == (0, 0)
