"""What has left the cache, as far as it is remembered: names of blocks, when each went and why.

Owns a bounded list of hashes, so that a miss can be told from a prefix that was never there (ghosts
as in ARC, Megiddo and Modha, FAST 2003, but for people to read: nothing is decided by it). Knows
nothing of tokens, tenants or requests. Not thread-safe: owned by the engine thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from cache_store.block_hash import BlockHashes
from cache_store.events import Tier

__all__ = ["Cause", "DepartedPrefix", "GhostList"]

MIN_GHOSTS = 16_384
MAX_GHOSTS = 131_072
_NS_PER_S = 1e9


class Cause(StrEnum):
    """Why a block left the cache."""

    CAPACITY = "capacity"  # its room was needed
    TENANT_CAP = "tenant_cap"  # its tenant had more than it may have
    DROPPED = "dropped"  # asked for: a session was deleted, or its time ran out
    RESET = "reset"  # the whole cache was emptied
    LOST = "lost"  # it could not be read back


@dataclass(frozen=True, slots=True)
class DepartedPrefix:
    """So many consecutive blocks were stored once. The first of them, which all others need, left
    ``tier``, the last one that it was in, ``ago_s`` seconds ago."""

    num_blocks: int
    ago_s: float
    tier: Tier
    cause: Cause


@dataclass(frozen=True, slots=True)
class _Departure:
    at_ns: int
    tier: Tier
    cause: Cause


class GhostList:
    """Remembers at least the last ``max_ghosts`` blocks that left, and at most twice as many.

    ``num_blocks`` is what the cache holds; ``clock_ns`` counts nanoseconds. A block that was stored
    again is not taken out: who asks has not found it.
    """

    def __init__(self, clock_ns: Callable[[], int], num_blocks: int = 0) -> None:
        self._clock_ns = clock_ns
        self._max_ghosts = min(max(MIN_GHOSTS, num_blocks), MAX_GHOSTS)
        self._cause = Cause.CAPACITY
        self._young: dict[int, _Departure] = {}
        self._old: dict[int, _Departure] = {}

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())

    @contextlib.contextmanager
    def because(self, cause: Cause) -> Iterator[None]:
        """What leaves within does so for ``cause``, and not for want of room."""
        before, self._cause = self._cause, cause
        try:
            yield
        finally:
            self._cause = before

    def left(self, joined_hashes: bytes, tier: Tier) -> None:
        """These blocks (their chained hashes, joined) were in ``tier`` last and are in none now."""
        departure = _Departure(self._clock_ns(), tier, self._cause)
        # Half a hash is name enough for what nothing is decided by.
        names = np.frombuffer(joined_hashes, "<u8")[::2].tolist()
        self._young.update(dict.fromkeys(names, departure))
        if len(self._young) > self._max_ghosts:
            self._young, self._old = {}, self._young

    def find(self, hashes: BlockHashes, first: int) -> DepartedPrefix | None:
        """What is known of the blocks from ``first`` on; None if that one is no ghost."""
        young, old = self._young, self._old
        if first >= len(hashes) or not (young or old):
            return None
        names = np.frombuffer(hashes.joined, "<u8")[2 * first :: 2].tolist()
        departure = young.get(names[0]) or old.get(names[0])
        if departure is None:
            return None
        num_blocks = next(
            (number for number, name in enumerate(names) if name not in young and name not in old),
            len(names),
        )
        ago_s = max(0.0, (self._clock_ns() - departure.at_ns) / _NS_PER_S)
        return DepartedPrefix(num_blocks, ago_s, departure.tier, departure.cause)
