"""What the charts are drawn from: the form of GET /dashboard/data/series.

Owns how many digits a point has. Knows nothing of how the points were come by.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from service.dashboard.board import Board
from service.dashboard.history import SPANS
from service.dashboard.marks import Mark

__all__ = ["SeriesBody", "series_body"]


class SeriesBody(msgspec.Struct, frozen=True, kw_only=True):
    """``columns`` have as many entries as ``times`` (seconds since 1970), null where there is
    nothing to say: shares of 1, seconds, tokens per second, requests. Each is drawn over the
    ``window_s`` before its time. ``marks`` are all there are of the span."""

    span: str
    step_s: float
    window_s: float
    num_points: int
    times: list[float]
    columns: dict[str, list[float | None]]
    marks: tuple[Mark, ...]


def series_body(board: Board, span_name: str, after: float) -> SeriesBody:
    """KeyError for an unknown span."""
    span = SPANS[span_name]
    series = board.history.series(span_name, after)
    begins_at = board.clock() - span.step_s * span.num_points
    return SeriesBody(
        span=span_name,
        step_s=span.step_s,
        window_s=span.window_s,
        num_points=span.num_points,
        times=series.times.round(3).tolist(),
        columns={name: _digits(values) for name, values in series.columns.items()},
        marks=tuple(mark for mark in board.marks.marks if mark.at >= begins_at),
    )


def _digits(values: NDArray[np.float64]) -> list[float | None]:
    """Five significant ones are more than a screen has pixels."""
    with np.errstate(divide="ignore", invalid="ignore"):
        magnitude = np.floor(np.log10(np.abs(values)))
    scale = 10.0 ** np.where(np.isfinite(magnitude), 4 - magnitude, 0.0)
    rounded: list[float | None] = (np.round(values * scale) / scale).tolist()
    return rounded
