"""What noting a request costs on its way, and what explaining one costs afterwards, in its thread.

python -m benchmarks.explain

Noting is what every request pays: from the first line for it to the last, for a prompt of 4,096
tokens and an answer of 256. Explaining is paid when somebody asks, of a request that goes on from
an earlier one (hit), of one that differs in its first line (diverged).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from model_worker.protocol import RequestOutput
from service.diagnostics.analyst import Analyst
from service.diagnostics.diagnostics import Diagnostics
from service.diagnostics.trace import RequestTrace, TracedPrompt

NUM_PROMPT_TOKENS = 4096
NUM_OUTPUT_TOKENS = 256
BLOCK_SIZE = 32
ROUNDS = 300


def main() -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 49_152, NUM_PROMPT_TOKENS, dtype=np.int32)
    answer = rng.integers(0, 49_152, NUM_OUTPUT_TOKENS).tolist()
    note, ask = measured(lambda: noting(ids, answer)), explaining(ids, answer)
    print(f"noting a request of {NUM_PROMPT_TOKENS} tokens: {note * 1e6:.1f} us")
    for name, seconds in ask.items():
        print(f"explaining one, {name}: {seconds * 1e6:.0f} us")


def noting(ids: np.ndarray, answer: list[int]) -> Callable[[], None]:
    """A round of what a request does; the store stays full, so each pushes one out."""
    diagnostics = Diagnostics(time.perf_counter)
    number = 0

    def note() -> None:
        nonlocal number
        number += 1
        traced = TracedPrompt(
            request_id=f"{number:032x}",
            tenant="t",
            model="m",
            fingerprint="f",
            block_size=BLOCK_SIZE,
            num_tokens=len(ids),
            token_ids=ids,
        )
        trace = diagnostics.begin(traced, time.perf_counter())
        trace.sent("w", 1)
        trace.admitted(RequestOutput(request_id="r", num_cached_tokens=0), 0.0)
        for _ in answer:
            trace.token(None)
        trace.ended("stop", 0.1, answer)

    return note


def measured(make: Callable[[], Callable[[], None]]) -> float:
    """Seconds, the median of ROUNDS."""
    run = make()
    seconds = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def explaining(ids: np.ndarray, answer: list[int]) -> dict[str, float]:
    """Seconds in the analyst's thread for each request, without the decoding of texts."""
    found = {}
    for name, is_changed in (("hit", False), ("diverged", True)):
        analyst, traces = Analyst(lambda: None), []
        for number in range(1, 101):
            prompt = ids.copy()
            if is_changed:
                prompt[20] = number
            traced = TracedPrompt(
                request_id=f"{number}",
                fingerprint="f",
                block_size=BLOCK_SIZE,
                num_tokens=len(prompt),
                token_ids=prompt,
            )
            trace = RequestTrace(traced)
            trace.number = number
            cached = 20 if is_changed else len(prompt) - 200
            trace.admitted(RequestOutput(request_id="r", num_cached_tokens=cached), 0.0)
            trace.ended("stop", 0.1, answer)
            traces.append(trace)
        begun = time.perf_counter()
        analyst.advance(traces)
        found[name] = (time.perf_counter() - begun) / len(traces)
    return found


if __name__ == "__main__":
    main()
