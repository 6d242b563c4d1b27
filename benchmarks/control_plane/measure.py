"""What is measured of a cache, and the process that measures two in turn.

    PYTHON -m benchmarks.control_plane.measure NAMES NUM_BLOCKS BLOCK_SIZE

Prints one line of JSON: by side, its version and samples in seconds. Knows of the caches only what
benchmarks.control_plane.sides offers.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.control_plane.sides import SIDES, Side, Tokens

PROMPT_TOKENS = 100_000
NUM_PROMPTS = 9
VOCABULARY = 128_000
SHORT_PROMPT_BLOCKS = 4  # at most; a full cache is made of these
TAKES = {"1": 2_000, "32": 500, "3125": 16}  # blocks a call: calls
MAX_TAKE_S = 20.0  # of one size; a cache that is slower is measured with fewer calls
Samples = dict[str, list[float]]


def measure(names: Sequence[str], num_blocks: int, block_size: int) -> dict[str, Any]:
    results: dict[str, Any] = {name: {"samples": {}} for name in names}
    small = {
        name: SIDES[name](NUM_PROMPTS * 3_200 * 32 // block_size, block_size) for name in names
    }
    for name, side in small.items():
        results[name]["version"] = side.version
    _prompts(small, results)
    del small
    for name in names:  # one after another: two full ones might not fit
        gc.collect()
        side = SIDES[name](num_blocks, block_size)
        fill(side, num_blocks, block_size)
        _takes(side, results[name]["samples"])
    return results


def _prompts(sides: dict[str, Side], results: dict[str, Any]) -> None:
    """Admissions and matches of prompts of 100,000 tokens, the sides in turn."""
    rng = np.random.default_rng(20)
    for number in range(NUM_PROMPTS):
        tokens = rng.integers(0, VOCABULARY, PROMPT_TOKENS, dtype=np.int32)
        for name, side in sides.items():
            samples = results[name]["samples"]
            prompt = side.prepare(tokens)
            gc.collect()
            handle = _timed(samples, "admit", lambda s=side, p=prompt: s.admit(p), number)
            side.release(handle)
            again = side.prepare(tokens)
            found = _timed(samples, "match_stored", lambda s=side, p=again: s.match(p), number)
            # a whole prompt is never taken from the cache: its last token must be computed
            assert found >= PROMPT_TOKENS - 64, (name, found)


def fill(side: Side, num_blocks: int, block_size: int) -> None:
    """Prompts of one to four blocks, until the next has no room."""
    num_free = num_blocks
    for tokens in _short_prompts(block_size):
        num_free -= len(tokens) // block_size
        if num_free < 0:
            return
        side.release(side.admit(side.prepare(tokens)))


def _short_prompts(block_size: int) -> Iterator[Tokens]:
    rng = np.random.default_rng(21)
    while True:
        num_tokens = int(rng.integers(1, SHORT_PROMPT_BLOCKS + 1)) * block_size
        yield rng.integers(0, VOCABULARY, num_tokens, dtype=np.int32)


def _takes(side: Side, samples: Samples) -> None:
    """Seconds a block that must be evicted first, by the number of blocks in a call.

    Of all calls together: a cache may do the work of several calls in one of them.
    """
    side.take(max(side.num_free, 1))
    for size, num_calls in TAKES.items():
        count = int(size)
        started = now = time.perf_counter()
        num_blocks = 0
        while num_blocks < num_calls * count and now < started + MAX_TAKE_S:
            side.take(count)
            num_blocks += count
            now = time.perf_counter()
        samples[f"evict_{size}"] = [(now - started) / num_blocks]


def _timed(samples: Samples, name: str, action: Callable[[], Any], number: int) -> Any:
    """The first of all is warm-up and is not kept."""
    started = time.perf_counter()
    result = action()
    if number:
        samples.setdefault(name, []).append(time.perf_counter() - started)
    return result


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1].split(","), int(sys.argv[2]), int(sys.argv[3]))))
