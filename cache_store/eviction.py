"""Which leaf goes first: policies of one key per node, and the queues ordered by that key.

Owns the order of eviction. Knows nothing of blocks, tokens or the pool, and takes nothing out of
the tree itself. A key may only grow while its node lives; that is what makes the lazy queue right:
an entry with an outdated key comes up too early, never too late, and is put back.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

from cache_store.adaptive import AdaptivePolicy
from cache_store.adaptive_queue import AdaptiveQueue
from cache_store.events import Tier
from cache_store.radix_node import QUEUE_MARKS, RadixNode

if TYPE_CHECKING:
    from cache_store.tenant_shares import TenantShare

# Keys of one policy compare with each other; nobody looks inside them.
EvictionKey = Any


class KeyPolicy(Protocol):
    def key(self, node: RadixNode) -> EvictionKey:
        """The node with the smallest key goes first. Never decreases while the node lives."""
        ...


class LruPolicy:
    """Least recently used first."""

    def key(self, node: RadixNode) -> EvictionKey:
        return node.last_access


class LfuPolicy:
    """Least often hit first, the least recently used of those."""

    def key(self, node: RadixNode) -> EvictionKey:
        return node.num_hits, node.last_access


class FifoPolicy:
    """Oldest first, whatever its use."""

    def key(self, node: RadixNode) -> EvictionKey:
        return node.created


EvictionPolicy = KeyPolicy | AdaptivePolicy

_POLICIES: dict[str, type[LruPolicy | AdaptivePolicy | LfuPolicy | FifoPolicy]] = {
    "lru": LruPolicy,
    "adaptive": AdaptivePolicy,
    "lfu": LfuPolicy,
    "fifo": FifoPolicy,
}
EVICTION_POLICIES = tuple(_POLICIES)


def make_eviction_policy(name: str) -> EvictionPolicy:
    """The policy of that name (one of EVICTION_POLICIES). Raises ValueError on another."""
    if name not in _POLICIES:
        raise ValueError(f"eviction policy {name!r} is none of {', '.join(EVICTION_POLICIES)}")
    return _POLICIES[name]()


def make_eviction_queue(
    policy: EvictionPolicy, tier: Tier, owner: TenantShare
) -> EvictionQueue | AdaptiveQueue:
    """The order in which one tenant's leaves leave a tier."""
    if isinstance(policy, AdaptivePolicy):
        return AdaptiveQueue(policy, tier, owner)
    return EvictionQueue(policy, tier, owner)


_Entry = tuple[EvictionKey, RadixNode]


class EvictionQueue:
    """Leaves of ``owner`` that may leave one tier, in the order of their keys, each once.

    Entries are not looked for when a node is touched, locked, moved or given a child: they are
    found outdated when they surface. Keys that arrive in rising order, as those of lru and fifo
    nearly all do, are kept in a line; the others in a heap. O(log n) per operation, amortized.
    """

    MIN_DEAD = 64  # below this many, entries of dead nodes are not worth a clean-up

    def __init__(self, policy: KeyPolicy, tier: Tier, owner: TenantShare) -> None:
        self._policy = policy
        self._tier = tier
        self._owner = owner
        self._mark = QUEUE_MARKS[tier]
        self._line: deque[_Entry] = deque()
        self._heap: list[_Entry] = []
        self._num_dead = 0

    def __len__(self) -> int:
        return len(self._line) + len(self._heap)

    def __iter__(self) -> Iterator[_Entry]:
        return chain(self._line, self._heap)

    @property
    def policy(self) -> KeyPolicy:
        return self._policy

    def holds(self, node: RadixNode) -> bool:
        return bool(node.queue_marks & self._mark) and node.owner is self._owner

    def push(self, node: RadixNode) -> None:
        """Enter a node that may leave the tier; no-op if it has an entry already."""
        if not node.queue_marks & self._mark:
            node.queue_marks |= self._mark
            self._enter(self._policy.key(node), node)

    def pop(self) -> RadixNode | None:
        """Take out the leaf to evict next; None when there is none."""
        line, heap, tier, key_of = self._line, self._heap, self._tier, self._policy.key
        owner = self._owner
        while line or heap:
            if not heap or (line and line[0] < heap[0]):
                entry_key, node = line.popleft()
            else:
                entry_key, node = heapq.heappop(heap)
            if node.owner is not owner:
                self._num_dead -= 1
                continue
            if not node.is_evictable_from(tier):
                node.queue_marks &= ~self._mark
                self._num_dead -= node.parent is None
                continue
            key = key_of(node)
            if key == entry_key:
                node.queue_marks &= ~self._mark
                return node
            self._enter(key, node)
        return None

    def put_back(self, node: RadixNode) -> None:
        """Return the node that was popped last, still the next to be evicted."""
        if self.holds(node):
            return  # a child of it has gone since, which entered it again
        node.queue_marks |= self._mark
        self._line.appendleft((self._policy.key(node), node))

    def forget(self, node: RadixNode) -> None:
        """Say that ``node`` left the tree other than by :meth:`pop`.

        Its entry is only counted; when such entries are half of all they are cleared, so that
        a server that never evicts does not collect them for ever.
        """
        if not node.queue_marks & self._mark:
            return
        self._num_dead += 1
        if self._num_dead > max(self.MIN_DEAD, len(self) // 2):
            self._line = deque(entry for entry in self._line if self._is_live(entry[1]))
            self._heap = [entry for entry in self._heap if self._is_live(entry[1])]
            heapq.heapify(self._heap)
            self._num_dead = 0

    def disown(self, node: RadixNode) -> None:
        """``node`` is another's now: its entry here, if it has one, is dead."""
        self.forget(node)
        node.queue_marks &= ~self._mark

    def _is_live(self, node: RadixNode) -> bool:
        return node.parent is not None and node.owner is self._owner

    def _enter(self, key: EvictionKey, node: RadixNode) -> None:
        if not self._line or self._line[-1][0] <= key:
            self._line.append((key, node))
        else:
            heapq.heappush(self._heap, (key, node))
