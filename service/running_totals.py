"""What the request metrics come to over all tenants, as plain numbers.

Owns sums that can be read every second: to add up the metrics themselves, which have a series for
each tenant, would take the event loop a tenth of a second each time. Counted in the same calls; a
test holds them to what /metrics says. Knows nothing of who reads them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from service.request_series import FIRST_TOKEN_BUCKETS, INTERVAL_BUCKETS

__all__ = ["BucketCounts", "RunningTotals"]


class BucketCounts:
    """``bounds`` are upper ones, of which each is in its bucket; beyond the last is one more."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times


@dataclass(slots=True)
class RunningTotals:
    """Tokens, and seconds of prefill that were saved; times by bucket. They never fall."""

    queried: int = 0
    device: int = 0  # found there
    host: int = 0
    disk: int = 0
    generated: int = 0
    saved_s: float = 0.0
    ttft_hit: BucketCounts = field(default_factory=lambda: BucketCounts(FIRST_TOKEN_BUCKETS))
    ttft_miss: BucketCounts = field(default_factory=lambda: BucketCounts(FIRST_TOKEN_BUCKETS))
    itl: BucketCounts = field(default_factory=lambda: BucketCounts(INTERVAL_BUCKETS))
