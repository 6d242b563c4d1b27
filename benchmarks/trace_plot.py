"""The plots of a trace replay, one panel per trace: hit rate over capacity, and hits by tier.

Owns how it looks; the figures are those of benchmarks.trace_replay's results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullLocator, PercentFormatter

_COLUMNS = 2
# Told apart without colour as well: by marker and by dash.
_STYLES = {
    "lru": ("#0072b2", "o", "-"),
    "fifo": ("#e69f00", "s", "--"),
    "adaptive": ("#009e73", "^", "-."),
    "lfu": ("#cc79a7", "v", ":"),
}

_TIER_STYLES = {"device": ("#0072b2", ""), "host": ("#e69f00", "//"), "disk": ("#999999", "..")}


def plot_policies(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG: block hit rate by device capacity and policy, against an unbounded cache."""
    _plot(results, path, _draw_policies)


def plot_tiers(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG: block hit rate by the sizes of the tiers and policy, stacked by tier."""
    _plot(results, path, _draw_tiers)


def _plot(
    results: Sequence[dict[str, Any]], path: Path, draw: Callable[[Axes, dict[str, Any]], None]
) -> None:
    num_rows = -(-len(results) // _COLUMNS)
    num_columns = min(_COLUMNS, len(results))
    figure = Figure(figsize=(6.0 * num_columns, 3.8 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    for number, result in enumerate(results, start=1):
        axes = figure.add_subplot(num_rows, num_columns, number)
        draw(axes, result)
        axes.set_title(result["title"], fontsize=10)
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_ylabel("prompt blocks found")
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _draw_tiers(axes: Axes, result: dict[str, Any]) -> None:
    runs = result["tier_runs"]
    groups = list(dict.fromkeys(_sizes(run) for run in runs))
    policies = list(dict.fromkeys(run["policy"] for run in runs))
    width = 0.8 / len(policies)
    places = [
        groups.index(_sizes(run)) + (policies.index(run["policy"]) + 0.5) * width - 0.4
        for run in runs
    ]
    bottoms = [0.0] * len(runs)
    for tier, (color, hatch) in _TIER_STYLES.items():
        shares = [run[f"from_{tier}"] for run in runs]
        axes.bar(
            places, shares, width * 0.9, bottoms, color=color, hatch=hatch, edgecolor="white",
            linewidth=0.3, label=f"from {tier}",
        )  # fmt: skip
        bottoms = [bottom + share for bottom, share in zip(bottoms, shares, strict=True)]
    for place, run in zip(places, runs, strict=True):
        label = axes.text(place, 0.02, run["policy"], rotation=90, fontsize=7, ha="center")
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.6})
    axes.set_xticks(range(len(groups)), groups, fontsize=7)
    axes.set_xlabel("blocks in device + host + disk")
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3)


def _sizes(run: dict[str, Any]) -> str:
    short = EngFormatter(sep="", places=0)
    sizes = [run[f"{tier}_blocks"] for tier in _TIER_STYLES]
    return " + ".join(short(size) if size else "0" for size in sizes)


def _draw_policies(axes: Axes, result: dict[str, Any]) -> None:
    unbounded = [run for run in result["capacity_runs"] if run["policy"] == "any"]
    bounded = [run for run in result["capacity_runs"] if run["policy"] != "any"]
    for policy, (color, marker, dash) in _STYLES.items():
        runs = [run for run in bounded if run["policy"] == policy]
        if runs:
            runs += unbounded
            axes.plot(
                [run["device_blocks"] for run in runs],
                [run["block_hit_rate"] for run in runs],
                color=color,
                marker=marker,
                markersize=4,
                linestyle=dash,
                label=policy,
            )
    for run in unbounded:
        axes.axhline(run["block_hit_rate"], color="0.5", linewidth=0.8, label="never evicting")
    axes.set_xscale("log")
    axes.set_xticks(sorted({run["device_blocks"] for run in bounded}))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("capacity in blocks")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
