"""A plan as a picture: how many conversations fit on each tier, by their length.

Owns how it looks. matplotlib comes with the extra ``plot`` and is imported by whoever draws.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from service.planning.estimate import Plan, make_plan
from service.planning.shape import ModelShape
from service.plotting import new_figure, save_figure

__all__ = ["plot_plan"]

_COLORS = {"device": "#0072b2", "host": "#e69f00", "disk": "#009e73"}
_DASHES = ("-", "--")
_LENGTHS = tuple(2**power for power in range(9, 24))


def plot_plan(shape: ModelShape, plan: Plan, path: Path) -> None:
    """Write a PNG. Raises ConfigError where it cannot be written."""
    from matplotlib.ticker import NullLocator

    wanted = plan.wanted
    limit = shape.max_model_len or wanted.context
    lengths = [size for size in _LENGTHS if wanted.shared_prefix < size <= limit]
    lengths = sorted({*lengths, wanted.context})
    plans = [make_plan(shape, msgspec.structs.replace(wanted, context=size)) for size in lengths]
    figure = new_figure()
    axes = figure.add_subplot()
    for number, row in enumerate(plan.kv):
        for place, room in enumerate(row.tiers):
            counts = [item.kv[number].tiers[place].num_conversations for item in plans]
            axes.plot(
                lengths,
                [count or float("nan") for count in counts],
                color=_COLORS[room.tier],
                linestyle=_DASHES[number % len(_DASHES)],
                marker="o",
                markersize=3,
                label=f"{room.tier}, {row.kv_cache_dtype} KV",
            )
    axes.axvline(wanted.context, color="0.6", linewidth=0.8)
    axes.axhline(wanted.concurrency, color="0.6", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    labels = [f"{size // 1024}k" if size % 1024 == 0 else f"{size:,}" for size in lengths]
    axes.set_xticks(lengths, labels, fontsize=7)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("tokens of a conversation")
    axes.set_ylabel("conversations that fit")
    axes.set_title(f"{plan.model}, {wanted.concurrency:,} x {wanted.context:,} asked", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save_figure(figure, path)
