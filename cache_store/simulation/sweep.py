"""Replays of one trace at several sizes and policies, with the cache that never evicts beside them.

Owns which sizes are worth a look where none are asked for. The replay itself is
cache_store.simulation.replay's; nothing here knows of bytes, files or tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cache_store.simulation.replay import Capacity, ReplayResult, replay
from cache_store.simulation.trace import Trace

__all__ = ["Outcome", "Scenario", "device_sizes", "ideal", "run_all"]

_AROUND = (0.25, 0.5, 1.0, 2.0, 4.0)
_STEPS = 6  # halvings of what never evicts


@dataclass(frozen=True, slots=True)
class Scenario:
    capacity: Capacity
    policy: str  # one of cache_store.eviction.EVICTION_POLICIES


@dataclass(frozen=True, slots=True)
class Outcome:
    """``scenario`` is None of the cache that has room for everything."""

    scenario: Scenario | None
    num_unique_blocks: int
    result: ReplayResult


def ideal(trace: Trace) -> Outcome:
    """What no cache of any size can exceed: all that was there before is found again."""
    num_unique = trace.num_unique_blocks
    return Outcome(None, num_unique, replay(trace, Capacity(max(num_unique, 1)), "lru"))


def run_all(trace: Trace, scenarios: Sequence[Scenario]) -> Iterator[Outcome]:
    """One after another. Raises ValueError for a device that cannot hold the longest request."""
    num_unique = trace.num_unique_blocks
    for scenario in scenarios:
        result = replay(trace, scenario.capacity, scenario.policy)
        yield Outcome(scenario, num_unique, result)


def device_sizes(trace: Trace, present: int | None = None) -> tuple[int, ...]:
    """In blocks, ascending: around the ``present`` size, else up to where nothing is evicted.

    None is too small for the longest request, and of those that never evict only the smallest and
    the present one are there.
    """
    num_unique, longest = trace.num_unique_blocks, max(trace.num_longest_blocks, 1)
    if present:
        sizes = {round(present * factor) for factor in _AROUND}
    else:
        sizes = {num_unique // 2**step for step in range(1, _STEPS + 1)}
    kept = {size for size in sizes if longest <= size < num_unique}
    if present and present >= longest:
        kept.add(present)
    return tuple(sorted(kept or {max(num_unique, longest)}))
