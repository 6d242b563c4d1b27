"""The adaptive policy: what every request tells about reuse, and the worth of blocks after it.

Owns the cohorts (the blocks of one kind that one request used), the ghosts of those that were
evicted, and the model that learns from both. It changes nothing in the tree but the cohort of a
node, and knows nothing of pools. The order of leaving that follows is adaptive_queue's.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cache_store.block_hash import HASH_BYTES
from cache_store.radix_node import RadixNode
from cache_store.recency_guard import RecencyGuard
from cache_store.reuse_model import (
    NUM_BINS,
    NUM_ORIGINS,
    NUM_PRIVATE,
    NUM_SIZES,
    SUPERSEDED,
    ReuseModel,
    bin_of,
)

RETAINED = -1  # the place of what is kept for longer than its use would say

_BRANCHED = NUM_ORIGINS - 1
_MAX_TURN = NUM_ORIGINS - 2


class Cohort:
    """The blocks of one kind that a request used, as long as nothing else has used them.

    ``size`` is how many there were at first, ``num_blocks`` counts those that nothing else has used
    since and ``num_gone`` of them that were evicted, the last
    of which, nearest to the root, is block ``ghost_start`` of its path, with the hash ``ghost``.
    ``turn`` says how often the request's path had been continued, ``end`` how long it was, in
    blocks. ``below`` is the cohort of the same request further from the root.
    """

    __slots__ = (
        "below", "end", "ghost", "ghost_start", "kind", "num_blocks", "num_gone", "seen", "size",
        "turn", "until_ns",
    )  # fmt: skip

    def __init__(self, kind: int, seen: int, turn: int, end: int, until_ns: int) -> None:
        self.kind = kind
        self.seen = seen
        self.turn = turn
        self.end = end
        self.until_ns = until_ns
        self.size = 0
        self.num_blocks = 0
        self.num_gone = 0
        self.ghost: bytes | None = None
        self.ghost_start = 0
        self.below: Cohort | None = None


@dataclass(frozen=True, slots=True)
class Visit:
    """What a request found when it began: so many blocks, the last of them of ``cohort``."""

    seen: int
    num_blocks: int
    cohort: Cohort | None


HashesOf = Callable[[RadixNode], bytes]
"""The joined hashes of the blocks of a node's edge; b"" of a partly filled one."""


class AdaptivePolicy:
    """Keeps what is worth most per block and time, by what was learned of its kind; or what was
    used last, while that is measured to be better.

    A kind is how often the conversation went on, by how much it grew, or, of a prefix that
    several continue, how often it was used. Memory is bounded by the nodes of the tree and
    ``max_ghosts``.
    """

    MIN_GHOSTS = 4096
    GHOSTS_PER_BLOCK = 1 / 16
    REFRESH_REQUESTS = 32
    STEP_SHARE = 1 / 32  # of all blocks: so many pass before ages are looked at again

    def __init__(self) -> None:
        self.model = ReuseModel()
        self.guard = RecencyGuard()
        self.now = 0  # blocks that requests have asked for
        self.clock_ns = 0
        self.version = 0  # of the worths, and of which order holds
        self.step = 1
        self.max_ghosts = self.MIN_GHOSTS
        self._num_blocks = 0
        self._ghosts: dict[bytes, Cohort] = {}
        self._aging: list[deque[Cohort]] = [deque() for _ in range(NUM_BINS)]
        self._retained: list[tuple[int, int, Cohort]] = []  # a heap by until_ns
        self._num_retained = 0  # so far: breaks ties
        self._start_ns: int | None = None
        self._refreshed_at = 0
        self._num_requests = 0

    def add_capacity(self, num_blocks: int) -> None:
        """Of one tier more that this policy orders."""
        self._num_blocks += num_blocks
        self.guard.add_capacity(num_blocks)
        self.step = max(1, int(self._num_blocks * self.STEP_SHARE))
        self.max_ghosts = max(self.MIN_GHOSTS, int(self._num_blocks * self.GHOSTS_PER_BLOCK))

    @property
    def num_ghosts(self) -> int:
        return len(self._ghosts)

    @property
    def is_by_recency(self) -> bool:
        """Whether what was used longest ago goes first, rather than what is worth least."""
        return self.guard.is_active

    def recency(self, node: RadixNode) -> int:
        """The smaller, the longer ago it was used."""
        return 0 if node.cohort is None else node.cohort.seen

    def place_of(self, node: RadixNode) -> int:
        """The cell of an eviction queue that ``node`` belongs to: its kind, and the bin of its
        age; RETAINED while a bonus keeps it."""
        cohort = node.cohort
        if cohort is None:
            return bin_of(self.now)  # found on disk, and not used since
        if cohort.until_ns:
            return RETAINED
        return cohort.kind * NUM_BINS + bin_of(self.now - cohort.seen)

    def retained_until(self, node: RadixNode) -> int:
        """In nanoseconds of the tree's clock; 0 without a bonus, or when that has passed."""
        return 0 if node.cohort is None else node.cohort.until_ns

    def worth(self, place: int) -> float:
        return self.model.worth(*divmod(place, NUM_BINS))

    # ------------------------------------------------------------ requests

    def began(self, node: RadixNode, clock_ns: int) -> Visit:
        """A request has found the path to ``node``."""
        self.clock_ns = clock_ns
        if self._start_ns is None:
            self._start_ns = clock_ns
        while self._retained and self._retained[0][0] <= clock_ns:
            until_ns, _, cohort = heapq.heappop(self._retained)
            cohort.until_ns = 0
            # As if it had been used then: before whatever comes now.
            cohort.seen = self.now - max(1, self._blocks_in(clock_ns - until_ns))
        return Visit(self.now, node.start + node.num_blocks, node.cohort)

    def ended(self, visit: Visit, node: RadixNode, hashes_of: HashesOf, bonus_ns: int) -> None:
        """The request of ``visit`` is done with the path to ``node``, which may be longer now."""
        end = node.start + node.num_blocks
        path = []
        step: RadixNode | None = node
        while step is not None and step.parent is not None:
            path.append(step)
            step = step.parent
        for step in path:
            self.guard.count(hashes_of(step), _num_present(step, visit))
            self._leave_cohort(step, visit)
        if self.guard.finish():
            self.version += 1
        before, num_known = self._predecessor(visit, path, hashes_of)
        is_private = before is not None and before.kind < NUM_PRIVATE
        is_next = before is not None and is_private and num_known >= before.end - 1
        turn = before.turn + 1 if before is not None and is_next else 0
        origin = min(turn, _MAX_TURN) if is_next or not is_private else _BRANCHED
        size = min(max(end - num_known - 1, 0).bit_length(), NUM_SIZES - 1)
        self._join_cohorts(path, origin * NUM_SIZES + size, turn, end, bonus_ns, is_next)
        if before is not None and is_next and all(step.cohort is not before for step in path):
            # What is left of it is the end that the next turn has not taken up.
            before.kind = SUPERSEDED
        self.now += end
        self._num_requests += 1
        if (
            self._num_requests >= self.REFRESH_REQUESTS
            and self.now - self._refreshed_at >= self.step
        ):
            self._refresh()

    def _leave_cohort(self, node: RadixNode, visit: Visit) -> None:
        cohort = node.cohort
        if cohort is not None:
            if node.start < visit.num_blocks:
                age = max(0, visit.seen - cohort.seen)
                self.model.count_reuse(cohort.kind, age, node.num_blocks / cohort.size)
            cohort.num_blocks -= node.num_blocks

    def _predecessor(
        self, visit: Visit, path: list[RadixNode], hashes_of: HashesOf
    ) -> tuple[Cohort | None, int]:
        """The cohort at the deepest block of the path that was ever seen, as far as that is
        remembered, and the number of blocks up to there."""
        before, num_known = visit.cohort, visit.num_blocks
        start: int | None = num_known
        while start is not None:
            hit = next((n for n in path if n.start <= start < n.start + n.num_blocks), None)
            ghost = None
            if hit is not None:
                first = (start - hit.start) * HASH_BYTES
                ghost = self._ghosts.pop(hashes_of(hit)[first : first + HASH_BYTES], None)
            if ghost is None:
                break
            age = max(0, visit.seen - ghost.seen)
            self.model.count_reuse(ghost.kind, age, ghost.num_gone / ghost.size)
            start = ghost.below.ghost_start if ghost.below and ghost.below.ghost else None
            before, num_known = ghost, max(num_known, ghost.end - 1)
            self._forget_ghost(ghost)
        return before, num_known

    def _join_cohorts(
        self,
        path: list[RadixNode],
        kind: int,
        turn: int,
        end: int,
        bonus_ns: int,
        is_next: bool,
    ) -> None:
        """Give the nodes of ``path``, the last first, the cohorts of the request that ended."""
        until_ns = self.clock_ns + bonus_ns if bonus_ns > 0 else 0
        seen = self.now - self._blocks_in(-bonus_ns) if bonus_ns < 0 else self.now
        cohort: Cohort | None = None
        for node in path:
            old = node.cohort
            if old is not None and (old.until_ns > max(until_ns, self.clock_ns) or old.seen > seen):
                old.num_blocks += node.num_blocks  # a later use takes nothing away
                continue
            mine = kind
            was_shared = old is not None and NUM_PRIVATE <= old.kind < SUPERSEDED
            is_branching = node.children is not None and len(node.children) > 1 and not is_next
            if was_shared or is_branching:
                mine = NUM_PRIVATE + min(node.num_hits.bit_length(), SUPERSEDED - NUM_PRIVATE - 1)
            if cohort is None or cohort.kind != mine:
                above = Cohort(mine, seen, turn, end, until_ns)
                above.below = cohort
                cohort = above
                self._aging[0].append(cohort)
                if until_ns:
                    self._num_retained += 1
                    heapq.heappush(self._retained, (until_ns, self._num_retained, cohort))
            cohort.num_blocks += node.num_blocks
            cohort.size += node.num_blocks
            node.cohort = cohort

    def _blocks_in(self, duration_ns: int) -> int:
        """How many blocks requests ask for in that time, by what they did so far."""
        assert self._start_ns is not None
        return duration_ns * self.now // max(1, self.clock_ns - self._start_ns)

    # ------------------------------------------------------------ eviction

    def left(self, node: RadixNode, first: int, first_hash: bytes) -> None:
        """The blocks from ``first`` of the edge on, beginning with that hash, are in no tier now.

        What one request used leaves from its end, so one hash per cohort stands for all of it.
        A partly filled block has no hash to be known by (b""), and is only counted out.
        """
        cohort = node.cohort
        if cohort is None:
            return
        num_blocks = node.num_blocks - first
        if not first_hash:
            cohort.num_blocks -= num_blocks
            return
        cohort.num_gone += num_blocks
        if cohort.ghost is not None:
            if cohort.ghost_start <= node.start + first:
                return  # a whole subtree goes, its parents first
            self._ghosts.pop(cohort.ghost, None)
        elif len(self._ghosts) >= self.max_ghosts:
            self._forget_ghost(self._ghosts.pop(next(iter(self._ghosts))))
        other = self._ghosts.pop(first_hash, None)
        if other is not None:
            self._forget_ghost(other)
        self._ghosts[first_hash] = cohort
        cohort.ghost, cohort.ghost_start = first_hash, node.start + first

    def _forget_ghost(self, ghost: Cohort) -> None:
        ghost.num_blocks -= ghost.num_gone
        ghost.num_gone = 0
        ghost.ghost = None

    # ------------------------------------------------------------ learning

    def _refresh(self) -> None:
        for number, cohorts in enumerate(self._aging[:-1]):
            while cohorts:
                cohort = cohorts[0]
                current = bin_of(self.now - cohort.seen)
                if current == number and cohort.num_blocks > 0:
                    break
                cohorts.popleft()
                if cohort.num_blocks > 0 and current < number:
                    self._aging[current].append(cohort)  # it counts from anew
                elif cohort.num_blocks > 0:
                    self.model.count_survival(cohort.kind, number, cohort.num_blocks / cohort.size)
                    self._aging[number + 1].append(cohort)
        self.model.refresh(self._num_requests)
        self._num_requests = 0
        self._refreshed_at = self.now
        self.version += 1


def _num_present(node: RadixNode, visit: Visit) -> int:
    """How many blocks of ``node`` were there when the request of ``visit`` came: all, if an earlier
    one has used them, though this one may not have looked so far; and what it has added to them."""
    if node.cohort is None:
        return 0
    found = visit.num_blocks - node.start
    return min(node.num_blocks, found) if found > 0 else node.num_blocks
