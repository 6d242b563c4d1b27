"""The plot of a trace replay: hit rate over capacity, one panel per trace.

Owns how it looks; the figures are those of benchmarks.trace_replay's results.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    "slru": ("#009e73", "^", "-."),
    "lfu": ("#cc79a7", "v", ":"),
}


def plot_policies(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG: block hit rate by device capacity and policy, against an unbounded cache."""
    num_rows = -(-len(results) // _COLUMNS)
    num_columns = min(_COLUMNS, len(results))
    figure = Figure(figsize=(6.0 * num_columns, 3.8 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    for number, result in enumerate(results, start=1):
        axes = figure.add_subplot(num_rows, num_columns, number)
        _draw(axes, result)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _draw(axes: Axes, result: dict[str, Any]) -> None:
    unbounded = [run for run in result["runs"] if run["policy"] == "any"]
    bounded = [run for run in result["runs"] if run["policy"] != "any"]
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
    axes.set_title(result["title"], fontsize=10)
    axes.set_xscale("log")
    axes.set_xticks(sorted({run["device_blocks"] for run in bounded}))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("capacity in blocks")
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylabel("prompt blocks found")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
