"""Transfers that do not return: a disk that hangs must not hang the requests with it.

Owns the time that a transfer may take and which tiers have one that took longer. Knows nothing of
what is then to be done.
"""

from __future__ import annotations

from collections.abc import Iterable

from cache_store.events import Tier
from cache_store.transfer import TransferJob

# No transfer takes that long on anything worth loading from: orders are some hundred MiB at most.
OVERDUE_S = 30.0


class OverdueJobs:
    def __init__(self) -> None:
        self.tiers: frozenset[Tier] = frozenset()

    def check(self, jobs: Iterable[TransferJob], now_s: float) -> list[TransferJob]:
        """Those that have just become overdue; ``tiers`` are those that any overdue one is with."""
        overdue = [job for job in jobs if now_s - job.started_s > OVERDUE_S]
        new = [job for job in overdue if not job.is_overdue]
        for job in new:
            job.is_overdue = True
        if overdue or self.tiers:
            lanes = {tier for job in overdue for tier in (job.order.source, job.order.target)}
            self.tiers = frozenset(lanes - {Tier.DEVICE})
        return new

    def slowest_usable(self, lowest: Tier) -> Tier:
        """``lowest``, or the next quicker tier that answers; the device always does."""
        for tier in (Tier.DISK, Tier.HOST):
            if lowest is tier and tier in self.tiers:
                lowest = Tier.HOST if tier is Tier.DISK else Tier.DEVICE
        return lowest
