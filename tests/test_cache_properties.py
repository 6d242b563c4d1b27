"""Random lives of requests against a model made of dictionaries.

The model keeps, per namespace, the token sequences that were stored, and for each row of each
block the whole prefix whose keys and values a real step would have written there. So a block that
is shared, overwritten, freed or copied wrongly shows up as a row with the wrong prefix.
"""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache_store.block_hash import Namespace
from cache_store.cache import Lease
from cache_store.eviction import EVICTION_POLICIES, make_eviction_policy
from cache_store.prefix_cache import PrefixCache

NAMESPACES = (Namespace("f"), Namespace("f", cache_salt="s"))
TOKEN_LISTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
Prefix = tuple[int, ...]


@dataclass(eq=False)
class Run:
    """A request of the model: its tokens and how far they were computed."""

    lease: Lease
    ids: list[int]
    num_computed: int = 0
    is_admitted: bool = False
    committed: list[Prefix] = field(default_factory=list)

    @property
    def array(self) -> np.ndarray:
        return np.array(self.ids, dtype=np.int32)


def num_common(left: Prefix, right: Prefix) -> int:
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(2, 24),
        block_size=st.integers(1, 4),
        policy=st.sampled_from(EVICTION_POLICIES),
    )
    def start(self, num_blocks: int, block_size: int, policy: str) -> None:
        self.block_size = block_size
        self.cache = PrefixCache(num_blocks, block_size, make_eviction_policy(policy))
        self.stored: dict[Namespace, set[Prefix]] = {namespace: set() for namespace in NAMESPACES}
        self.rows: dict[tuple[int, int], Prefix] = {}
        self.runs: list[Run] = []
        self.was_dropped = False  # from then on the model only bounds the match from above

    # ------------------------------------------------------------ the model

    def slot(self, run: Run, position: int) -> tuple[int, int]:
        return run.lease.block_ids[position // self.block_size], position % self.block_size

    def expected_match(self, namespace: Namespace, ids: list[int]) -> int:
        return max((num_common(tuple(ids), each) for each in self.stored[namespace]), default=0)

    def check_rows(self, run: Run, num_tokens: int) -> None:
        for position in range(num_tokens):
            assert self.rows[self.slot(run, position)] == tuple(run.ids[: position + 1])

    def note_drops(self) -> None:
        self.was_dropped |= self.cache.stats().evicted_total > 0

    def store(self, run: Run, num_tokens: int) -> None:
        self.stored[run.lease.namespace].add(tuple(run.ids[:num_tokens]))

    # ------------------------------------------------------------ rules

    @rule(namespace=st.sampled_from(NAMESPACES), ids=TOKEN_LISTS)
    def match(self, namespace: Namespace, ids: list[int]) -> None:
        match = self.cache.match(namespace, np.array(ids, dtype=np.int32))
        expected = self.expected_match(namespace, ids)
        assert match.num_tokens <= expected if self.was_dropped else match.num_tokens == expected
        num_rows = match.partial.num_rows if match.partial else 0
        assert match.num_tokens == match.num_block_tokens + num_rows
        assert match.num_block_tokens % self.block_size == 0
        assert num_rows < self.block_size
        if match.partial:
            for row in range(num_rows):
                prefix = tuple(ids[: match.num_block_tokens + row + 1])
                assert self.rows[match.partial.block_id, row] == prefix

    @rule(namespace=st.sampled_from(NAMESPACES), ids=TOKEN_LISTS)
    def acquire(self, namespace: Namespace, ids: list[int]) -> None:
        match = self.cache.match(namespace, np.array(ids, dtype=np.int32))
        run = Run(self.cache.acquire(match), list(ids))
        assert run.lease.num_cached_tokens == match.num_tokens
        self.check_rows(run, match.num_block_tokens)
        self.runs.append(run)

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), num_more=st.integers(0, 8), num_lookahead=st.integers(0, 3))
    def allocate(self, data: st.DataObject, num_more: int, num_lookahead: int) -> None:
        run = data.draw(st.sampled_from(self.runs))
        before, table = self.cache.stats(), list(run.lease.block_ids)
        num_tokens = min(len(run.ids), max(run.num_computed, 1) + num_more)
        if not self.cache.allocate(run.lease, num_tokens, num_lookahead):
            assert self.cache.stats() == before
            assert run.lease.block_ids == table
            return
        assert run.lease.block_ids[: len(table)] == table
        assert len(run.lease.block_ids) * self.block_size >= num_tokens + num_lookahead
        self.note_drops()

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        """A step: the row copy, then new rows as far as there are blocks."""
        run = data.draw(st.sampled_from(self.runs))
        lease, block_size = run.lease, self.block_size
        num_slots = min(len(run.ids), len(lease.block_ids) * block_size)
        copy = lease.pending_copy
        if copy is not None:
            for row in range(copy.num_rows):
                self.rows[copy.target_block_id, row] = self.rows[copy.source_block_id, row]
            self.cache.copied(lease)
        if not run.is_admitted:
            if copy is None and lease.num_cached_tokens > len(lease.block_ids) * block_size:
                return  # its first own block is still missing
            if copy is None and lease.num_cached_tokens % block_size:
                return
            run.is_admitted = True
            run.num_computed = lease.num_cached_tokens
            self.check_rows(run, run.num_computed)
        end = data.draw(st.integers(run.num_computed, max(run.num_computed, num_slots)))
        for position in range(run.num_computed, end):
            self.rows[self.slot(run, position)] = tuple(run.ids[: position + 1])
        run.num_computed = end

    @precondition(lambda self: any(run.is_admitted for run in self.runs))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from([run for run in self.runs if run.is_admitted]))
        self.cache.commit(run.lease, run.array, run.num_computed)
        self.store(run, run.num_computed // self.block_size * self.block_size)

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.runs))
        run.ids += data.draw(st.lists(st.integers(0, 1), max_size=3))

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """At any moment: before an allocate, before the copy, in the midst of a prompt."""
        run = data.draw(st.sampled_from(self.runs))
        num_claimed = run.num_computed if run.is_admitted else 0
        if run.lease.pending_copy is not None:
            num_claimed = run.lease.num_cached_tokens  # the cache has to know better
        elif run.is_admitted:
            self.store(run, run.num_computed)
        self.cache.release(run.lease, run.array, num_claimed)
        self.runs.remove(run)

    @rule()
    def reset(self) -> None:
        num_evictable = self.cache.stats().num_evictable
        assert self.cache.reset() == num_evictable
        assert self.cache.stats().num_evictable == 0
        self.was_dropped |= num_evictable > 0

    # ------------------------------------------------------------ always

    @invariant()
    def every_block_has_one_owner(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check_integrity([run.lease for run in self.runs])

    @invariant()
    def rows_of_running_requests_are_theirs(self) -> None:
        for run in getattr(self, "runs", []):
            self.check_rows(run, run.num_computed if run.is_admitted else 0)

    def teardown(self) -> None:
        for run in getattr(self, "runs", []):
            self.cache.release(run.lease, run.array, run.num_computed)
        if hasattr(self, "cache"):
            self.cache.check_integrity([])
            assert self.cache.stats().num_locked == 0


CacheMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, print_blob=True
)
TestCacheProperties = CacheMachine.TestCase
