"""Decode step time against a bare forward over a preallocated contiguous cache.

    python -m benchmarks.decode [--steps N] [--output FILE]

Workload: 1 and 8 requests with 512 and 4,096 tokens of context each, no two of them alike. A step
of the engine (schedule, execute, update, outputs taken) alternates with a bare forward of the same
batch and context; medians of both and their ratio. With and without the cache.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch

from benchmarks.bare import BareModel
from benchmarks.engine_kit import build_parts, clear, random_ids, step, submit
from benchmarks.report import median_ms, print_table, save
from model_worker.batch import ScheduledBatch, StepResult
from model_worker.build import WorkerParts
from model_worker.model_runner import CompletedStep, PendingStep, Runner

CASES = ((1, 512), (8, 512), (1, 4096), (8, 4096))
GOAL = 1.10


class PretendingRunner:
    """Answers prompts without computing them: what the pool holds does not change the time."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.is_pretending = True

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        if not self.is_pretending:
            return self._runner.launch(batch)
        tokens = tuple((7,) if item.reaches_end else () for item in batch.scheduled)
        return CompletedStep(StepResult(tokens))


def measure_case(
    parts: WorkerParts, bare: BareModel, batch: int, context: int, num_steps: int
) -> tuple[float, float]:
    vocab = parts.loaded.vocab_size
    runner = PretendingRunner(parts.runner)
    engine = dataclasses.replace(parts, runner=runner, runs_ahead=False).new_engine()
    for number in range(batch):
        submit(engine, str(number), random_ids(context, vocab, number), 10**6)
    while sum(len(output.token_ids) for output in step(engine)[1]) < batch:
        pass
    runner.is_pretending = False
    cache = bare.cache(context + num_steps + 64)
    bare.forward(torch.zeros(batch, 2, dtype=torch.long), cache, 0)
    for layer in cache.layers:
        layer.pretend()
    ours, ideal = [], []
    for number in range(-3, num_steps):
        seconds, outputs = step(engine)
        assert len(outputs) == batch
        ids = torch.full((batch, 1), 7)
        bare_seconds = bare.forward(ids, cache, context + 4 + number)
        if number >= 0:
            ours.append(seconds)
            ideal.append(bare_seconds)
    clear(engine)
    parts.cache.reset()
    return median_ms(ours), median_ms(ideal)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    bare = BareModel()
    for kind in ("prefix", "none"):
        parts = build_parts(cache=kind, kv_cache_memory=3 * 2**30, max_model_len=8192)
        # Pages that were never written are one page of zeros, which no memory bus ever sees.
        parts.tier.keys.normal_()
        parts.tier.values.normal_()
        for batch, context in CASES:
            ours, ideal = measure_case(parts, bare, batch, context, arguments.steps)
            results.append(
                {
                    "cache": kind,
                    "requests": batch,
                    "context": context,
                    "engine_ms": ours,
                    "bare_ms": ideal,
                    "ratio": round(ours / ideal, 3),
                }
            )
        del parts
    print_table([(*row.values(), GOAL) for row in results], (*results[0], "goal"))
    workload = f"median of {arguments.steps} decode steps, interleaved with bare forwards"
    save("decode", workload, results, arguments.output)


if __name__ == "__main__":
    main()
