"""The README's table of measured figures, made from benchmarks/results.

    python -m benchmarks.summary [--write]

Prints the table; with --write puts it between the README's markers.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"
Row = tuple[str, str, str, str]


def load(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return document


def shared_prefix_rows() -> Iterator[Row]:
    results = load("shared_prefix")["results"]
    medians, ratios = results["median_ms"], results["ratio_to_ideal"]
    goals = {"cold": "<= 1.15 x bare", "warm": "<= 1.3 x bare"}
    ideals = {"cold": "bare whole", "warm": "bare new tokens"}
    for kind, meaning in (("cold", "prompt not seen before"), ("warm", "system prompt stored")):
        for where in ("engine", "server", "server --cache none"):
            name = f"{where} {kind}"
            figure = f"{medians[name]:.0f} ms = {ratios[name]:.2f} x bare"
            ideal = f"{medians[ideals[kind]]:.0f} ms"
            goal = "" if "none" in where else goals[kind]
            yield f"TTFT, {meaning}, {where}", figure, ideal, goal


def decode_rows() -> Iterator[Row]:
    results = load("decode")["results"]
    without = {(r["requests"], r["context"]): r for r in results if r["cache"] == "none"}
    for row in results:
        if row["cache"] != "prefix":
            continue
        other = without[row["requests"], row["context"]]
        yield (
            f"Decode step, {row['requests']} requests of {row['context']:,} tokens",
            f"{row['engine_ms']:.0f} ms = {row['ratio']:.2f} x bare "
            f"(--cache none: {other['ratio']:.2f} x)",
            f"{row['bare_ms']:.0f} ms",
            "<= 1.10 x bare",
        )


def overhead_rows() -> Iterator[Row]:
    on, off = (load("overhead")["results"][kind] for kind in ("prefix", "none"))
    for label, key, unit, scale, goal in (
        ("Step of 64 requests without a model", "null_runner_64_step_ms", " ms", 1, "<= 1 ms"),
        ("Step outside the forward, 8 requests", "cpu_8_requests", " %", 100, "<= 5 %"),
        ("Cache and scheduler, prompts without reuse", "zero_reuse", " %", 100, "<= 1 %"),
    ):
        first, second = (
            entry[key] if isinstance(entry[key], float) else entry[key]["share"]
            for entry in (on, off)
        )
        figure = f"{first * scale:.2f}{unit} (--cache none: {second * scale:.2f}{unit})"
        yield label, figure, "0", goal


def gateway_rows() -> Iterator[Row]:
    for row in load("gateway")["results"]:
        beside = "beside 30,000-token chats" if row["long_chats"] else "alone"
        yield (
            f"Gateway, p99 gap of {row['streams']} streams, {beside}",
            f"{row['p99_ms']:.0f} ms",
            "10 ms",
            "< 50 ms" if row["long_chats"] else "",
        )


def pressure_rows() -> Iterator[Row]:
    results = load("pressure")["results"]
    ideal = f"{results['resident']['median_ms']:.0f} ms"
    for name, goal in (
        ("recompute", ""),
        ("host", "<= 0.125 x computing"),
        ("disk, page cache", "<= 0.25 x computing"),
        ("disk", "<= 0.25 x computing"),
    ):
        row = results[name]
        figure = f"{row['median_ms']:.0f} ms = {row['ratio_to_recompute']:.3f} x computing"
        yield f"TTFT, session of 1,024 tokens that returns, {name}", figure, ideal, goal
    beside = results["beside_promotions"]
    yield (
        "Step of a running answer while blocks move",
        f"{beside['busy_step_ms']:.0f} ms = {beside['ratio']:.2f} x without",
        f"{beside['quiet_step_ms']:.0f} ms",
        "<= 1.15 x",
    )


def replay_rows() -> Iterator[Row]:
    results = load("session_replay")["results"]
    ideal = f"{results['infinite']['token_hit_rate']:.4f}"
    for name, text, goal in (
        ("quarter", "device for a quarter of the live KV", ""),
        ("quarter_and_host", "the same with host memory", ">= 0.97 of the ideal"),
    ):
        row = results[name]
        figure = f"{row['token_hit_rate']:.4f} = {row['share_of_infinite']:.3f} of the ideal"
        yield f"Token hit rate, tau-bench replay, {text}", figure, ideal, goal


def churn_rows() -> Iterator[Row]:
    results = load("churn")["results"]
    host, disk = results["host_cap_mib"], results["disk_cap_mib"]
    yield (
        "Churn, most resident memory over that of empty tiers",
        f"{results['max_resident_mib_over_baseline']:.0f} MiB",
        f"{host:.0f} MiB",
        f"<= {host * 1.05:.0f} MiB",
    )
    yield (
        "Churn, most on disk",
        f"{results['max_disk_mib']:.0f} MiB",
        f"{disk:.0f} MiB",
        f"<= {disk:.0f} MiB",
    )
    first, last = results["descriptors_first_last"]
    yield "Churn, open descriptors, settled and at the end", f"{first}, {last}", "", "no growth"


def metadata_rows() -> Iterator[Row]:
    for name, row in load("metadata")["results"]["stores"].items():
        if name == "memory":
            continue
        median, p99 = row["locate"]["median_s"] * 1000, row["locate"]["p99_s"] * 1000
        figure = f"{median:.1f} ms (p99 {p99:.1f} ms)"
        yield f"Locate a prompt of 100,000 tokens, {name}", figure, "", "<= 5 ms"


def table() -> str:
    environment = load("shared_prefix")["environment"]
    packages = environment["packages"]
    lines = [
        f"Demo model in float32 on {environment['cores']} cores of an {environment['processor']}, "
        f"Python {environment['python']}, torch {packages['torch']}, transformers "
        f'{packages["transformers"]}, {environment["date"]}. Medians; "bare" is transformers\' '
        "own forward over contiguous KV, measured in turn with ours.",
        "",
        "| What | Measured | Ideal | Goal |",
        "| --- | --- | --- | --- |",
    ]
    for rows in (
        shared_prefix_rows,
        decode_rows,
        pressure_rows,
        replay_rows,
        churn_rows,
        metadata_rows,
        overhead_rows,
        tree_rows,
        gateway_rows,
    ):
        lines += [f"| {' | '.join(row)} |" for row in rows()]
    return "\n".join(lines)


def tree_rows() -> Iterator[Row]:
    for label, figure, goal in load("tree")["results"]["summary"]:
        if goal:
            yield f"Tree: {label}", figure, "", goal


def put_into(readme: str, text: str) -> str:
    pattern = re.compile(f"{BEGIN}.*{END}", re.DOTALL)
    assert pattern.search(readme)
    return pattern.sub(lambda _: f"{BEGIN}\n{text}\n{END}", readme)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        README.write_text(put_into(README.read_text(encoding="utf-8"), table()), encoding="utf-8")
    else:
        print(table())


if __name__ == "__main__":
    main()
