"""What the cache would have hit of recorded traffic, by capacity and eviction policy.

    python -m benchmarks.trace_replay [--trace NAME] [--policy NAME] [--data FOLDER] [--output FILE]

Drives the real prefix cache, with its tree, pool and eviction policy, without a model and without
tensors: every block of a trace becomes one block of one token, so that ids compare and chain as
token ids do. One request after another: match, acquire, allocate, release with the whole prompt.
Answers are not inserted, since the traces do not say what they were. A hit rate is the blocks
found as a prefix over all prompt blocks; by tokens it counts a partly filled block as what it has.

Ends with an error unless the hit rates under lru and those of an unbounded cache are, to 4 digits,
those of the catalogue; writes JSON, and beside it a table (.md) and a plot (.png).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import print_table, save
from benchmarks.trace_plot import plot_policies
from benchmarks.traces import CATALOGUE, DATA, Trace, TraceSource, load_trace, source_named
from cache_store.block_hash import Namespace
from cache_store.eviction import EVICTION_POLICIES, make_eviction_policy
from cache_store.prefix_cache import PrefixCache

NAMESPACE = Namespace("trace")
WORKLOAD = "recorded traces, see benchmarks/data/README.md; answers not inserted"


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Hits and totals of one replay, in blocks and in tokens."""

    num_hit_blocks: int
    num_blocks: int
    num_hit_tokens: int
    num_tokens: int
    num_evicted_blocks: int

    @property
    def block_hit_rate(self) -> float:
        return self.num_hit_blocks / self.num_blocks

    @property
    def token_hit_rate(self) -> float:
        return self.num_hit_tokens / self.num_tokens


def replay(trace: Trace, num_blocks: int, policy: str) -> ReplayResult:
    """Run ``trace`` through a cache of ``num_blocks`` blocks.

    Raises ValueError if the longest prompt does not fit.
    """
    if num_blocks < trace.num_longest_blocks:
        raise ValueError(f"{num_blocks} blocks cannot hold a prompt of {trace.num_longest_blocks}")
    cache = PrefixCache(num_blocks, 1, make_eviction_policy(policy))
    num_hit_blocks = num_hit_tokens = 0
    for request in trace.requests:
        block_ids = request.block_ids
        match = cache.match(NAMESPACE, block_ids)
        lease = cache.acquire(match)
        assert cache.allocate(lease, len(block_ids)), "an unlocked cache can always make room"
        cache.release(lease, block_ids, len(block_ids))
        num_hit_blocks += match.num_tokens
        num_hit_tokens += min(match.num_tokens * trace.block_tokens, request.num_tokens)
    num_evicted = cache.stats().evicted_total
    return ReplayResult(
        num_hit_blocks, trace.num_blocks, num_hit_tokens, trace.num_tokens, num_evicted
    )


def replay_source(
    source: TraceSource, policies: Sequence[str], folder: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """All capacities of a trace, the unbounded one last, under each policy."""
    trace = load_trace(source, folder)
    num_unique = trace.num_unique_blocks
    runs: list[dict[str, Any]] = []
    for capacity in (*source.capacities, num_unique):
        # without evictions every policy is the same
        for policy in policies if capacity < num_unique else policies[:1]:
            started = time.perf_counter()
            result = replay(trace, capacity, policy)
            runs.append(
                {
                    "device_blocks": capacity,
                    "policy": policy if capacity < num_unique else "any",
                    "block_hit_rate": round(result.block_hit_rate, 4),
                    "token_hit_rate": round(result.token_hit_rate, 4),
                    "evicted_blocks": result.num_evicted_blocks,
                }
            )
            say(f"{source.name} {capacity} {policy}: {time.perf_counter() - started:.1f} s")
    return {
        "trace": source.name,
        "title": source.title,
        "block_tokens": source.block_tokens,
        "requests": len(trace.requests),
        "prompt_blocks": trace.num_blocks,
        "unique_blocks": num_unique,
        "runs": runs,
    }


def differences(source: TraceSource, result: dict[str, Any]) -> Iterator[str]:
    """Where the figures are not those that other simulators found."""
    for run in result["runs"]:
        capacity, rate = run["device_blocks"], run["block_hit_rate"]
        is_lru = run["policy"] in ("lru", "any")
        expected = source.lru_by_capacity.get(capacity, rate) if is_lru else rate
        if rate != expected:
            yield f"{source.name}, {capacity} blocks, lru: {rate}, not {expected}"
        unbounded = (rate, run["token_hit_rate"])
        if capacity == result["unique_blocks"] and unbounded != source.unbounded:
            yield f"{source.name}, unbounded: {unbounded}, not {source.unbounded}"


def capacity_rows(result: dict[str, Any], policies: Sequence[str]) -> Iterator[list[str]]:
    """One row per capacity: hit rates by policy, and what the memory added by this row bought."""
    rates = {(run["device_blocks"], run["policy"]): run for run in result["runs"]}
    capacities = sorted({run["device_blocks"] for run in result["runs"]})
    before: float | None = None
    for capacity in capacities:
        runs = [rates.get((capacity, policy), rates.get((capacity, "any"))) for policy in policies]
        found = [run for run in runs if run is not None]
        tokens = found[0]["token_hit_rate"]
        is_unbounded = capacity == result["unique_blocks"]
        yield [
            f"{capacity:,}" + (" (no eviction)" if is_unbounded else ""),
            f"{capacity * result['block_tokens'] / 1e6:.2f} M",
            *(f"{run['block_hit_rate']:.4f}" for run in found),
            f"{tokens:.4f}",
            "" if before is None else f"{tokens - before:+.4f}",
        ]
        before = tokens


def table_header(policies: Sequence[str]) -> list[str]:
    return ["blocks", "tokens", *policies, f"{policies[0]} by tokens", "gained by this row"]


def markdown(results: Sequence[dict[str, Any]], policies: Sequence[str]) -> str:
    header = table_header(policies)
    lines = ["# Hit rates of recorded traces", "", *(__doc__ or "").splitlines()[4:9]]
    for result in results:
        lines += ["", f"## {result['title']}", ""]
        lines += [
            f"{result['requests']:,} requests, {result['prompt_blocks']:,} prompt blocks.",
            "",
        ]
        lines += [f"| {' | '.join(header)} |", "|" + " --- |" * len(header)]
        lines += [f"| {' | '.join(row)} |" for row in capacity_rows(result, policies)]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [source.name for source in CATALOGUE]
    parser.add_argument("--trace", action="append", choices=names)
    parser.add_argument("--policy", action="append", choices=EVICTION_POLICIES)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    sources = [source_named(name) for name in arguments.trace or names]
    policies = tuple(arguments.policy or EVICTION_POLICIES)
    results: list[dict[str, Any]] = []
    wrong: list[str] = []
    for source in sources:
        result = replay_source(source, policies, arguments.data, lambda line: print(f"  {line}"))
        print(source.title)
        print_table(list(capacity_rows(result, policies)), table_header(policies))
        results.append(result)
        wrong += differences(source, result)
    path = save("trace_replay", WORKLOAD, results, arguments.output)
    path.with_suffix(".md").write_text(markdown(results, policies), encoding="utf-8")
    plot_policies(results, path.with_suffix(".png"))
    for line in wrong:
        print(f"not the reference: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
