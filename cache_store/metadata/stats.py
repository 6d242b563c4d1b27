"""What a metadata store counts of itself.

Owns the figures and their meaning, for metrics and for people. Knows nothing of how they are shown.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MetadataStats"]


@dataclass(frozen=True, slots=True)
class MetadataStats:
    """Since the store was made, but for the gauges ``is_degraded`` and ``num_kept*``."""

    is_degraded: bool = False
    degraded_s: float = 0.0  # out of reach, the present time included
    calls_total: int = 0
    failures_total: int = 0  # calls that ended with MetadataError
    unreadable_total: int = 0  # records that did not open or decode, taken for absent
    num_kept: int = 0  # sessions that wait in memory to be written
    kept_bytes: int = 0
    dropped_total: int = 0  # kept sessions given up: too many, too large or past their time
    conflicts_total: int = 0  # kept sessions that another gateway had changed meanwhile
