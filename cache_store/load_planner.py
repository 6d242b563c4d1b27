"""Load or recompute: whether bringing blocks back is quicker than computing them again.

Owns the measured speed of each lower tier and the rule that compares it with the measured speed of
prefill. Knows nothing of the tree, of transfers or of how anything is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cache_store.events import Tier

# Weight of the newest measurement while loading pays.
SMOOTHING = 0.3
# A tier that was found too slow is not asked, and so not measured, any more: what is known of it
# fades by half in this time, after which a large enough hit may try it once again.
FORGET_S = 600.0


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """``lowest``: the slowest tier to load from, DEVICE to load nothing; ``slowest``: of those that
    the hit is in. Estimates are those of the lower-tier blocks of the hit: seconds to load them
    all, seconds to compute them."""

    lowest: Tier
    slowest: Tier
    load_s: float
    recompute_s: float


@dataclass(slots=True)
class _Speed:
    block_s: float
    measured_at: float


class LoadPlanner:
    """``prefill_token_s`` gives the measured seconds per prefilled token, None while unknown."""

    def __init__(
        self,
        block_size: int,
        prefill_token_s: Callable[[], float | None],
        clock: Callable[[], float],
    ) -> None:
        self._block_size = block_size
        self._prefill_token_s = prefill_token_s
        self._clock = clock
        self._speeds: dict[Tier, _Speed] = {}

    def plan(self, num_host_blocks: int, num_disk_blocks: int) -> LoadPlan:
        """Of the ways to get what is below the device (compute all, load the host's part and
        compute the rest, load all) the one with the least estimated time.

        What was never measured counts as free, so that it gets measured.
        """
        token_s = self._prefill_token_s()
        host_s = num_host_blocks * self._block_s(Tier.HOST)
        disk_s = num_disk_blocks * self._block_s(Tier.DISK)
        block_s = (token_s or 0.0) * self._block_size
        recompute_s = block_s * (num_host_blocks + num_disk_blocks)
        load_s = host_s + disk_s
        slowest = Tier.DISK if num_disk_blocks else Tier.HOST
        if token_s is None:
            return LoadPlan(slowest, slowest, load_s, recompute_s)
        lowest, least = Tier.DEVICE, recompute_s
        if num_host_blocks and host_s + block_s * num_disk_blocks <= least:
            lowest, least = Tier.HOST, host_s + block_s * num_disk_blocks
        if num_disk_blocks and load_s <= least:
            lowest = Tier.DISK
        return LoadPlan(lowest, slowest, load_s, recompute_s)

    def record(self, tier: Tier, num_blocks: int, seconds: float) -> None:
        """Learn from a promotion of ``num_blocks`` that took ``seconds`` from order to end."""
        if num_blocks == 0:
            return
        measured = seconds / num_blocks
        token_s = self._prefill_token_s()
        speed = self._speeds.get(tier)
        is_too_slow = token_s is not None and measured > token_s * self._block_size
        if speed is None or is_too_slow:
            # Not smoothed: a promotion slower than computing must not happen twice.
            self._speeds[tier] = _Speed(measured, self._clock())
            return
        known = self._block_s(tier)
        speed.block_s = known + SMOOTHING * (measured - known)
        speed.measured_at = self._clock()

    def block_s(self, tier: Tier) -> float | None:
        """Seconds to load one block from ``tier`` as estimated now; None before the first."""
        return self._block_s(tier) if tier in self._speeds else None

    def _block_s(self, tier: Tier) -> float:
        speed = self._speeds.get(tier)
        if speed is None:
            return 0.0
        age_s = max(0.0, self._clock() - speed.measured_at)
        return float(speed.block_s * 0.5 ** (age_s / FORGET_S))
