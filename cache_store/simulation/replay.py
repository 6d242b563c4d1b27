"""One replay: a trace through the real prefix cache, its tiers and policy, without tensors.

Owns the cache that is replayed through, the stand-in for copies between tiers, and the counting of
hits. Every block of a trace becomes one block of one token, so that ids compare and chain as token
ids do. One request after another: match, acquire, allocate, release with the whole prompt and with
what the trace says of the answer; copies
between tiers are done before the next request, at no cost, so that the figures say what capacity
and policy give, not what bandwidth takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cache_store.block_hash import Namespace
from cache_store.cache import Lease
from cache_store.events import Tier
from cache_store.eviction import make_eviction_policy
from cache_store.load_planner import LoadPlanner
from cache_store.prefix_cache import PrefixCache
from cache_store.simulation.trace import Trace, TraceRequest
from cache_store.transfer import TransferOrder, TransferResult
from cache_store.transfer_desk import LowerTiers

NAMESPACE = Namespace("trace")


@dataclass(frozen=True, slots=True)
class Capacity:
    """Blocks per tier; a tier of 0 blocks does not exist."""

    device: int
    host: int = 0
    disk: int = 0

    @property
    def num_blocks(self) -> int:
        return self.device + self.host + self.disk

    @property
    def lower(self) -> dict[Tier, int]:
        counts = {Tier.HOST: self.host, Tier.DISK: self.disk}
        return {tier: count for tier, count in counts.items() if count}


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Hits by the tier they were found in, and totals, in blocks; and both in tokens."""

    num_device_blocks: int
    num_host_blocks: int
    num_disk_blocks: int
    num_blocks: int
    num_hit_tokens: int
    num_tokens: int
    num_evicted_blocks: int  # that left every tier

    @property
    def num_hit_blocks(self) -> int:
        return self.num_device_blocks + self.num_host_blocks + self.num_disk_blocks

    @property
    def block_hit_rate(self) -> float:
        return self.num_hit_blocks / self.num_blocks

    @property
    def token_hit_rate(self) -> float:
        return self.num_hit_tokens / self.num_tokens

    def share_of(self, num_blocks: int) -> float:
        return num_blocks / self.num_blocks


class InstantMover:
    """A transfer executor that moves nothing and is always done."""

    def __init__(self) -> None:
        self._results: list[TransferResult] = []

    def submit(self, order: TransferOrder) -> None:
        self._results.append(TransferResult(order.number, len(order.source_ids), 0.0))

    def delete(self, tier: Tier, block_ids: Sequence[int]) -> None:
        pass

    def take_results(self) -> list[TransferResult]:
        results, self._results = self._results, []
        return results

    def close(self) -> None:
        pass


class TraceReplay:
    """A cache, and the requests of a trace one by one."""

    def __init__(self, capacity: Capacity, policy: str) -> None:
        self._now_s = 0.0
        self.cache = PrefixCache(
            capacity.device, 1, make_eviction_policy(policy), self._lower_tiers(capacity)
        )

    def run(self, request: TraceRequest) -> Lease:
        """Serve one request; its lease, released, says what was found where."""
        self._now_s = request.arrival_s
        cache, stored_ids = self.cache, np.concatenate((request.block_ids, request.answer_ids))
        lease = cache.acquire(cache.match(NAMESPACE, request.block_ids))
        while not cache.allocate(lease, len(stored_ids)):
            assert cache.has_transfers, "an unlocked cache can always make room"
            cache.advance()
        while lease.is_loading:
            cache.advance()
        assert not lease.has_failed
        cache.release(lease, stored_ids, len(stored_ids))
        cache.advance()
        while cache.has_transfers:
            cache.advance()
        return lease

    def _lower_tiers(self, capacity: Capacity) -> LowerTiers | None:
        if not capacity.lower:
            return None
        planner = LoadPlanner(1, lambda: None, self._clock)  # loading always pays
        return LowerTiers(capacity.lower, InstantMover(), planner, self._clock)

    def _clock(self) -> float:
        return self._now_s


def replay(trace: Trace, capacity: Capacity, policy: str) -> ReplayResult:
    """Run ``trace`` through an empty cache.

    Raises ValueError if the longest request does not fit on the device.
    """
    longest = trace.num_longest_blocks
    if capacity.device < longest:
        raise ValueError(f"{capacity.device} blocks cannot hold a request of {longest}")
    player = TraceReplay(capacity, policy)
    num_device = num_host = num_disk = num_hit_tokens = 0
    for request in trace.requests:
        lease = player.run(request)
        num_cached = lease.num_cached_tokens  # blocks: each has one token
        num_host += lease.num_host_tokens
        num_disk += lease.num_disk_tokens
        num_device += num_cached - lease.num_host_tokens - lease.num_disk_tokens
        num_hit_tokens += min(num_cached * trace.block_tokens, request.num_tokens)
    return ReplayResult(
        num_device,
        num_host,
        num_disk,
        trace.num_blocks,
        num_hit_tokens,
        trace.num_tokens,
        player.cache.stats().evicted_total,
    )
