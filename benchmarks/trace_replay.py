"""What the cache would have hit of recorded traffic, by capacity, eviction policy and tier.

    python -m benchmarks.trace_replay [--trace NAME] [--policy NAME] [--data FOLDER] [--output FILE]

Two parts, both over cache_store/simulation: hit rate by device capacity and policy, which says
what more memory would buy; and, for one size of the device, with host memory and disk below it, in
which tier the hits are. Answers are not inserted, since the traces do not say what they were.

Ends with an error unless the hit rates under lru and those of an unbounded cache are, to 4 digits,
those of the catalogue; writes JSON, and beside it tables (.md) and two plots (.png). Some ten
minutes for everything.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import trace_tables
from benchmarks.report import save
from benchmarks.trace_plot import plot_policies, plot_tiers
from benchmarks.traces import CATALOGUE, DATA, TraceSource, load_trace, source_named
from cache_store.eviction import EVICTION_POLICIES
from cache_store.simulation.replay import Capacity, replay
from cache_store.simulation.trace import Trace

WORKLOAD = "recorded traces, see benchmarks/data/README.md; answers not inserted"
HOST_TO_DEVICE = (1, 4)  # sizes of the host's tier


def run_of(trace: Trace, capacity: Capacity, policy: str) -> dict[str, Any]:
    """One replay, as the results have it."""
    result = replay(trace, capacity, policy)
    return {
        "device_blocks": capacity.device,
        "host_blocks": capacity.host,
        "disk_blocks": capacity.disk,
        "policy": policy,
        "block_hit_rate": round(result.block_hit_rate, 4),
        "token_hit_rate": round(result.token_hit_rate, 4),
        "from_device": round(result.share_of(result.num_device_blocks), 4),
        "from_host": round(result.share_of(result.num_host_blocks), 4),
        "from_disk": round(result.share_of(result.num_disk_blocks), 4),
        "evicted_blocks": result.num_evicted_blocks,
    }


def capacity_runs(
    source: TraceSource, trace: Trace, policies: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """The device alone, in all its sizes; the last, which never evicts, has policy "any"."""
    num_unique = trace.num_unique_blocks
    for capacity in source.capacities:
        for policy in policies:
            yield run_of(trace, Capacity(capacity), policy)
    yield run_of(trace, Capacity(num_unique), policies[0]) | {"policy": "any"}


def tier_runs(
    source: TraceSource, trace: Trace, policies: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """One size of the device with lower tiers; a disk is as large as it can get."""
    for capacity in tier_capacities(source.tiered_device, trace.num_unique_blocks):
        for policy in policies:
            run = run_of(trace, capacity, policy)
            alike = replay(trace, Capacity(capacity.num_blocks), policy)
            yield run | {"one_tier_hit_rate": round(alike.block_hit_rate, 4)}


def tier_capacities(device: int, num_unique: int) -> list[Capacity]:
    hosts = [device * factor for factor in HOST_TO_DEVICE]
    return [
        Capacity(device),
        *(Capacity(device, host) for host in hosts),
        Capacity(device, disk=num_unique),
        Capacity(device, hosts[-1], num_unique),
    ]


def replay_source(
    source: TraceSource, policies: Sequence[str], folder: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Both parts for one trace; ``say`` is told each replay."""
    trace = load_trace(source, folder)
    result: dict[str, Any] = {
        "trace": source.name,
        "title": source.title,
        "block_tokens": source.block_tokens,
        "requests": len(trace.requests),
        "prompt_blocks": trace.num_blocks,
        "unique_blocks": trace.num_unique_blocks,
        "capacity_runs": [],
        "tier_runs": [],
    }
    for name, runs in (("capacity_runs", capacity_runs), ("tier_runs", tier_runs)):
        for run in runs(source, trace, policies):
            result[name].append(run)
            say(f"{source.name}: {run}")
    return result


def differences(source: TraceSource, result: dict[str, Any]) -> Iterator[str]:
    """Where the figures are not those that other simulators found."""
    for run in result["capacity_runs"]:
        capacity, rate = run["device_blocks"], run["block_hit_rate"]
        expected = source.lru_by_capacity.get(capacity, rate) if run["policy"] == "lru" else rate
        if rate != expected:
            yield f"{source.name}, {capacity} blocks, lru: {rate}, not {expected}"
        unbounded = (rate, run["token_hit_rate"])
        if run["policy"] == "any" and unbounded != source.unbounded:
            yield f"{source.name}, unbounded: {unbounded}, not {source.unbounded}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [source.name for source in CATALOGUE]
    parser.add_argument("--trace", action="append", choices=names)
    parser.add_argument("--policy", action="append", choices=EVICTION_POLICIES)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    policies = tuple(arguments.policy or EVICTION_POLICIES)
    results: list[dict[str, Any]] = []
    wrong: list[str] = []
    for source in map(source_named, arguments.trace or names):
        result = replay_source(source, policies, arguments.data, lambda line: print(f"  {line}"))
        results.append(result)
        wrong += differences(source, result)
    path = save("trace_replay", WORKLOAD, results, arguments.output)
    text = trace_tables.markdown(results, policies)
    print(text)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    plot_policies(results, path.with_suffix(".png"))
    plot_tiers(results, path.with_name(f"{path.stem}_tiers.png"))
    for line in wrong:
        print(f"not the reference: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
