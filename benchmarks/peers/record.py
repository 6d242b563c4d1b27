"""The file of the comparison: pieces that ran at different times, merged, and what follows of them.

Owns the document's form. A pair of workload and peer that is measured again replaces what was
there; medians, limits and goals are computed anew from all samples with each merge.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.goals import evaluate
from benchmarks.peers.limits import limits
from benchmarks.peers.machine import Machine

Samples = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Piece:
    """One run of the harness: ``about`` says when, on what and how; peers and samples by name."""

    about: Mapping[str, Any]
    machine: Mapping[str, float]
    peers: Mapping[str, Mapping[str, Any]]
    samples: Mapping[str, Mapping[str, Samples]] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)  # peer: reason


def extend(samples: Samples, more: Mapping[str, list[float]]) -> None:
    """Take the samples of another turn."""
    for metric, values in more.items():
        samples.setdefault(metric, []).extend(values)


def empty() -> dict[str, Any]:
    return {"pieces": [], "peers": {}, "skipped": {}, "samples": {}}


def read(path: Path) -> dict[str, Any]:
    """The results of an earlier piece, or none. Raises ValueError for another kind of file."""
    if not path.exists():
        return empty()
    document = json.loads(path.read_text(encoding="utf-8"))
    if document.get("benchmark") != "peers":
        raise ValueError(f"{path} is not a file of this benchmark")
    results: dict[str, Any] = document["results"]
    return results


def merge(results: Mapping[str, Any], piece: Piece) -> dict[str, Any]:
    """``results`` with one more piece; neither is changed."""
    number = len(results["pieces"]) + 1
    samples = {name: dict(peers) for name, peers in results["samples"].items()}
    for workload, by_peer in piece.samples.items():
        for peer, values in by_peer.items():
            rounded = {metric: [_short(value) for value in v] for metric, v in values.items()}
            samples.setdefault(workload, {})[peer] = {"piece": number, "samples": rounded}
    used = {entry["piece"] for peers in samples.values() for entry in peers.values()}
    measured = {peer for peers in samples.values() for peer in peers}
    about = {"number": number, **piece.about, "machine": dict(piece.machine)}
    skipped = {**results["skipped"], **piece.skipped}
    merged = {
        # A piece whose every pair was measured again says nothing any more, but keeps its number.
        "pieces": [
            entry if entry["number"] in used else {"number": entry["number"], "replaced": True}
            for entry in (*results["pieces"], about)
        ],
        "peers": {**results["peers"], **{name: dict(p) for name, p in piece.peers.items()}},
        "skipped": {name: why for name, why in skipped.items() if name not in measured},
        "samples": samples,
    }
    merged["summary"] = summarize(merged)
    merged["goals"] = evaluate(
        {
            workload: {
                peer: {metric: entry["median"] for metric, entry in metrics.items()}
                for peer, metrics in peers.items()
            }
            for workload, peers in merged["summary"].items()
        },
        {
            workload: {peer: entry["piece"] for peer, entry in peers.items()}
            for workload, peers in samples.items()
        },
    )
    return merged


def summarize(results: Mapping[str, Any]) -> dict[str, Any]:
    """By workload, peer and metric: the median, and where the machine bounds it, its distance.

    ``of_limit`` is 1 at the limit and larger the further away, for times and rates alike.
    """
    machines = {
        entry["number"]: Machine(**entry["machine"])
        for entry in results["pieces"]
        if "machine" in entry
    }
    summary: dict[str, Any] = {}
    for workload, peers in results["samples"].items():
        for peer, entry in peers.items():
            kind = results["peers"][peer]["weight_format"]
            bounds = limits(workload, entry["samples"], kind, machines[entry["piece"]])
            summary.setdefault(workload, {})[peer] = {
                metric: _figures(metric, values, bounds.get(metric))
                for metric, values in entry["samples"].items()
                if values
            }
    return summary


def _figures(metric: str, values: list[float], bound: float | None) -> dict[str, float]:
    median = statistics.median(values)
    figures = {"median": _short(median), "min": min(values), "max": max(values)}
    if bound is not None:
        figures["limit"] = _short(bound)
        is_rate = metric.endswith("_per_s")
        figures["of_limit"] = round(bound / median if is_rate else median / bound, 2)
    return figures


def _short(value: float) -> float:
    return float(f"{value:.5g}")
