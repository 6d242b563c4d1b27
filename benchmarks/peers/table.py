"""The comparison as Markdown: goals, figures beside the machine's limits, and what was compared.

Owns words and number formats; everything it says is in the results.

    python -m benchmarks.peers.table [--write]

Prints the tables; with --write puts them between the markers of docs/performance.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers.record import read
from benchmarks.peers.workloads import WORKLOADS
from benchmarks.report import RESULTS
from benchmarks.summary import put_into

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
PICTURE = "![TTFT, decode rate and throughput of each server](images/peers.png)"
METRICS = {
    "cold_ttft_s": ("TTFT, prompt new", "s"),
    "first_ttft_s": ("TTFT, chat new", "s"),
    "warm_ttft_s": ("TTFT, prompt stored", "s"),
    "return_ttft_s": ("TTFT, chat that returns", "s"),
    "ttft_s": ("TTFT", "s"),
    "decode_tokens_per_s": ("decode", "tokens/s"),
    "cold_tokens_per_s": ("answers, prompt new", "tokens/s"),
    "tokens_per_s": ("answers", "tokens/s"),
    "all_tokens_per_s": ("prompts and answers", "tokens/s"),
    "requests_per_s": ("requests", "1/s"),
}


def tables(results: Mapping[str, Any]) -> str:
    """All of it; a text that says so where nothing was measured."""
    if not results["samples"]:
        return "Nothing measured yet."
    parts = [
        PICTURE,
        "",
        _machine(results),
        *_goals(results),
        "",
        *_figures(results),
        "",
        *_peers(results),
    ]
    return "\n".join(parts)


def _machine(results: Mapping[str, Any]) -> str:
    machines = [piece["machine"] for piece in results["pieces"] if "machine" in piece]
    gemm = max(machine["gemm_gflops"] for machine in machines)
    read_rate = max(machine["read_gb_per_s"] for machine in machines)
    return (
        f"The machine: {gemm:.0f} GFLOP/s in float32 matrix products, {read_rate:.1f} GB/s read "
        "from memory (two threads, best of all pieces).\n"
    )


def _goals(results: Mapping[str, Any]) -> Iterator[str]:
    yield "| Goal | Ours | Other | Ratio | Wanted | Reached |"
    yield "| --- | --- | --- | --- | --- | --- |"
    titles = {name: peer["title"] for name, peer in results["peers"].items()}
    for row in results["goals"]:
        ours, peer = (titles.get(row[side], row[side]) for side in ("ours", "peer"))
        unit = METRICS[row["metric"]][1]
        known = row["ratio"] is not None
        yield _row(
            f"{row['goal']}: {ours} to {peer}",
            _amount(row["ours_value"], unit),
            _amount(row["peer_value"], unit),
            f"{row['ratio']:.2f} x" if known else "not measured together",
            row["bound"],
            ("yes" if row["reached"] else "**no**") if known else "-",
        )


def _figures(results: Mapping[str, Any]) -> Iterator[str]:
    yield "| Workload | What | Server | Median | Smallest to largest | Machine's limit | Distance |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for workload in WORKLOADS:
        measured = results["summary"].get(workload.name, {})
        for metric, (words, unit) in METRICS.items():
            for peer, about in results["peers"].items():
                figures = measured.get(peer, {}).get(metric)
                if figures is None:
                    continue
                limit = figures.get("limit")
                yield _row(
                    workload.title,
                    words,
                    about["title"],
                    _amount(figures["median"], unit),
                    f"{_number(figures['min'])} to {_number(figures['max'])}",
                    _amount(limit, unit),
                    "-" if limit is None else f"{figures['of_limit']:.2f} x",
                )


def _peers(results: Mapping[str, Any]) -> Iterator[str]:
    yield "| Server | Version | Resident memory | Idle, of a core | Start |"
    yield "| --- | --- | --- | --- | --- |"
    for peer in results["peers"].values():
        yield _row(
            peer["title"] + (f" ({peer['note']})" if peer["note"] else ""),
            peer["version"],
            f"{peer['resident_bytes'] / 2**30:.1f} GiB",
            f"{peer['idle_share']:.0%}",
            f"{peer['start_s']:.0f} s",
        )
    for name, reason in results["skipped"].items():
        yield _row(name, f"not measured: {reason}", "-", "-", "-")


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _amount(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{_number(value)} {unit}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    text = tables(read(RESULTS / "peers.json"))
    if parser.parse_args().write:
        DOCUMENT.write_text(put_into(DOCUMENT.read_text(encoding="utf-8"), text), encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
