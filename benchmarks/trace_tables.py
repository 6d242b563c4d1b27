"""The tables of a trace replay, in Markdown. Owns their form; the figures are the results'."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

INTRODUCTION = """\
# Hit rates of recorded traces

Made by `python -m benchmarks trace_replay`, which drives the real prefix cache, with its tree,
pools, tiers and eviction policies, without a model. A hit rate is the blocks found as a prefix over
all prompt blocks; by tokens it counts a partly filled block as what it has. Answers are not
inserted, since the traces do not say what they were.

The first table of each trace has the device alone: what more memory would buy is its last column,
the share of prompt tokens that a row finds and the row above does not. The second has one size of
the device and tiers below it, where copies between tiers take no time: which tier the hits are in,
and beside it what a device as large as all tiers together would have found.
"""


def markdown(results: Sequence[dict[str, Any]], policies: Sequence[str]) -> str:
    parts = [INTRODUCTION]
    for result in results:
        size = f"{result['requests']:,} requests, {result['prompt_blocks']:,} prompt blocks."
        parts.append(f"\n## {result['title']}\n\n{size}\n\n")
        parts.append(_table(capacity_header(policies), capacity_rows(result, policies)))
        parts.append("\n" + _table(TIER_HEADER, tier_rows(result)))
    return "".join(parts)


def capacity_header(policies: Sequence[str]) -> list[str]:
    return ["blocks", "tokens", *policies, f"{policies[0]} by tokens", "gained by this row"]


def capacity_rows(result: dict[str, Any], policies: Sequence[str]) -> Iterator[list[str]]:
    """One row per capacity: hit rates by policy, and what the memory added by this row bought."""
    by_capacity: dict[int, dict[str, dict[str, Any]]] = {}
    for run in result["capacity_runs"]:
        by_capacity.setdefault(run["device_blocks"], {})[run["policy"]] = run
    before: float | None = None
    for capacity, runs in sorted(by_capacity.items()):
        unbounded = runs.get("any")
        found = [runs.get(policy, unbounded) for policy in policies]
        rates = [run["block_hit_rate"] for run in found if run is not None]
        first = found[0]
        assert first is not None
        tokens = first["token_hit_rate"]
        yield [
            f"{capacity:,}" + (" (no eviction)" if unbounded else ""),
            f"{capacity * result['block_tokens'] / 1e6:.2f} M",
            *(f"{rate:.4f}" for rate in rates),
            f"{tokens:.4f}",
            "" if before is None else f"{tokens - before:+.4f}",
        ]
        before = tokens


TIER_HEADER = [
    "device", "host", "disk", "policy", "from device", "from host", "from disk", "together",
    "one tier as large",
]  # fmt: skip


def tier_rows(result: dict[str, Any]) -> Iterator[list[str]]:
    for run in result["tier_runs"]:
        sizes = (run[f"{tier}_blocks"] for tier in ("device", "host", "disk"))
        shares = (run[f"from_{tier}"] for tier in ("device", "host", "disk"))
        yield [
            *(f"{size:,}" if size else "-" for size in sizes),
            run["policy"],
            *(f"{share:.4f}" for share in shares),
            f"{run['block_hit_rate']:.4f}",
            f"{run['one_tier_hit_rate']:.4f}",
        ]


def _table(header: Sequence[str], rows: Iterator[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
