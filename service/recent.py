"""The last few thousand measurements, for figures over recent windows.

Owns bounded rings of samples and their percentiles. Knows nothing of where samples come from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["HitRate", "Percentiles", "RecentSamples", "percentiles"]

_MAX_REQUESTS = 4096
_MAX_INTERVALS = 8192


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Seconds; None without any sample."""

    p50: float | None
    p95: float | None
    count: int


@dataclass(frozen=True, slots=True)
class HitRate:
    """Tokens asked for and found; ``rate`` is None when nothing was asked for."""

    num_queried: int
    num_hit: int

    @property
    def rate(self) -> float | None:
        return self.num_hit / self.num_queried if self.num_queried else None


@dataclass(frozen=True, slots=True)
class _Admission:
    at: float
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class _FirstToken:
    at: float
    seconds: float
    is_hit: bool


class RecentSamples:
    """All times are seconds of one monotonic clock. Used from the event loop alone."""

    def __init__(self) -> None:
        self._admissions: deque[_Admission] = deque(maxlen=_MAX_REQUESTS)
        self._first_tokens: deque[_FirstToken] = deque(maxlen=_MAX_REQUESTS)
        self._intervals: deque[tuple[float, float]] = deque(maxlen=_MAX_INTERVALS)

    def add_admission(self, at: float, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        self._admissions.append(_Admission(at, num_prompt_tokens, num_cached_tokens))

    def add_first_token(self, at: float, seconds: float, *, is_hit: bool) -> None:
        self._first_tokens.append(_FirstToken(at, seconds, is_hit))

    def add_interval(self, at: float, seconds: float) -> None:
        self._intervals.append((at, seconds))

    def hit_rate(self, since: float) -> HitRate:
        recent = [sample for sample in self._admissions if sample.at >= since]
        return HitRate(
            sum(sample.num_prompt_tokens for sample in recent),
            sum(sample.num_cached_tokens for sample in recent),
        )

    def first_token(self, since: float, *, is_hit: bool) -> Percentiles:
        return percentiles(
            sample.seconds
            for sample in self._first_tokens
            if sample.is_hit is is_hit and sample.at >= since
        )

    def intervals(self, since: float) -> Percentiles:
        return percentiles(seconds for at, seconds in self._intervals if at >= since)


def percentiles(samples: Iterable[float]) -> Percentiles:
    """By nearest rank."""
    ordered = sorted(samples)
    return Percentiles(_rank(ordered, 50), _rank(ordered, 95), len(ordered))


def _rank(ordered: Sequence[float], percent: int) -> float | None:
    if not ordered:
        return None
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]
