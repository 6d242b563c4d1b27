"""A device that is always as late as it may be: for steps that are launched ahead of a result.

Owns a runner that computes nothing before somebody waits for it, so what a step needs has to be
there until its result was taken, and a runner that computes on a thread of its own. Knows nothing
of what a step computes: another runner does that.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from model_worker.batch import ScheduledBatch, StepResult
from model_worker.model_runner import Runner


@dataclass
class DeferredStep:
    runner: DeferredRunner
    batch: ScheduledBatch
    fails: bool = False
    outcome: StepResult | Exception | None = None
    is_taken: bool = False

    def result(self) -> StepResult:
        assert not self.is_taken, "a result is taken once"
        self.is_taken = True
        self.runner.compute_until(self)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome


class DeferredRunner:
    """Computes steps in the order of their launch, each when its result is asked for.

    ``fails_launch`` and ``fails_result``: the next step to be launched fails then or later.
    """

    def __init__(self, inner: Runner) -> None:
        self._inner = inner
        self._queue: deque[DeferredStep] = deque()
        self.fails_launch = False
        self.fails_result = False
        self.max_queued = 0

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def launch(self, batch: ScheduledBatch) -> DeferredStep:
        if self.fails_launch:
            self.fails_launch = False
            raise RuntimeError("scripted failure of a launch")
        step = DeferredStep(self, batch, self.fails_result)
        self.fails_result = False
        self._queue.append(step)
        self.max_queued = max(self.max_queued, len(self._queue))
        return step

    def compute_until(self, last: DeferredStep) -> None:
        while self._queue and last.outcome is None:
            step = self._queue.popleft()
            step.outcome = self._compute(step)
            if isinstance(step.outcome, Exception) and self._queue:
                self._queue[0].fails = True  # it takes tokens that were never drawn

    def _compute(self, step: DeferredStep) -> StepResult | Exception:
        if step.fails:
            return RuntimeError("scripted failure of a step")
        try:
            return self._inner.launch(step.batch).result()
        except Exception as error:
            return error


@dataclass(frozen=True)
class _ThreadedStep:
    future: Future[StepResult]

    def result(self) -> StepResult:
        return self.future.result()


@dataclass
class ThreadedRunner:
    """Computes steps beside the engine, in the order of their launch."""

    inner: Runner
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def launch(self, batch: ScheduledBatch) -> _ThreadedStep:
        return _ThreadedStep(self._thread.submit(self._compute, batch))

    def _compute(self, batch: ScheduledBatch) -> StepResult:
        return self.inner.launch(batch).result()

    def close(self) -> None:
        self._thread.shutdown()
