"""Quantiles of what was counted into buckets.

Owns the interpolation, which is that of Prometheus' histogram_quantile: linear within the bucket,
from 0 in the first, and the largest finite bound for what lies beyond it. Knows no metric.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["quantiles"]


def quantiles(
    bounds: NDArray[np.float64], counts: NDArray[np.float64], share: float
) -> NDArray[np.float64]:
    """The ``share`` quantile of each row, in the unit of ``bounds``; nan for a row of nothing.

    ``bounds`` has shape (buckets,), rises and ends with infinity; ``counts`` (rows, buckets) is
    cumulative along the buckets.
    """
    if not len(bounds) or not len(counts):
        return np.full(len(counts), np.nan)
    totals = counts[:, -1]
    ranks = share * totals
    index = np.minimum((counts < ranks[:, None]).sum(axis=1), len(bounds) - 1)
    rows = np.arange(len(counts))
    below = np.where(index > 0, counts[rows, index - 1], 0.0)
    within = counts[rows, index] - below
    lower = np.where(index > 0, bounds[index - 1], 0.0)
    upper = np.where(np.isinf(bounds[index]), lower, bounds[index])
    portion = np.divide(ranks - below, within, out=np.zeros_like(ranks), where=within > 0)
    return np.where(totals > 0, lower + (upper - lower) * portion, np.nan)
