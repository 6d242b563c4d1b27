"""The order in which leaves leave one tier under the adaptive policy.

Owns which leaves wait in which cell. What a cell is worth is the policy's to say; knows nothing of
requests, and takes nothing out of the tree itself.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from cache_store.adaptive import RETAINED, AdaptivePolicy
from cache_store.events import Tier
from cache_store.radix_node import QUEUE_MARKS, RadixNode

if TYPE_CHECKING:
    from cache_store.tenant_shares import TenantShare


class AdaptiveQueue:
    """Leaves of ``owner`` in cells by kind and age; one of the cell that is worth least goes first.

    At most one entry per node. Entries are not looked for when a node is touched, locked or given
    a child: they are found in the wrong cell when they surface. As their ages grow they move from
    cell to cell whenever the policy has new worths, each but a few times per doubling of its age.
    What is retained goes only when there is nothing else. While the policy orders by recency, the
    cell whose first leaf was used longest ago is next.
    """

    MIN_DEAD = 64  # below this many, entries of dead nodes are not worth a clean-up

    def __init__(self, policy: AdaptivePolicy, tier: Tier, owner: TenantShare) -> None:
        self._policy = policy
        self._tier = tier
        self._owner = owner
        self._mark = QUEUE_MARKS[tier]
        self._cells: dict[int, deque[RadixNode]] = {}  # none is empty for long
        self._order: list[tuple[float, int]] = []  # a heap of (rank, place) of the cells
        self._retained: list[tuple[int, RadixNode]] = []  # a heap by the time they are kept until
        self._version = policy.version
        self._followed_at = policy.now
        self._num_entries = 0
        self._num_dead = 0

    def __len__(self) -> int:
        return self._num_entries

    def __iter__(self) -> Iterator[tuple[int, RadixNode]]:
        """Each entry, with its cell's place or the time that it is retained until."""
        queued = ((place, node) for place, cell in self._cells.items() for node in cell)
        return chain(queued, self._retained)

    def holds(self, node: RadixNode) -> bool:
        return bool(node.queue_marks & self._mark) and node.owner is self._owner

    def push(self, node: RadixNode) -> None:
        """Enter a node that may leave the tier; no-op if it has an entry already."""
        if not node.queue_marks & self._mark:
            node.queue_marks |= self._mark
            self._num_entries += 1
            self._enter(node)

    def pop(self) -> RadixNode | None:
        """Take out the leaf to evict next; None when there is none."""
        policy = self._policy
        is_old = policy.now - self._followed_at >= policy.step
        if is_old or self._version != policy.version:
            self._follow_worths()
        self._release_retained()
        pop_ranked = self._pop_oldest if policy.is_by_recency else self._pop_worst
        return pop_ranked() or self._pop_retained()

    def put_back(self, node: RadixNode) -> None:
        """Return the node that was popped last, still the next to be evicted."""
        if self.holds(node):
            return  # a child of it has gone since, which entered it again
        node.queue_marks |= self._mark
        self._num_entries += 1
        place = self._policy.place_of(node)
        if place == RETAINED or place not in self._cells:
            self._enter(node)
            return
        self._cells[place].appendleft(node)
        if self._policy.is_by_recency:
            heapq.heappush(self._order, (self._rank(place), place))

    def forget(self, node: RadixNode) -> None:
        """Say that ``node`` left the tree other than by :meth:`pop`. Its entry is only counted;
        when such entries are half of all they are cleared."""
        if not node.queue_marks & self._mark:
            return
        self._num_dead += 1
        if self._num_dead > max(self.MIN_DEAD, self._num_entries // 2):
            for place, cell in self._cells.items():
                self._cells[place] = deque(node for node in cell if self._is_live(node))
            self._retained = [entry for entry in self._retained if self._is_live(entry[1])]
            heapq.heapify(self._retained)
            self._num_entries -= self._num_dead
            self._num_dead = 0

    def disown(self, node: RadixNode) -> None:
        """``node`` is another's now: its entry here, if it has one, is dead."""
        self.forget(node)
        node.queue_marks &= ~self._mark

    def _is_live(self, node: RadixNode) -> bool:
        return node.parent is not None and node.owner is self._owner

    def _pop_worst(self) -> RadixNode | None:
        while self._order:
            place = self._order[0][1]
            cell = self._cells[place]
            if not cell:
                heapq.heappop(self._order)
                del self._cells[place]
                continue
            node = cell.popleft()
            if self._drop_if_unfit(node):
                continue
            if self._policy.place_of(node) == place:
                return self._taken(node)
            self._enter(node)
        return None

    def _pop_oldest(self) -> RadixNode | None:
        while self._order:
            rank, place = self._order[0]
            cell = self._cells.get(place)
            if not cell:
                heapq.heappop(self._order)
                self._cells.pop(place, None)
            elif rank != self._rank(place):
                heapq.heapreplace(self._order, (self._rank(place), place))
            else:
                node = cell.popleft()
                if self._drop_if_unfit(node):
                    continue
                if not self._policy.retained_until(node):
                    return self._taken(node)
                self._enter(node)
        return None

    def _enter(self, node: RadixNode) -> None:
        place = self._policy.place_of(node)
        if place == RETAINED:
            heapq.heappush(self._retained, (self._policy.retained_until(node), node))
            return
        cell = self._cells.get(place)
        if cell is not None:
            cell.append(node)
            return
        self._cells[place] = deque((node,))
        heapq.heappush(self._order, (self._rank(place), place))

    def _rank(self, place: int) -> float:
        """Of a cell that is not empty: that of the lowest goes first."""
        if self._policy.is_by_recency:
            return self._policy.recency(self._cells[place][0])
        return self._policy.worth(place)

    def _taken(self, node: RadixNode) -> RadixNode:
        node.queue_marks &= ~self._mark
        self._num_entries -= 1
        return node

    def _drop_if_unfit(self, node: RadixNode) -> bool:
        if node.owner is not self._owner:
            self._num_entries -= 1
            self._num_dead -= 1
            return True
        if node.is_evictable_from(self._tier):
            return False
        self._taken(node)
        self._num_dead -= node.parent is None
        return True

    def _follow_worths(self) -> None:
        """Move what has grown older, and order the cells by what they are worth now."""
        self._version, self._followed_at = self._policy.version, self._policy.now
        for place in sorted(self._cells):
            cell = self._cells[place]
            while cell and (
                self._drop_if_unfit(cell[0]) or self._policy.place_of(cell[0]) != place
            ):
                node = cell.popleft()
                if self.holds(node):
                    self._enter(node)
        self._cells = {place: cell for place, cell in self._cells.items() if cell}
        self._order = [(self._rank(place), place) for place in self._cells]
        heapq.heapify(self._order)

    def _release_retained(self) -> None:
        while self._retained and self._retained[0][0] <= self._policy.clock_ns:
            node = heapq.heappop(self._retained)[1]
            if not self._drop_if_unfit(node):
                self._enter(node)

    def _pop_retained(self) -> RadixNode | None:
        while self._retained:
            until_ns, node = heapq.heappop(self._retained)
            if self._drop_if_unfit(node):
                continue
            if self._policy.retained_until(node) == until_ns:
                return self._taken(node)
            self._enter(node)
        return None
