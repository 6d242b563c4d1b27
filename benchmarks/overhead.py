"""What the engine itself costs: everything in a step but the model's forward.

    python -m benchmarks.overhead [--steps N] [--output FILE]

Four measurements. Null runner: 64 decoding requests over a runner that computes nothing, time of
a whole step. One step ahead: the same over a device whose steps take a fixed time, launched ahead
of the results and not, and the ratio of both. On the CPU: 8 decoding requests of the demo model,
share of the step outside the model's forward. Zero reuse: prompts that share nothing, one after
another; the time spent inside the scheduler and the cache, summed over the run, with the cache on
and off.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engine_kit import build_parts, clear, random_ids, run, step, submit
from benchmarks.report import median_ms, print_table, save
from model_worker.batch import ScheduledBatch, StepResult
from model_worker.build import WorkerParts
from model_worker.engine import Engine
from model_worker.model_runner import CompletedStep, PendingStep

NULL_REQUESTS = 64
DEVICE_STEP_S = 0.005
ROUNDS = 7


class NullRunner:
    """Answers each request that reaches its end with the same token."""

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        tokens = tuple((7,) if item.reaches_end else () for item in batch.scheduled)
        return CompletedStep(StepResult(tokens))


@dataclasses.dataclass(frozen=True)
class TimedStep:
    """Done at a time of the clock, and not before."""

    ends_s: float
    outcome: StepResult

    def result(self) -> StepResult:
        time.sleep(max(0.0, self.ends_s - time.perf_counter()))
        return self.outcome


class TimedDevice:
    """A null runner whose steps take ``step_s`` each, one after the other."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._free_s = 0.0

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        tokens = tuple((7,) if item.reaches_end else () for item in batch.scheduled)
        self._free_s = max(self._free_s, time.perf_counter()) + self._step_s
        return TimedStep(self._free_s, StepResult(tokens))


class Stopwatch:
    """Sums the seconds spent inside wrapped calls; a call inside another is counted once."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._depth = 0

    def wrap(self, owner: object, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            self._depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.total_s += time.perf_counter() - started

        setattr(owner, name, timed)


def decoding(engine: Engine, parts: WorkerParts, count: int, prompt_tokens: int) -> None:
    """``count`` requests, all past their prompts."""
    for number in range(count):
        ids = random_ids(prompt_tokens, parts.loaded.vocab_size, number)
        submit(engine, str(number), ids, 10**6)
    while sum(len(output.token_ids) for output in step(engine)[1]) < count:
        pass


def null_runner_step(parts: WorkerParts, num_steps: int) -> float:
    idle = dataclasses.replace(parts, runner=NullRunner())
    engine = idle.new_engine()
    decoding(engine, idle, NULL_REQUESTS, 300)
    seconds = []
    for _ in range(num_steps):
        elapsed, outputs = step(engine)
        engine.stats()
        assert len(outputs) == NULL_REQUESTS
        seconds.append(elapsed)
    clear(engine)
    parts.cache.reset()
    return median_ms(seconds)


def hidden_host_time(parts: WorkerParts, num_steps: int) -> dict[str, float]:
    """Rounds of both, one after the other, since the machine may have other things to do."""
    engines = {}
    for runs_ahead in (False, True):
        timed = dataclasses.replace(parts, runner=TimedDevice(DEVICE_STEP_S), runs_ahead=runs_ahead)
        engines[runs_ahead] = timed.new_engine(is_storing=False)
        decoding(engines[runs_ahead], timed, NULL_REQUESTS, 300)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(ROUNDS):
        for runs_ahead, engine in engines.items():
            started = time.perf_counter()
            for _ in range(num_steps):
                step(engine)
                engine.stats()
            seconds[runs_ahead].append((time.perf_counter() - started) / num_steps)
    for engine in engines.values():
        clear(engine)
    behind, ahead = median_ms(seconds[False]), median_ms(seconds[True])
    return {
        "device_ms": DEVICE_STEP_S * 1000,
        "step_ms": behind,
        "step_ahead_ms": ahead,
        "ratio": round(ahead / behind, 4),
    }


def cpu_overhead(parts: WorkerParts, num_steps: int) -> dict[str, float]:
    engine = parts.new_engine()
    decoding(engine, parts, 8, 300)
    forward = Stopwatch()
    forward.wrap(parts.runner, "_forward")
    total, outside = [], []
    for _ in range(num_steps):
        before = forward.total_s
        elapsed, _ = step(engine)
        total.append(elapsed)
        outside.append(elapsed - (forward.total_s - before))
    del parts.runner.__dict__["_forward"]
    clear(engine)
    parts.cache.reset()
    return {
        "step_ms": median_ms(total),
        "outside_forward_ms": median_ms(outside),
        "share": round(median_ms(outside) / median_ms(total), 4),
    }


def zero_reuse(parts: WorkerParts, num_prompts: int) -> dict[str, float]:
    engine = parts.new_engine()
    watch = Stopwatch()
    scheduler = engine._scheduler
    for name in ("schedule", "update", "add"):
        watch.wrap(scheduler, name)
    started = time.perf_counter()
    for number in range(num_prompts):
        ids = random_ids(400, parts.loaded.vocab_size, 1000 + number)
        submit(engine, str(number), ids, 16)
        run(engine)
    total = time.perf_counter() - started
    parts.cache.reset()
    return {
        "run_s": round(total, 3),
        "cache_and_scheduler_s": round(watch.total_s, 4),
        "share": round(watch.total_s / total, 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for kind in ("prefix", "none"):
        # Of its own, since the pacer remembers what steps cost: after those of the null runner it
        # would let the device's prefill hardly anything, and never have all requests past it.
        of_a_device = build_parts(cache=kind, max_model_len=4096)
        ahead = hidden_host_time(of_a_device, arguments.steps)
        del of_a_device
        parts = build_parts(cache=kind, max_model_len=4096)
        results[kind] = {
            "null_runner_64_step_ms": null_runner_step(parts, 5 * arguments.steps),
            "one_step_ahead": ahead,
            "cpu_8_requests": cpu_overhead(parts, arguments.steps),
            "zero_reuse": zero_reuse(parts, 12),
        }
        del parts
    rows = [
        ("step of 64 requests, null runner, ms", "null_runner_64_step_ms", None, "<= 1"),
        ("5 ms of a device for 64 requests, ahead / not", "one_step_ahead", "ratio", "< 1"),
        ("share outside forward, 8 requests", "cpu_8_requests", "share", "<= 0.05"),
        ("zero reuse, share in cache and scheduler", "zero_reuse", "share", "<= 0.01"),
    ]
    table = []
    for label, key, field, goal in rows:
        values = [results[kind][key] for kind in ("prefix", "none")]
        table.append((label, *(value[field] if field else value for value in values), goal))
    print_table(table, ("what", "cache on", "cache none", "goal"))
    save("overhead", "see the module's text", results, arguments.output)


if __name__ == "__main__":
    main()
