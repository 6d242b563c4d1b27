"""A cache with tiers below the device whose transfers are carried out by hand.

Owns the executor that keeps every order until a test says what comes of it, and the shorthand with
which tests of the tiers serve prompts and look at single nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from cache_store.block_hash import Namespace
from cache_store.block_pool import BlockPool
from cache_store.cache import Lease
from cache_store.events import Tier
from cache_store.eviction import make_eviction_policy
from cache_store.load_planner import LoadPlanner
from cache_store.prefix_cache import PrefixCache
from cache_store.radix_node import RadixNode, path_of
from cache_store.radix_tree import RadixTree
from cache_store.tier_manager import TierManager
from cache_store.transfer import TransferOrder, TransferResult
from cache_store.transfer_desk import LowerTiers

BLOCK_SIZE = 4
NAMESPACE = Namespace("f")


class HandExecutor:
    """``orders`` are under way until :meth:`finish`; ``deleted`` says what was given up where."""

    def __init__(self) -> None:
        self.orders: list[TransferOrder] = []
        self.submitted: list[TransferOrder] = []
        self.results: list[TransferResult] = []
        self.deleted: list[tuple[Tier, list[int]]] = []

    def submit(self, order: TransferOrder) -> None:
        assert len(order.source_ids) == len(order.target_ids) > 0
        assert bool(order.keys) == (Tier.DISK in (order.source, order.target))
        assert not order.keys or len(order.keys) == len(order.source_ids)
        self.orders.append(order)
        self.submitted.append(order)

    def delete(self, tier: Tier, block_ids: Sequence[int]) -> None:
        self.deleted.append((tier, list(block_ids)))

    def take_results(self) -> list[TransferResult]:
        results, self.results = self.results, []
        return results

    def close(self) -> None:
        pass

    def finish(self, num_done: int | None = None, *, index: int = 0, seconds: float = 0.1) -> None:
        order = self.orders.pop(index)
        count = len(order.source_ids) if num_done is None else num_done
        error = "" if count == len(order.source_ids) else "scripted"
        self.results.append(TransferResult(order.number, count, seconds, error))


class TierWorld:
    """``token_s``: seconds that a token of prefill is said to take, None while unknown."""

    def __init__(
        self,
        num_device: int = 8,
        num_host: int = 0,
        num_disk: int = 0,
        *,
        write_blocks: int = 64,
        token_s: float | None = None,
        policy: str = "lru",
    ) -> None:
        self.now_s = 0.0
        self.token_s = token_s
        self.executor = HandExecutor()
        sizes = {Tier.HOST: num_host, Tier.DISK: num_disk}
        self.planner = LoadPlanner(BLOCK_SIZE, lambda: self.token_s, lambda: self.now_s)
        lower = LowerTiers(
            {tier: count for tier, count in sizes.items() if count},
            self.executor,
            self.planner,
            lambda: self.now_s,
            write_blocks,
        )
        self.cache = PrefixCache(
            num_device,
            BLOCK_SIZE,
            make_eviction_policy(policy),
            lower,
            clock_ns=lambda: int(self.now_s * 1e9),
        )
        self.leases: list[Lease] = []

    # ------------------------------------------------------------ what is inside

    @property
    def tree(self) -> RadixTree:
        return self.cache._tree

    @property
    def tiers(self) -> TierManager:
        return self.cache._tiers

    def pool(self, tier: Tier) -> BlockPool:
        return self.tiers.pools[tier]

    def num_free(self, tier: Tier = Tier.DEVICE) -> int:
        return self.pool(tier).num_free

    def num_cached(self, tier: Tier) -> int:
        return self.tree.residency.num_cached[tier]

    def path(self, ids: np.ndarray) -> list[RadixNode]:
        """The nodes that a match of ``ids`` runs through, a partly matched one included."""
        position = self.cache.match(NAMESPACE, ids).position
        if position is None:
            return []
        nodes = path_of(position.node)
        if position.source is not None and position.source not in nodes:
            nodes.append(position.source)
        return nodes

    def copies(self, ids: np.ndarray) -> list[str]:
        """For each node of the path the initials of the tiers that it is in: ``DHd``."""
        letters = {Tier.DEVICE: "D", Tier.HOST: "H", Tier.DISK: "d"}
        return [
            "".join(letter for tier, letter in letters.items() if node.ids_in(tier) is not None)
            for node in self.path(ids)
        ]

    # ------------------------------------------------------------ what requests do

    def begin(self, ids: np.ndarray, bonus_s: float = 0.0) -> Lease:
        lease = self.cache.acquire(self.cache.match(NAMESPACE, ids), bonus_s)
        self.leases.append(lease)
        return lease

    def start(self, ids: np.ndarray) -> Lease:
        """A request that has its blocks, or is loading them."""
        lease = self.begin(ids)
        assert self.cache.allocate(lease, len(ids))
        return lease

    def end(self, lease: Lease, ids: np.ndarray, num_computed: int | None = None) -> None:
        if lease.pending_copy is not None and not lease.is_loading and not lease.has_failed:
            self.cache.copied(lease)
        self.cache.release(lease, ids, len(ids) if num_computed is None else num_computed)
        self.leases.remove(lease)
        self.check()

    def store(self, ids: np.ndarray, bonus_s: float = 0.0) -> int:
        """A whole request, which must find room at once; how much of it was cached."""
        lease = self.begin(ids, bonus_s)
        assert self.cache.allocate(lease, len(ids))
        assert not lease.is_loading
        self.end(lease, ids)
        return lease.num_cached_tokens

    def finish(self, num_done: int | None = None, *, index: int = 0, seconds: float = 0.1) -> None:
        """One transfer ends, and the engine takes note."""
        self.executor.finish(num_done, index=index, seconds=seconds)
        self.advance()

    def advance(self) -> None:
        self.cache.advance()
        self.check()

    def settle(self) -> None:
        """Everything that is under way arrives, and what follows from it."""
        for _ in range(1000):
            if not self.executor.orders:
                return
            self.finish()
        raise AssertionError("transfers do not end")

    def check(self) -> None:
        self.cache.check_integrity(self.leases)


def tokens(*runs: Iterable[int] | int) -> np.ndarray:
    """Token ids from ints, ranges and other prompts, in order."""
    ids: list[int] = []
    for run in runs:
        ids.extend([run] if isinstance(run, int) else map(int, run))
    return np.array(ids, dtype=np.int32)


def prompt(number: int, num_blocks: int) -> np.ndarray:
    """One of many prompts that share nothing, of whole blocks."""
    first = 1000 * number
    return tokens(range(first, first + num_blocks * BLOCK_SIZE))


def moves(orders: Sequence[TransferOrder]) -> list[tuple[str, str, int]]:
    """(from, to, blocks) of each order."""
    return [(str(o.source), str(o.target), len(o.source_ids)) for o in orders]
