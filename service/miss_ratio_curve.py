"""What a cache of another size would have found of the traffic of late: hit rate by size.

Owns the window that the curve is about and the turning of blocks into tokens and bytes; distances
between uses are service.reuse_sample's. The curve is that of lru over all workers taken together,
since a request of a session goes to the worker that has it. Only whole blocks count; the cache
finds up to a block's tokens more of a prompt.

So that old traffic is forgotten, a second sample takes the place of the first after ``window``
requests. It follows blocks from half a window on, and counts from three quarters on: else it would
take all that was used before for new. Knows nothing of HTTP and of the dashboard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cache_store.events import Tier
from model_worker.protocol import ModelCard, WorkerStats
from service.request_history import RequestRecord
from service.reuse_sample import ReuseSample

__all__ = [
    "SAMPLE_BLOCKS",
    "CacheSize",
    "CurvePoint",
    "MissRatioCurve",
    "MissRatioReport",
    "sizes_of",
]

SAMPLE_BLOCKS = 8_192
WINDOW = 10_000  # requests
_POINTS_PER_DOUBLING = 3
_DOUBLINGS = 14
_BEYOND = 4  # times what there is


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Blocks of all workers, of the tiers down to the one that ``name`` ends with."""

    name: str  # device | device+host | device+host+disk | device+disk
    num_blocks: int


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """``hit_rate`` is by tokens, 0 to 1. ``name`` is empty unless it is a size that there is."""

    num_blocks: int
    num_bytes: int
    hit_rate: float
    name: str = ""


@dataclass(frozen=True, slots=True)
class MissRatioReport:
    """``points`` ascend; ``sizes`` are those that there are. ``ideal_hit_rate`` is that of a cache
    without bounds, ``measured_hit_rate`` what the workers found, of the same requests; both are
    None before the first. ``sample_rate`` is the share of blocks that were followed."""

    points: tuple[CurvePoint, ...]
    sizes: tuple[CurvePoint, ...]
    ideal_hit_rate: float | None
    measured_hit_rate: float | None
    num_requests: int
    sample_rate: float


@dataclass(slots=True)
class _Window:
    sample: ReuseSample
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    block_size: int = 0

    def add(self, record: RequestRecord, *, is_counting: bool = True) -> None:
        self.sample.use(record.block_hashes, record.num_prompt_blocks, is_counting=is_counting)
        if is_counting:
            self.num_requests += 1
            self.num_prompt_tokens += record.num_prompt_tokens
            self.num_cached_tokens += record.num_cached_tokens
            self.block_size = record.block_size

    def by_tokens(self, share: float) -> float:
        """Of blocks looked up -> of tokens."""
        return share * self.sample.num_used * self.block_size / max(self.num_prompt_tokens, 1)


class MissRatioCurve:
    """Listens to a :class:`service.request_history.RequestHistory`."""

    def __init__(self, *, max_blocks: int = SAMPLE_BLOCKS, window: int = WINDOW) -> None:
        self._max_blocks = max_blocks
        self._window = window
        self._active = self._fresh()
        self._next = self._fresh()
        self._num_added = 0

    def add(self, record: RequestRecord) -> None:
        age = self._num_added % self._window
        if self._num_added and age == 0:
            self._active, self._next = self._next, self._fresh()
        self._num_added += 1
        self._active.add(record)
        if age >= self._window // 2:
            self._next.add(record, is_counting=age >= self._window * 3 // 4)

    def hit_rate(self, num_blocks: float) -> float:
        """Of tokens, in a cache of so many blocks."""
        return self._active.by_tokens(self._active.sample.found_within(num_blocks))

    def report(self, card: ModelCard, sizes: Sequence[CacheSize]) -> MissRatioReport:
        """The curve, from a fraction of what there is to beyond what would be of use."""
        active, block_bytes = self._active, card.kv_bytes_per_token * card.block_size
        num_distinct = active.sample.num_blocks / active.sample.rate
        most = max((_BEYOND * size.num_blocks for size in sizes), default=0)
        spread = _spread(max(num_distinct, most, 1.0))
        is_empty = not active.num_prompt_tokens
        return MissRatioReport(
            points=tuple(self._point(num_blocks, block_bytes, "") for num_blocks in spread),
            sizes=tuple(self._point(size.num_blocks, block_bytes, size.name) for size in sizes),
            ideal_hit_rate=None if is_empty else active.by_tokens(active.sample.found_ever),
            measured_hit_rate=(
                None if is_empty else active.num_cached_tokens / active.num_prompt_tokens
            ),
            num_requests=active.num_requests,
            sample_rate=active.sample.rate,
        )

    def _point(self, num_blocks: int, block_bytes: int, name: str) -> CurvePoint:
        return CurvePoint(num_blocks, num_blocks * block_bytes, self.hit_rate(num_blocks), name)

    def _fresh(self) -> _Window:
        return _Window(ReuseSample(self._max_blocks))


def sizes_of(stats: Sequence[WorkerStats]) -> tuple[CacheSize, ...]:
    """What the workers have, each row with a further tier: the device, then those below it."""
    total = sum(one.num_blocks for one in stats)
    found = [CacheSize(Tier.DEVICE.value, total)]
    for tier in (Tier.HOST, Tier.DISK):
        in_tier = sum(item.num_blocks for one in stats for item in one.tiers if item.tier is tier)
        if in_tier:
            total += in_tier
            found.append(CacheSize(f"{found[-1].name}+{tier.value}", total))
    return tuple(found) if total else ()


def _spread(largest: float) -> list[int]:
    """Whole numbers up to ``largest``, evenly on a logarithmic scale, of which the smallest, where
    there is little to see, are left out."""
    smallest = max(1.0, largest / 2**_DOUBLINGS)
    count = _POINTS_PER_DOUBLING * math.ceil(math.log2(largest / smallest + 1))
    spread = (smallest * (largest / smallest) ** (step / count) for step in range(count + 1))
    return list(dict.fromkeys(round(size) for size in spread))
