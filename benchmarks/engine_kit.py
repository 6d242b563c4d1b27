"""A worker's parts in this process, stepped by hand, for benchmarks of the engine alone."""

from __future__ import annotations

import gc
import time

import numpy as np
import numpy.typing as npt

from model_worker.build import WorkerParts, build_worker
from model_worker.engine import Engine
from model_worker.protocol import AddRequest, RequestOutput, SamplingParams, WorkerConfig

LINK = "benchmark"
STALL_S = 0.0002


def build_parts(**overrides: object) -> WorkerParts:
    """The parts of `headstart worker --model demo`, with other settings where given."""
    config = WorkerConfig(endpoint="ipc://unused", worker_id="benchmark", **overrides)  # type: ignore[arg-type]
    parts = build_worker(config, lambda line: print(f"  {line}"))
    # As a worker does: else the collector looks at all that was imported again and again.
    gc.collect()
    gc.freeze()
    return parts


def submit(
    engine: Engine,
    name: str,
    prompt: npt.NDArray[np.int32] | list[int],
    max_tokens: int,
    *,
    tenant: str = "",
    cache_salt: str = "",
) -> None:
    engine.add_request(
        LINK,
        AddRequest(
            request_id=name,
            prompt_token_ids=np.asarray(prompt, dtype="<i4").tobytes(),
            sampling_params=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            tenant=tenant,
            cache_salt=cache_salt,
        ),
    )


def step(engine: Engine) -> tuple[float, list[RequestOutput]]:
    """Seconds of one step with its outputs taken, as the engine loop does."""
    started = time.perf_counter()
    engine.step()
    if engine.is_stalled:
        time.sleep(STALL_S)  # in place of the wake-up that the engine loop waits for
    outputs = engine.take_outputs().get(LINK, [])
    engine.take_events()
    return time.perf_counter() - started, outputs


def settle(engine: Engine) -> None:
    """Let all that is still to be copied to lower tiers be copied."""
    while engine.is_saving:
        time.sleep(STALL_S)
        engine.advance_transfers()


def run(engine: Engine) -> None:
    while engine.has_work:
        step(engine)


def clear(engine: Engine) -> None:
    """End all requests, and wait until no step uses their blocks any more."""
    engine.abort_link(LINK)
    run(engine)
    engine.take_outputs()


def time_to_first_token(
    engine: Engine, name: str, prompt: npt.NDArray[np.int32] | list[int]
) -> tuple[float, int]:
    """Seconds from submission to the first token, and how many tokens were cached."""
    started = time.perf_counter()
    submit(engine, name, prompt, 1)
    cached = -1
    while engine.has_work:
        for output in step(engine)[1]:
            if output.num_cached_tokens is not None:
                cached = output.num_cached_tokens
    return time.perf_counter() - started, cached


def random_ids(count: int, vocab_size: int, seed: int) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(10, vocab_size, count, dtype=np.int32)
