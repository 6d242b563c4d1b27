"""A simulation as a picture: hit rate by the size of the device, the ideal beside it.

Owns how it looks. matplotlib comes with the extra ``plot`` and is imported by whoever draws.
"""

from __future__ import annotations

from pathlib import Path

from service.plotting import new_figure, save_figure
from service.simulation.report import SimulationReport, SimulationRow

__all__ = ["plot_report"]

# Told apart without colour as well: by marker and by dash.
_STYLES = (
    ("#0072b2", "o", "-"),
    ("#009e73", "^", "-."),
    ("#cc79a7", "v", ":"),
    ("#e69f00", "s", "--"),
)


def plot_report(report: SimulationReport, path: Path) -> None:
    """Write a PNG. Raises ConfigError where matplotlib is missing or the file cannot be written."""
    from matplotlib.ticker import EngFormatter, NullLocator, PercentFormatter

    figure = new_figure()
    axes = figure.add_subplot()
    groups: dict[tuple[str, int, int], list[SimulationRow]] = {}
    for row in report.rows:
        groups.setdefault((row.policy, row.host, row.disk), []).append(row)
    for number, ((policy, host, disk), rows) in enumerate(groups.items()):
        color, marker, dash = _STYLES[number % len(_STYLES)]
        tiers = [f"{name} {size:,}" for name, size in (("host", host), ("disk", disk)) if size]
        axes.plot(
            [row.device for row in rows],
            [row.hit_rate for row in rows],
            color=color,
            marker=marker,
            linestyle=dash,
            label=" + ".join([policy, *tiers]),
        )
    axes.axhline(report.ideal.hit_rate, color="0.5", linewidth=0.8, label="without bounds")
    for row in report.rows:
        if row.is_present:
            axes.axvline(row.device, color="0.7", linestyle=":", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xticks(sorted({row.device for row in report.rows}))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(0, 1)
    axes.set_xlabel(f"device, in blocks of {report.block_tokens} tokens")
    axes.set_ylabel("prompt tokens found")
    axes.set_title(f"{report.num_requests:,} requests of {report.source}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save_figure(figure, path)
