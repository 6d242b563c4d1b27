"""Speed and memory of the prefix cache alone: no model, no tensors.

    python -m benchmarks.tree [--output FILE] [--num-blocks N]

Prints a table and writes JSON. Every figure is the median of its repetitions in wall-clock
seconds, with the process time beside it, since other programs may share the machine. Shapes of
the tree: ``single`` has a node per block (the worst there is), ``short`` has edges of 1-4 blocks,
``long`` of 3,125 blocks (100,000 tokens at block size 32). A quarter of the blocks is evicted by a
lease that grows block by block, a quarter by one that grows by 32, and the rest in one call.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import print_table, save
from cache_store.block_hash import HASH_VERSION, Namespace
from cache_store.cache import Lease
from cache_store.eviction import make_eviction_policy
from cache_store.prefix_cache import PrefixCache
from cache_store.token_bytes import TokenIds

SEED = 20
VOCAB_SIZE = 128_000
PROMPT_TOKENS = 100_000
PROBE_TOKENS = 4_096
SCRATCH_BYTES = 96 * 2**20  # more than the last level of cache
NAMESPACE = Namespace("benchmark")
SHAPES = {"single": (1, 1), "short": (1, 4), "long": (3_125, 3_125)}  # blocks per edge
GOALS = {
    "match_and_commit_s": 0.015,
    "held_bytes_per_million_blocks": 700e6,
    "evict_s_per_million_blocks": 10.0,
    "match_ratio_1m_to_10k": 1.5,
}


class Timer:
    """Wall and process seconds of repetitions."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.process: list[float] = []

    def run(self, action: Callable[[], Any]) -> Any:
        process, wall = time.process_time(), time.perf_counter()
        result = action()
        self.wall.append(time.perf_counter() - wall)
        self.process.append(time.process_time() - process)
        return result

    def per_million(self, num_blocks: int) -> dict[str, float]:
        """Of a single repetition that handled ``num_blocks`` blocks."""
        return {
            "s_per_million_blocks": self.wall[0] * 1_000_000 / num_blocks,
            "process_s_per_million_blocks": self.process[0] * 1_000_000 / num_blocks,
        }

    def summary(self) -> dict[str, float]:
        return {
            "median_s": statistics.median(self.wall),
            "min_s": min(self.wall),
            "max_s": max(self.wall),
            "median_process_s": statistics.median(self.process),
        }


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def random_prompts(num_tokens: Callable[[], int], seed: int) -> Iterator[TokenIds]:
    rng = np.random.default_rng(seed)
    while True:
        yield rng.integers(0, VOCAB_SIZE, num_tokens(), dtype=np.int32)


def admit(cache: PrefixCache, prompt: TokenIds) -> Lease:
    """What a scheduler does before it runs a prompt, its row copy taken as done."""
    lease = cache.acquire(cache.match(NAMESPACE, prompt))
    assert cache.allocate(lease, len(prompt))
    if lease.pending_copy is not None:
        cache.copied(lease)
    return lease


def store(cache: PrefixCache, prompt: TokenIds) -> None:
    cache.release(admit(cache, prompt), prompt, len(prompt))


def filled_cache(shape: str, num_blocks: int, block_size: int) -> PrefixCache:
    """A cache whose blocks are all in the tree."""
    cache = PrefixCache(num_blocks, block_size, make_eviction_policy("lru"))
    rng = np.random.default_rng(SEED)
    low, high = SHAPES[shape]
    prompts = random_prompts(lambda: int(rng.integers(low, high + 1)) * block_size, SEED + 1)
    num_free = num_blocks
    while num_free:
        prompt = next(prompts)[: num_free * block_size]
        store(cache, prompt)
        num_free = cache.stats().num_free
    return cache


def match_and_commit(cache: PrefixCache, prompt: TokenIds, lease: Lease) -> None:
    cache.match(NAMESPACE, prompt)
    cache.commit(lease, prompt, len(prompt))


def measure_prompt(block_size: int, repetitions: int = 15) -> dict[str, Any]:
    """match + commit of a cold 100,000-token prompt, and the match of a warm one."""
    cache = PrefixCache(PROMPT_TOKENS // block_size * 4, block_size, make_eviction_policy("lru"))
    prompts = random_prompts(lambda: PROMPT_TOKENS, SEED)
    cold, warm = Timer(), Timer()
    for _ in range(repetitions):
        prompt = next(prompts)
        lease = admit(cache, prompt)

        cold.run(partial(match_and_commit, cache, prompt, lease))
        cache.release(lease, prompt, len(prompt))
        match = warm.run(partial(cache.match, NAMESPACE, prompt))
        assert match.num_tokens == PROMPT_TOKENS
    return {
        "block_size": block_size,
        "match_and_commit_cold": cold.summary(),
        "match_warm": warm.summary(),
    }


def measure_memory(shape: str, num_blocks: int, block_size: int) -> dict[str, Any]:
    """Resident memory of a full cache, its pool included, and the times to evict its parts."""
    gc.collect()
    before = resident_bytes()
    building = Timer()
    cache = building.run(lambda: filled_cache(shape, num_blocks, block_size))
    gc.collect()
    held = resident_bytes() - before
    lease = admit(cache, np.zeros(0, dtype=np.int32))
    evicting = {
        str(count): evict_some(cache, lease, num_blocks // 4, count, block_size)
        for count in (1, 32)
    }
    evicting["all"] = evict_rest(cache)
    assert cache.stats().num_cached == 0
    return {
        "shape": shape,
        "block_size": block_size,
        "num_blocks": num_blocks,
        "held_bytes": held,
        "held_bytes_per_million_blocks": held * 1_000_000 / num_blocks,
        "process_bytes": before + held,
        "build_s": building.wall[0],
        "evict_by_blocks_per_call": evicting,
    }


def evict_some(
    cache: PrefixCache, lease: Lease, num_blocks: int, blocks_per_call: int, block_size: int
) -> dict[str, float]:
    """Let one long lease grow by ``num_blocks`` blocks, some at a time, in a full cache."""
    start = len(lease.block_ids)
    goal = start + num_blocks

    def grow() -> None:
        for count in range(start + blocks_per_call, goal + blocks_per_call, blocks_per_call):
            assert cache.allocate(lease, min(count, goal) * block_size)

    timer = Timer()
    timer.run(grow)
    return timer.per_million(num_blocks)


def evict_rest(cache: PrefixCache) -> dict[str, float]:
    """Evict everything, in the policy's order, in one call."""
    timer = Timer()
    num_blocks = timer.run(cache.reset)
    return timer.per_million(num_blocks)


def measure_match(num_blocks: int, block_size: int, repetitions: int = 4) -> dict[str, Any]:
    """Matches of prompts that are stored in a cache full of random prefixes.

    A probe is a prompt of 4,096 tokens, the first half of them stored. The processor's caches are
    overwritten before each match, as a step of a model does to them.
    """
    num_stored = PROBE_TOKENS // 2
    probes = list(islice(random_prompts(lambda: PROBE_TOKENS, SEED + 2), 64))
    num_probe_blocks = len(probes) * num_stored // block_size
    cache = PrefixCache(num_blocks, block_size, make_eviction_policy("lru"))
    rng = np.random.default_rng(SEED)
    fill = random_prompts(lambda: int(rng.integers(1, 5)) * block_size, SEED + 1)
    while cache.stats().num_free > num_probe_blocks + 4:
        store(cache, next(fill))
    for probe in probes:
        store(cache, probe[:num_stored])
    scratch = np.zeros(SCRATCH_BYTES // 8)
    timer = Timer()
    for _ in range(repetitions):
        for probe in probes:
            scratch += 1
            match = timer.run(partial(cache.match, NAMESPACE, probe))
            assert match.num_block_tokens == num_stored
    return {"num_blocks": num_blocks, "block_size": block_size, **timer.summary()}


def rows(result: dict[str, Any]) -> Iterator[tuple[str, float, float | None, str]]:
    """(what, measured, goal, unit) of each line of the table."""
    for prompt in result["prompt"]:
        size = prompt["block_size"]
        cold, warm = prompt["match_and_commit_cold"], prompt["match_warm"]
        goal = GOALS["match_and_commit_s"] * 1e3
        yield f"match + commit, 100,000 tokens, block {size}", cold["median_s"] * 1e3, goal, "ms"
        yield f"match when stored, 100,000 tokens, block {size}", warm["median_s"] * 1e3, None, "ms"
    for memory in result["memory"]:
        shape = f"{memory['num_blocks']:,} blocks, {memory['shape']} edges"
        held = memory["held_bytes_per_million_blocks"] / 1e6
        yield f"held, {shape}", held, GOALS["held_bytes_per_million_blocks"] / 1e6, "MB per million"
        for count, evicting in memory["evict_by_blocks_per_call"].items():
            # the goal is for evicting them all; the others include the growth of a lease
            goal = GOALS["evict_s_per_million_blocks"] if count == "all" else None
            seconds = evicting["s_per_million_blocks"]
            yield f"evicted by {count}, {shape}", seconds, goal, "s per million"
    for match in result["match"]:
        yield f"match among {match['num_blocks']:,} blocks", match["median_s"] * 1e6, None, "us"
    yield "match ratio", result["match_ratio"], GOALS["match_ratio_1m_to_10k"], "x"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--num-blocks", type=int, default=1_000_000)
    parser.add_argument("--block-size", type=int, default=32)
    arguments = parser.parse_args()
    num_blocks, block_size = arguments.num_blocks, arguments.block_size
    if num_blocks < 10_000:
        parser.error("--num-blocks must be at least 10000")
    result: dict[str, Any] = {"goals": GOALS, "hash_version": HASH_VERSION}
    result["prompt"] = [measure_prompt(size) for size in (32, 16)]
    result["memory"] = [measure_memory(shape, num_blocks, block_size) for shape in SHAPES]
    result["match"] = [measure_match(count, block_size) for count in (10_000, num_blocks)]
    few, many = result["match"]
    result["match_ratio"] = many["median_s"] / few["median_s"]
    result["summary"] = [
        (what, f"{measured:,.2f} {unit}", "" if goal is None else f"<= {goal:g} {unit}")
        for what, measured, goal, unit in rows(result)
    ]
    print_table(result["summary"], ("what", "measured", "goal"))
    save("tree", "random prompts; see the module's text", result, arguments.output, SEED)


if __name__ == "__main__":
    main()
