"""The picture of the comparison: a panel for each question, a bar for each server.

Owns how it looks; the figures are those of the results.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

PANELS = (
    ("shared_1", "cold_ttft_s", "TTFT, 1,270-token prompt not seen before (s)"),
    ("shared_1", "warm_ttft_s", "TTFT, the same prompt stored, 30 tokens new (s)"),
    ("shared_1", "decode_tokens_per_s", "Decode alone (tokens/s)"),
    ("shared_8", "tokens_per_s", "Eight users on the stored prompt (tokens/s)"),
    ("sessions_beyond", "return_ttft_s", "TTFT of a chat that returns, memory for half (s)"),
    ("sessions_beyond", "requests_per_s", "Chats in turn, memory for half (requests/s)"),
    ("long_8k", "warm_ttft_s", "TTFT, 7,800-token prompt stored (s)"),
    ("tau_replay", "requests_per_s", "Replay of tool-calling chats (requests/s)"),
)
_OURS, _OTHERS, _LIMIT = "#0072b2", "#b8b8b8", "#d55e00"
_COLUMNS = 2


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Write a PNG: medians, with smallest and largest as whiskers and the machine's limit."""
    panels = [
        panel
        for panel in PANELS
        if any(panel[1] in m for m in results["summary"].get(panel[0], {}).values())
    ]
    num_rows = -(-len(panels) // _COLUMNS)
    figure = Figure(figsize=(13.0, 2.6 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (workload, metric, title) in enumerate(panels, start=1):
        axes = figure.add_subplot(num_rows, _COLUMNS, number)
        _draw(axes, results, workload, metric)
        better = "more" if metric.endswith("_per_s") else "less"
        axes.set_title(f"{title}: {better} is better", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _draw(axes: Axes, results: Mapping[str, Any], workload: str, metric: str) -> None:
    measured = results["summary"][workload]
    rows = [
        (about["title"], name, measured[name][metric])
        for name, about in results["peers"].items()
        if metric in measured.get(name, {})
    ]
    places = range(len(rows))
    medians = [figures["median"] for _, _, figures in rows]
    whiskers = [
        [figures["median"] - figures["min"] for _, _, figures in rows],
        [figures["max"] - figures["median"] for _, _, figures in rows],
    ]
    colors = [_OURS if name.startswith("headstart") else _OTHERS for _, name, _ in rows]
    axes.barh(places, medians, color=colors, xerr=whiskers, ecolor="0.3", capsize=2)
    for place, (_, _, figures) in zip(places, rows, strict=True):
        if "limit" in figures:
            axes.plot([figures["limit"]] * 2, [place - 0.4, place + 0.4], color=_LIMIT, lw=2)
        axes.annotate(
            f" {figures['median']:.3g}",
            (figures["max"], place),
            va="center",
            fontsize=8,
        )
    axes.set_yticks(places, [title for title, _, _ in rows], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.tick_params(axis="x", labelsize=8)
