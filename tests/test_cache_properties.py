"""Random lives of requests against a model made of dictionaries.

The model keeps, per namespace, the token sequences that were stored, and for each row of each
block the whole prefix whose keys and values a real step would have written there. So a block that
is shared, overwritten, freed or copied wrongly shows up as a row with the wrong prefix. With lower
tiers the same holds of their blocks: transfers copy rows, at any later moment, in any order, and
may fail half-way.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache_store.block_hash import Namespace, hash_blocks
from cache_store.cache import Lease
from cache_store.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CopyEvent,
    CopyStored,
    Tier,
)
from cache_store.eviction import EVICTION_POLICIES, make_eviction_policy
from cache_store.load_planner import LoadPlanner
from cache_store.prefix_cache import PrefixCache
from cache_store.tenant_shares import TenantLimits
from cache_store.transfer import TransferOrder, TransferResult
from cache_store.transfer_desk import LowerTiers

NAMESPACES = (Namespace("f"), Namespace("f", cache_salt="s"))
NAMESPACE_CHOICE = st.sampled_from((*NAMESPACES, NAMESPACES[0]))
TOKEN_LISTS = st.lists(st.integers(0, 1), min_size=4, max_size=14)
INDICES = st.integers(0, 9)
TENANTS = ("a", "b", "")
Prefix = tuple[int, ...]


@dataclass(eq=False)
class Run:
    """A request of the model: its tokens and how far they were computed."""

    lease: Lease
    ids: list[int]
    num_computed: int = 0
    is_admitted: bool = False

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


class RowMover:
    """Carries transfers out on the model's rows, when the machine says so."""

    def __init__(self, rows: dict[Tier, dict[tuple[int, int], Prefix]], block_size: int) -> None:
        self.rows = rows
        self.block_size = block_size
        self.orders: list[TransferOrder] = []
        self.results: list[TransferResult] = []

    def submit(self, order: TransferOrder) -> None:
        assert len(order.source_ids) == len(order.target_ids) > 0
        self.orders.append(order)

    def delete(self, tier: Tier, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            for row in range(self.block_size):
                self.rows[tier].pop((block_id, row), None)

    def run(self, index: int, num_done: int | None) -> None:
        order = self.orders.pop(index % len(self.orders))
        count = len(order.source_ids) if num_done is None else min(num_done, len(order.source_ids))
        source, target = self.rows[order.source], self.rows[order.target]
        for number in range(count):
            for row in range(self.block_size):
                value = source.get((order.source_ids[number], row), ())
                target[order.target_ids[number], row] = value
            if order.keys:
                self.check_key(order, number)
        self.results.append(TransferResult(order.number, count, 0.001))

    def check_key(self, order: TransferOrder, number: int) -> None:
        key = order.keys[number]
        num_rows = len(key.tokens) // 4
        last = self.rows[order.source][order.source_ids[number], num_rows - 1]
        tokens = np.frombuffer(key.tokens, dtype=">u4")
        assert last[-num_rows:] == tuple(tokens)
        before = np.array(last[:-num_rows], dtype=np.int32)
        roots = {namespace.root_hash: namespace for namespace in NAMESPACES}
        hashes = hash_blocks(roots[key.root_hash], before, self.block_size)
        assert key.parent_hash == ([key.root_hash, *hashes])[-1]

    def take_results(self) -> list[TransferResult]:
        results, self.results = self.results, []
        return results

    def close(self) -> None:
        pass


LOWER: tuple[dict[Tier, int], ...] = (
    {},
    {Tier.HOST: 12},
    {Tier.HOST: 100},
    {Tier.DISK: 12},
    {Tier.HOST: 6, Tier.DISK: 20},
    {Tier.HOST: 2, Tier.DISK: 3},
)


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.sampled_from((200, 24, 8, 4)),
        block_size=st.integers(1, 4),
        policy=st.sampled_from(EVICTION_POLICIES),
        lower=st.sampled_from(LOWER),
        write_blocks=st.sampled_from((1, 3, 64)),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        policy: str,
        lower: dict[Tier, int],
        write_blocks: int,
    ) -> None:
        self.block_size = block_size
        self.copies: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}
        tier_rows: dict[Tier, dict[tuple[int, int], Prefix]] = {tier: {} for tier in Tier}
        self.mover = RowMover(tier_rows, block_size)
        self.time = 0.0
        planner = LoadPlanner(block_size, lambda: None, lambda: self.time)
        tiers = LowerTiers(lower, self.mover, planner, lambda: self.time, write_blocks)
        self.cache = PrefixCache(
            num_blocks,
            block_size,
            make_eviction_policy(policy),
            tiers if lower else None,
            has_events=True,
            on_copy=self.hear,
        )
        self.stored: dict[Namespace, set[Prefix]] = {namespace: set() for namespace in NAMESPACES}
        self.rows = tier_rows[Tier.DEVICE]
        self.runs: list[Run] = []
        self.failed: list[Run] = []  # that lost blocks, and hold what they hold for a while yet
        self.was_dropped = False  # from then on the model only bounds the match from above

    # ------------------------------------------------------------ the model

    def slot(self, run: Run, position: int) -> tuple[int, int]:
        return run.lease.block_ids[position // self.block_size], position % self.block_size

    def expected_match(self, namespace: Namespace, ids: list[int]) -> int:
        return max((num_common(tuple(ids), each) for each in self.stored[namespace]), default=0)

    def check_rows(self, run: Run, num_tokens: int) -> None:
        for position in range(num_tokens):
            assert self.rows[self.slot(run, position)] == tuple(run.ids[: position + 1])

    # ------------------------------------------------------------ what requests do

    def begin(self, namespace: Namespace, ids: list[int]) -> Run:
        match = self.cache.match(namespace, np.array(ids, dtype=np.int32))
        tenant = TENANTS[(sum(ids) + len(self.runs)) % len(TENANTS)]
        run = Run(self.cache.acquire(match, 0.0, tenant), list(ids))
        assert run.lease.num_cached_tokens == match.num_tokens
        self.check_rows(run, match.num_device_tokens)
        self.runs.append(run)
        return run

    def grow(self, run: Run, num_tokens: int, num_lookahead: int = 0) -> bool:
        before, table = self.cache.stats(), list(run.lease.block_ids)
        if not self.cache.allocate(run.lease, num_tokens, num_lookahead):
            assert before.tiers or self.cache.stats() == before
            assert run.lease.block_ids == table
            return False
        assert run.lease.block_ids[: len(table)] == table
        assert len(run.lease.block_ids) * self.block_size >= num_tokens + num_lookahead
        return True

    def compute(self, run: Run, end: int) -> None:
        """One step: the row copy if there is one, then the rows up to ``end``."""
        assert self.is_ready(run)
        copy = run.lease.pending_copy
        if copy is not None:
            for row in range(copy.num_rows):
                self.rows[copy.target_block_id, row] = self.rows[copy.source_block_id, row]
            self.cache.copied(run.lease)
        if not run.is_admitted:
            run.is_admitted = True
            run.num_computed = run.lease.num_cached_tokens
            self.check_rows(run, run.num_computed)
        for position in range(run.num_computed, end):
            self.rows[self.slot(run, position)] = tuple(run.ids[: position + 1])
        run.num_computed = max(run.num_computed, end)

    def end(self, run: Run) -> None:
        num_claimed = run.num_computed
        if run.is_admitted:
            self.stored[run.lease.namespace].add(tuple(run.ids[: run.num_computed]))
        elif run.lease.pending_copy is not None:
            num_claimed = run.lease.num_cached_tokens  # the cache has to know better
        self.cache.release(run.lease, run.array, num_claimed)
        (self.runs if run in self.runs else self.failed).remove(run)

    def is_ready(self, run: Run) -> bool:
        return not (run.lease.is_loading or run.lease.has_failed)

    def finish_transfer(self, index: int, num_done: int | None) -> None:
        self.mover.run(index, num_done)
        self.was_dropped |= num_done is not None
        self.cache.advance()
        self.failed += [run for run in self.runs if run.lease.has_failed]
        self.runs = [run for run in self.runs if not run.lease.has_failed]

    def pick(self, index: int) -> Run:
        return self.runs[index % len(self.runs)]

    # ------------------------------------------------------------ rules

    @rule(namespace=NAMESPACE_CHOICE, ids=TOKEN_LISTS)
    def match(self, namespace: Namespace, ids: list[int]) -> None:
        match = self.cache.match(namespace, np.array(ids, dtype=np.int32))
        expected = self.expected_match(namespace, ids)
        stats = self.cache.stats()
        self.was_dropped |= stats.evicted_total > 0
        assert match.num_tokens <= expected if self.was_dropped else match.num_tokens == expected
        num_rows = match.partial.num_rows if match.partial else 0
        assert match.num_tokens == match.num_block_tokens + num_rows
        assert match.num_block_tokens % self.block_size == 0
        assert num_rows < self.block_size
        for row in range(num_rows):
            assert match.partial is not None
            assert match.position is not None
            assert match.position.source is not None
            source, index = match.position.source, 0
            if source is match.position.node:
                index = match.position.num_edge_blocks
            prefix = tuple(ids[: match.num_block_tokens + row + 1])
            block_id = (source.ids_in(match.partial.tier) or [])[index]
            assert self.mover.rows[match.partial.tier][block_id, row] == prefix

    @rule(namespace=NAMESPACE_CHOICE, ids=TOKEN_LISTS)
    def serve(self, namespace: Namespace, ids: list[int]) -> None:
        """A whole request between two steps of the others."""
        run = self.begin(namespace, ids)
        if self.grow(run, len(ids)) and self.is_ready(run):
            self.compute(run, len(ids))
        self.end(run)

    @rule(namespace=NAMESPACE_CHOICE, ids=TOKEN_LISTS)
    def acquire(self, namespace: Namespace, ids: list[int]) -> None:
        self.begin(namespace, ids)

    @precondition(lambda self: self.runs)
    @rule(index=INDICES)
    def acquire_twin(self, index: int) -> None:
        """A second request computes what a running one is computing: duplicates."""
        twin = self.pick(index)
        self.begin(twin.lease.namespace, twin.ids)

    @precondition(lambda self: self.runs)
    @rule(index=INDICES, num_more=st.integers(1, 12), num_lookahead=st.integers(0, 3))
    def allocate(self, index: int, num_more: int, num_lookahead: int) -> None:
        run = self.pick(index)
        self.grow(run, min(len(run.ids), run.num_computed + num_more), num_lookahead)

    @precondition(lambda self: self.runs)
    @rule(index=INDICES, num_more=st.integers(1, 12), commits=st.booleans())
    def step(self, index: int, num_more: int, commits: bool) -> None:
        run = self.pick(index)
        start = run.num_computed if run.is_admitted else run.lease.num_cached_tokens
        end = min(len(run.ids), start + num_more)
        if self.grow(run, end) and self.is_ready(run):
            self.compute(run, end)
            if commits:
                self.do_commit(run)

    @precondition(lambda self: any(run.is_admitted for run in self.runs))
    @rule(index=INDICES, num_known=st.integers(0, 3))
    def commit(self, index: int, num_known: int) -> None:
        """Of the first ``num_known`` blocks the hashes are known, which integrity is held to."""
        admitted = [run for run in self.runs if run.is_admitted]
        run = admitted[index % len(admitted)]
        known = run.array[: num_known * self.block_size]
        run.lease.block_hashes = hash_blocks(run.lease.namespace, known, self.block_size)
        self.do_commit(run)

    def do_commit(self, run: Run) -> None:
        self.cache.commit(run.lease, run.array, run.num_computed)
        num_full = run.num_computed // self.block_size * self.block_size
        self.stored[run.lease.namespace].add(tuple(run.ids[:num_full]))

    @precondition(lambda self: self.runs)
    @rule(index=INDICES, more=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def append(self, index: int, more: list[int]) -> None:
        self.pick(index).ids += more

    @precondition(lambda self: self.runs)
    @rule(index=INDICES, count=st.integers(1, 9))
    def continuation(self, index: int, count: int) -> None:
        """Something stored in this namespace goes on like that; something if anything does."""
        run = self.pick(index)
        found = self.cache.continuation(run.lease, run.array, count).tolist()
        assert len(found) <= count
        stored = self.stored[run.lease.namespace]
        path = (*run.ids, *found)
        self.was_dropped |= self.cache.stats().evicted_total > 0
        if found:
            assert any(each[: len(path)] == path for each in stored)
        elif not self.was_dropped:
            length = len(path)
            assert not any(len(each) > length and each[:length] == path for each in stored)

    @precondition(lambda self: self.runs)
    @rule(index=INDICES)
    def release(self, index: int) -> None:
        """At any moment: before an allocate, before the copy, in the midst of a prompt."""
        self.end(self.pick(index))

    @precondition(lambda self: self.cache.stats().num_evictable > 5)
    @rule()
    def reset(self) -> None:
        before = self.cache.stats()
        dropped = self.cache.reset()
        assert dropped >= before.num_evictable
        if not before.tiers:
            assert dropped == before.num_evictable
        assert self.cache.stats().num_evictable == 0
        self.was_dropped = True

    # ------------------------------------------------------------ tenants

    @rule(
        weight=st.sampled_from((0.1, 1.0, 3.0)),
        tier=st.sampled_from(Tier),
        cap=st.sampled_from((None, 0, 1, 3, 9)),
    )
    def set_tenant_limits(self, weight: float, tier: Tier, cap: int | None) -> None:
        caps = {} if cap is None else {tier: cap}
        self.cache.set_tenant_limits({"a": TenantLimits(weight, caps)})
        # What goes for a cap is no eviction for room, and is not counted as one in every tier.
        self.was_dropped |= cap is not None

    @rule(num_blocks=st.integers(0, 24), tenant=st.sampled_from(TENANTS))
    def has_room(self, num_blocks: int, tenant: str) -> None:
        stats = self.cache.stats()
        fits = num_blocks <= stats.num_free + stats.num_evictable
        assert self.cache.has_room(num_blocks, tenant, at_others_cost=True) == fits
        assert fits or not self.cache.has_room(num_blocks, tenant, at_others_cost=False)
        if num_blocks <= stats.num_free:
            assert self.cache.has_room(num_blocks, tenant, at_others_cost=False)

    # ------------------------------------------------------------ lower tiers

    @precondition(lambda self: self.mover.orders)
    @rule(index=INDICES, num_done=st.sampled_from((None, None, None, 0, 1, 3)))
    def transfer(self, index: int, num_done: int | None) -> None:
        self.finish_transfer(index, num_done)

    @precondition(lambda self: self.failed)
    @rule(index=INDICES)
    def end_failed(self, index: int) -> None:
        self.end(self.failed[index % len(self.failed)])

    @rule()
    def advance(self) -> None:
        self.cache.advance()

    @rule()
    def wait(self) -> None:
        self.time += 20.0

    @rule(namespace=NAMESPACE_CHOICE, ids=TOKEN_LISTS, keep=st.integers(0, 6))
    def act_on_prefix(self, namespace: Namespace, ids: list[int], keep: int) -> None:
        array = np.array(ids, dtype=np.int32)
        before = self.cache.inspect(namespace, array)
        report = self.cache.demote(namespace, array, keep)
        assert replace(report, num_blocks_changed=0, num_blocks_left=0) == before
        self.cache.prefetch(namespace, array)

    @rule(namespace=NAMESPACE_CHOICE, ids=TOKEN_LISTS, keep=st.integers(0, 6))
    def drop(self, namespace: Namespace, ids: list[int], keep: int) -> None:
        array = np.array(ids, dtype=np.int32)
        self.was_dropped = True
        report = self.cache.drop(namespace, array, keep)
        again = self.cache.drop(namespace, array, keep)
        assert again.num_blocks_changed == 0
        assert again.num_blocks_left <= report.num_blocks_left

    # ------------------------------------------------------------ always

    @invariant()
    def every_block_has_one_owner(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check_integrity([run.lease for run in (*self.runs, *self.failed)])

    @invariant()
    def rows_of_running_requests_are_theirs(self) -> None:
        for run in getattr(self, "runs", []):
            self.check_rows(run, run.num_computed if run.is_admitted else 0)

    @invariant()
    def events_tell_what_is_stored(self) -> None:
        if not hasattr(self, "cache"):
            return
        told: dict[bytes, Tier] = getattr(self, "told", {})
        for events in (self.cache.take_events(), None):
            known = told if events is not None else {}
            for event in self.cache.snapshot() if events is None else events:
                match event:
                    case AllBlocksCleared():
                        known.clear()
                    case BlockStored(tier, hashes):
                        known |= {hashes[i : i + 16]: tier for i in range(0, len(hashes), 16)}
                    case BlockRemoved(hashes):
                        for i in range(0, len(hashes), 16):
                            known.pop(hashes[i : i + 16], None)
            if events is None:
                assert known == told
        self.told = told

    def hear(self, event: CopyEvent) -> None:
        joined = event.block_hashes
        hashes = {joined[i : i + 16] for i in range(0, len(joined), 16)}
        held = self.copies[event.tier]
        if isinstance(event, CopyStored):
            assert not hashes & held
            assert event.parent_hash == b"" or any(
                event.parent_hash in each for each in self.copies.values()
            )
            held |= hashes
        else:
            assert hashes <= held
            held -= hashes

    @invariant()
    def copies_told_of_are_those_of_the_tree(self) -> None:
        if not hasattr(self, "cache"):
            return
        residency = self.cache._tree.residency
        found: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}
        for node in self.cache._tree.nodes():
            for tier in Tier:
                ids = node.ids_in(tier)
                if ids is not None and len(node.tokens) >= self.block_size * 4:
                    found[tier] |= {residency.block_hash(tier, block_id) for block_id in ids}
        assert found == self.copies

    def teardown(self) -> None:
        for run in [*getattr(self, "runs", []), *getattr(self, "failed", [])]:
            self.cache.release(run.lease, run.array, run.num_computed)
        if hasattr(self, "cache"):
            self.runs.clear()
            self.failed.clear()
            for _ in range(1000):
                if not self.mover.orders:
                    break
                self.finish_transfer(0, None)
            self.cache.check_integrity([])
            assert self.cache.stats().num_locked == 0
            assert not self.cache.has_transfers


CacheMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, print_blob=True
)
TestCacheProperties = CacheMachine.TestCase
