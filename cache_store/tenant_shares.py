"""Who holds how much of each tier, and whose blocks are the next to go.

Owns the tenants' accounts: blocks charged to each, weights, caps, and one eviction queue per tenant
and tier. Within a tenant the policy's order holds; between them it is the one that holds most for
its weight that gives up blocks. So nobody is pushed below its part of a tier by others, and what
one does not use the others do: drop from the longest queue, as where a switch's queues share its
memory (Wei, Coyle, Hsiao, GLOBECOM 1991). Knows nothing of requests, pools or tensors.

With one tenant there is nothing to choose, and nothing is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from cache_store.adaptive import AdaptivePolicy
from cache_store.adaptive_queue import AdaptiveQueue
from cache_store.events import Tier
from cache_store.eviction import EvictionPolicy, EvictionQueue, make_eviction_queue
from cache_store.radix_node import RadixNode

# A tenant that asks for nothing keeps its part, and half as much of it after each of these.
IDLE_HALF_LIFE_NS = 600 * 1_000_000_000
# So much of a tier is taken from one before all are compared again.
_TAKEN_SHARE = 1 / 1024
_MIN_PRUNED = 64


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """``max_blocks``: of the cache, in each tier that is capped."""

    weight: float = 1.0
    max_blocks: Mapping[Tier, int] = field(default_factory=dict)


NO_LIMITS = TenantLimits()


@dataclass(frozen=True, slots=True)
class TenantBlocks:
    """Blocks of the cache that are charged to one tenant, by tier."""

    tenant: str
    num_blocks: Mapping[Tier, int]


class TenantShare:
    """The account of one tenant.

    ``num_cached`` are blocks of the tree by tier, ``num_leaving`` those of them that transfers
    under way will free, ``num_evictable`` those on the device that nobody holds; ``num_private``
    are blocks of the device that its requests have not stored yet.
    """

    __slots__ = (
        "last_used_ns",
        "limits",
        "num_cached",
        "num_evictable",
        "num_leases",
        "num_leaving",
        "num_private",
        "queues",
        "tenant",
    )

    def __init__(self, tenant: str, policy: EvictionPolicy, tiers: Iterable[Tier]) -> None:
        self.tenant = tenant
        self.limits = NO_LIMITS
        self.queues: dict[Tier, EvictionQueue | AdaptiveQueue] = {
            tier: make_eviction_queue(policy, tier, self) for tier in tiers
        }
        self.num_cached = dict.fromkeys(self.queues, 0)
        self.num_leaving = dict.fromkeys(self.queues, 0)
        self.num_evictable = 0
        self.num_private = 0
        self.num_leases = 0
        self.last_used_ns = 0

    def num_held(self, tier: Tier) -> int:
        """What it keeps others from having in ``tier``, now or when transfers have ended."""
        num_held = self.num_cached[tier] - self.num_leaving[tier]
        return num_held + self.num_private if tier is Tier.DEVICE else num_held

    def num_over_cap(self, tier: Tier) -> int:
        """Blocks beyond its cap; none or less without one."""
        cap = self.limits.max_blocks.get(tier)
        return 0 if cap is None else self.num_cached[tier] - self.num_leaving[tier] - cap

    def may_enter(self, tier: Tier) -> bool:
        return self.limits.max_blocks.get(tier) != 0

    @property
    def is_empty(self) -> bool:
        return not (self.num_leases or self.num_private or any(self.num_cached.values()))


class TenantShares:
    """``capacities``: blocks of each tier that exists. ``clock_ns`` tells who is idle."""

    def __init__(
        self,
        capacities: Mapping[Tier, int],
        policy: EvictionPolicy,
        clock_ns: Callable[[], int],
    ) -> None:
        if isinstance(policy, AdaptivePolicy):
            for num_blocks in capacities.values():
                policy.add_capacity(num_blocks)
        self._capacities = dict(capacities)
        self._policy = policy
        self._clock_ns = clock_ns
        self._shares: dict[str, TenantShare] = {}
        self._limits: dict[str, TenantLimits] = {}
        self._prune_at = _MIN_PRUNED
        self.nobody = self.of("")

    def __iter__(self) -> Iterator[TenantShare]:
        return iter(self._shares.values())

    def of(self, tenant: str) -> TenantShare:
        share = self._shares.get(tenant)
        if share is None:
            if len(self._shares) >= self._prune_at:
                self._prune()
            share = self._shares[tenant] = TenantShare(tenant, self._policy, self._capacities)
            share.limits = self._limits.get(tenant, NO_LIMITS)
        return share

    def begin(self, tenant: str) -> TenantShare:
        """For a lease of ``tenant``; ``num_leases`` is the caller's to lower when it ends."""
        share = self.of(tenant)
        share.num_leases += 1
        share.last_used_ns = self._clock_ns()
        return share

    def set_limits(self, limits: Mapping[str, TenantLimits]) -> None:
        """These hold and no others."""
        self._limits = dict(limits)
        for share in self:
            share.limits = self._limits.get(share.tenant, NO_LIMITS)

    def usage(self) -> list[TenantBlocks]:
        """Of those tenants that have anything."""
        return [
            TenantBlocks(share.tenant, dict(share.num_cached))
            for share in self
            if not share.is_empty
        ]

    # ------------------------------------------------------------ whose blocks go

    def sources(self, tier: Tier) -> Iterator[tuple[EvictionQueue | AdaptiveQueue, int | None]]:
        """Where to take victims from, the next best each time, and how many blocks at most (None:
        any number) before asking again. Ends when there are none left.

        For a caller whose takings are off the accounts when it asks again.
        """
        spent: set[str] = set()
        while True:
            ranked = self._ranked(tier)
            if spent:
                ranked = [share for share in ranked if share.tenant not in spent]
            if not ranked:
                return
            share = ranked[0]
            before = share.num_cached[tier]
            most = self._num_to_take(share, ranked[1], tier) if len(ranked) > 1 else None
            yield share.queues[tier], most
            if share.num_cached[tier] == before:
                spent.add(share.tenant)
            else:
                spent.clear()  # what hung below others' blocks may be gone

    def pop(self, tier: Tier) -> RadixNode | None:
        """Take out the next victim of ``tier``; None when there is none."""
        for share in self._ranked(tier):
            node = share.queues[tier].pop()
            if node is not None:
                return node
        return None

    def num_obtainable(self, share: TenantShare, num_free: int, num_evictable: int) -> int:
        """Blocks of the device that ``share`` can have without pushing others below their parts:
        free ones, its own, and what others hold beyond theirs."""
        if share.num_evictable == num_evictable:
            return num_free + num_evictable
        now_ns = self._clock_ns()
        standings = {each.tenant: self._standing(each, now_ns) for each in self}
        in_use = sum(
            standings[each.tenant]
            for each in self
            if each is share or each.num_held(Tier.DEVICE) > 0
        )
        total = num_free + share.num_evictable
        for each in self:
            if each is not share and each.num_evictable:
                part = self._capacities[Tier.DEVICE] * standings[each.tenant] / in_use
                beyond = each.num_held(Tier.DEVICE) - int(part)
                total += max(0, min(each.num_evictable, beyond))
        return total

    def adopt(self, node: RadixNode, share: TenantShare) -> None:
        """Charge ``share`` with a locked node that nobody was charged with so far."""
        before = node.owner
        if before is share or node.transfer is not None:
            return
        node.owner = share
        for tier, queue in before.queues.items():
            queue.disown(node)
            ids = node.ids_in(tier)
            if ids is not None:
                before.num_cached[tier] -= len(ids)
                share.num_cached[tier] += len(ids)

    # ------------------------------------------------------------ inside

    def _standing(self, share: TenantShare, now_ns: int) -> float:
        """Its weight, as far as it is not idle."""
        if share.num_leases:
            return share.limits.weight
        idle = (now_ns - share.last_used_ns) / IDLE_HALF_LIFE_NS
        return share.limits.weight * math.exp2(-min(max(idle, 0.0), 64.0))

    def _ranked(self, tier: Tier) -> list[TenantShare]:
        """Those that may have victims, the one that holds most for its standing first."""
        shares = [share for share in self._shares.values() if len(share.queues[tier])]
        if len(shares) > 1:
            now_ns = self._clock_ns()
            shares.sort(key=lambda each: -each.num_held(tier) / self._standing(each, now_ns))
        return shares

    def _num_to_take(self, share: TenantShare, other: TenantShare, tier: Tier) -> int:
        """Until it holds no more than ``other`` for its standing."""
        now_ns = self._clock_ns()
        ratio = self._standing(share, now_ns) / self._standing(other, now_ns)
        beyond = share.num_held(tier) - other.num_held(tier) * ratio
        return max(1, int(self._capacities[tier] * _TAKEN_SHARE), int(beyond))

    def _prune(self) -> None:
        """Forget tenants that have nothing."""
        kept = {
            tenant: share
            for tenant, share in self._shares.items()
            if share is self.nobody or not share.is_empty
        }
        self._shares = kept
        self._prune_at = max(_MIN_PRUNED, 2 * len(kept))
