import numpy as np
import pytest

from cache_store.block_hash import Namespace, hash_blocks
from cache_store.block_pool import BlockPool
from cache_store.events import Tier
from cache_store.eviction import make_eviction_policy
from cache_store.integrity import check_tree
from cache_store.prefix_match import LockedPrefix, PartialBlock, PrefixMatch
from cache_store.radix_node import ChildList
from cache_store.radix_tree import RadixTree
from cache_store.tenant_shares import TenantShare
from cache_store.tier_manager import TierManager
from cache_store.token_bytes import encode_tokens

BLOCK_SIZE = 4
NAMESPACE = Namespace("f")


def make_tree(
    policy: str = "lru", block_size: int = BLOCK_SIZE, num_blocks: int = 1000
) -> RadixTree:
    return RadixTree({Tier.DEVICE: num_blocks}, block_size, make_eviction_policy(policy))


def nobody(tree: RadixTree) -> TenantShare:
    return tree.residency.shares.nobody


def evict(tree: RadixTree, num_blocks: int) -> list[int]:
    """What goes when that many blocks are asked for, in the order of the ids."""
    pool = BlockPool(6000)
    pool.allocate(6000)
    TierManager(tree, pool, None).make_room(Tier.DEVICE, num_blocks)
    return [
        block_id for start, length in pool.free_runs() for block_id in range(start, start + length)
    ]


def acquire(tree: RadixTree, match: PrefixMatch) -> LockedPrefix:
    return tree.acquire(tree.current(match))


def source_ids(match: PrefixMatch) -> list[int]:
    assert match.position is not None
    assert match.position.source is not None
    return list(match.position.source.block_ids or ())


def block_ids(prefix: LockedPrefix) -> list[int]:
    return [block_id for node in prefix.path for block_id in node.block_ids or ()]


def tokens(*runs: object) -> np.ndarray:
    """Token ids from ints and ranges, in order."""
    ids: list[int] = []
    for run in runs:
        ids.extend([run] if isinstance(run, int) else run)  # type: ignore[call-overload]
    return np.array(ids, dtype=np.int32)


class Filler:
    """Stores prompts in a tree as a request would, with block ids in the order of asking."""

    def __init__(self, tree: RadixTree, namespace: Namespace = NAMESPACE) -> None:
        self.tree = tree
        self.namespace = namespace
        self.next_block_id = 0
        self.dropped: list[int] = []
        self.duplicates: list[int] = []

    def store(self, ids: np.ndarray) -> None:
        tree = self.tree
        prefix = acquire(tree, tree.match_prefix(self.namespace, ids))
        if prefix.source is not None:
            tree.unlock(prefix.source)  # as if its rows had been copied
        start = len(block_ids(prefix)) * tree.block_size
        full = len(ids) // tree.block_size * tree.block_size
        count = (full - start) // tree.block_size
        insertion = tree.insert(
            prefix.node, encode_tokens(ids[start:full]), self.take(count), nobody(tree)
        )
        end = insertion.node
        self.duplicates += insertion.duplicates
        if len(ids) > full:
            rest = tree.insert_partial(
                end, encode_tokens(ids[full:]), self.take(1)[0], nobody(tree)
            )
            self.duplicates += rest.duplicates
            tree.touch(rest.node)
        else:
            tree.touch(end)
        tree.unlock(end)
        self.dropped += tree.residency.take_given_up(Tier.DEVICE)

    def take(self, count: int) -> list[int]:
        self.next_block_id += count
        return list(range(self.next_block_id - count, self.next_block_id))


def num_matched(tree: RadixTree, ids: np.ndarray, namespace: Namespace = NAMESPACE) -> int:
    return tree.match_prefix(namespace, ids).num_tokens


def test_an_empty_tree_matches_nothing() -> None:
    tree = make_tree()
    match = tree.match_prefix(NAMESPACE, tokens(range(8)))
    assert (match.num_tokens, match.num_block_tokens, match.partial) == (0, 0, None)
    assert tree.roots == {}


@pytest.mark.parametrize("length", range(13))
def test_a_request_may_end_anywhere_in_an_edge(length: int) -> None:
    tree = make_tree()
    Filler(tree).store(tokens(range(12)))
    match = tree.match_prefix(NAMESPACE, tokens(range(length)))
    assert match.num_tokens == length
    assert match.num_block_tokens == length // 4 * 4
    expected = PartialBlock(length % 4, Tier.DEVICE) if length % 4 else None
    assert match.partial == expected


@pytest.mark.parametrize("common", range(13))
def test_a_request_may_diverge_anywhere_in_an_edge(common: int) -> None:
    tree = make_tree()
    Filler(tree).store(tokens(range(12)))
    match = tree.match_prefix(NAMESPACE, tokens(range(common), 99, 99, 99, 99, 99))
    assert match.num_tokens == common
    assert match.num_block_tokens == common // 4 * 4


@pytest.mark.parametrize("common", range(13))
def test_storing_after_a_divergence_keeps_both(common: int) -> None:
    tree = make_tree()
    filler = Filler(tree)
    first, second = tokens(range(12)), tokens(range(common), range(100, 112))
    filler.store(first)
    filler.store(second)
    check_tree(tree, {})
    assert num_matched(tree, first) == 12
    assert num_matched(tree, second) == 12 + common


def test_the_partial_block_comes_from_the_child_with_most_rows_in_common() -> None:
    tree = make_tree()
    filler = Filler(tree)
    head = range(4)
    for tail in ((10, 10, 10, 10), (10, 20, 30, 40), (10, 20, 31, 0), (11, 0, 0, 0)):
        filler.store(tokens(head, tail))
    match = tree.match_prefix(NAMESPACE, tokens(head, 10, 20, 31, 7))
    assert match.partial == PartialBlock(3, Tier.DEVICE)
    assert source_ids(match) == [3]
    match = tree.match_prefix(NAMESPACE, tokens(head, 10, 20, 30, 99))
    assert match.partial == PartialBlock(3, Tier.DEVICE)
    assert source_ids(match) == [2]
    assert tree.match_prefix(NAMESPACE, tokens(head, 12)).partial is None


def test_acquire_locks_exactly_what_matched() -> None:
    tree = make_tree()
    Filler(tree).store(tokens(range(20)))
    prefix = acquire(tree, tree.match_prefix(NAMESPACE, tokens(range(10), 99)))
    assert block_ids(prefix) == [0, 1]
    assert prefix.source is not None
    assert (list(prefix.source.block_ids or ()), prefix.num_rows) == ([2], 2)
    assert tree.residency.num_evictable == 2
    check_tree(tree, {prefix.node: 1, prefix.source: 1})
    assert evict(tree, 10) == [3, 4]
    tree.unlock(prefix.source)
    assert evict(tree, 10) == [2]
    tree.unlock(prefix.node)
    assert evict(tree, 10) == [0, 1]
    assert tree.roots == {}


def test_an_outdated_match_is_made_afresh() -> None:
    tree = make_tree()
    filler = Filler(tree)
    ids = tokens(range(12))
    before = tree.match_prefix(NAMESPACE, ids)
    filler.store(ids)
    longer = acquire(tree, before)
    assert block_ids(longer) == [0, 1, 2]
    tree.unlock(longer.node)
    match = tree.match_prefix(NAMESPACE, ids)
    assert evict(tree, 1) == [2]
    assert block_ids(acquire(tree, match)) == [0, 1]


def test_a_split_keeps_the_original_node_as_the_lower_part() -> None:
    tree = make_tree()
    Filler(tree).store(tokens(range(12)))
    lower = acquire(tree, tree.match_prefix(NAMESPACE, tokens(range(12)))).node
    upper = acquire(tree, tree.match_prefix(NAMESPACE, tokens(range(4)))).node
    assert lower.parent is upper
    assert (upper.lock_ref, lower.lock_ref) == (2, 1)
    assert (list(upper.block_ids or ()), list(lower.block_ids or ())) == ([0], [1, 2])
    check_tree(tree, {lower: 1, upper: 1})


def test_what_is_stored_already_comes_back_as_duplicates() -> None:
    tree = make_tree()
    ids = tokens(range(12))
    first = acquire(tree, tree.match_prefix(NAMESPACE, ids)).node
    second = acquire(tree, tree.match_prefix(NAMESPACE, ids)).node
    assert first is second
    stored = tree.insert(first, encode_tokens(ids[:8]), [0, 1], nobody(tree))
    assert stored.duplicates == []
    late = tree.insert(second, encode_tokens(ids), [5, 6, 7], nobody(tree))
    assert late.duplicates == [5, 6]
    assert tree.match_prefix(NAMESPACE, ids).num_tokens == 12
    check_tree(tree, {stored.node: 1, late.node: 1})
    tree.unlock(late.node)
    assert evict(tree, 9) == [7]


def test_a_growing_answer_stays_one_edge() -> None:
    tree = make_tree()
    ids = tokens(range(16))
    node = acquire(tree, tree.match_prefix(NAMESPACE, ids)).node
    ends = []
    for block_id in range(4):
        encoded = encode_tokens(ids[4 * block_id : 4 * block_id + 4])
        node = tree.insert(node, encoded, [block_id], nobody(tree)).node
        ends.append(node)
        check_tree(tree, {node: 1})
    assert len(set(ends)) == 1
    assert list(node.block_ids or ()) == [0, 1, 2, 3]


def test_an_edge_that_others_hold_or_hit_is_not_grown() -> None:
    tree = make_tree()
    ids = tokens(range(12))
    root = acquire(tree, tree.match_prefix(NAMESPACE, ids)).node
    node = tree.insert(root, encode_tokens(ids[:4]), [0], nobody(tree)).node
    other = acquire(tree, tree.match_prefix(NAMESPACE, ids)).node
    assert other is node
    longer = tree.insert(node, encode_tokens(ids[4:8]), [1], nobody(tree)).node
    assert longer is not node
    assert list(other.block_ids or ()) == [0]
    check_tree(tree, {other: 1, longer: 1})


def test_blocks_keep_the_hashes_that_the_gateway_computes() -> None:
    tree = make_tree()
    filler = Filler(tree)
    first, second = tokens(range(12)), tokens(range(6), range(50, 60))
    filler.store(first)
    filler.store(second)
    hashes = hash_blocks(NAMESPACE, second, BLOCK_SIZE)
    assert [tree.residency.block_hash(Tier.DEVICE, block_id) for block_id in (0, 3, 4, 5)] == list(
        hashes
    )


# ---------------------------------------------------------------- partly filled blocks


def test_a_partial_leaf_serves_its_rows() -> None:
    tree = make_tree()
    Filler(tree).store(tokens(range(6)))
    match = tree.match_prefix(NAMESPACE, tokens(range(8)))
    assert (match.num_block_tokens, match.partial) == (4, PartialBlock(2, Tier.DEVICE))
    assert tree.match_prefix(NAMESPACE, tokens(range(5))).partial == PartialBlock(1, Tier.DEVICE)


def test_a_longer_block_replaces_a_partial_leaf() -> None:
    tree = make_tree()
    filler = Filler(tree)
    filler.store(tokens(range(6)))
    filler.store(tokens(range(7)))
    assert (filler.dropped, tree.residency.num_cached[Tier.DEVICE]) == ([1], 2)
    filler.store(tokens(range(8)))
    assert (filler.dropped, tree.residency.num_cached[Tier.DEVICE]) == ([1, 2], 2)
    check_tree(tree, {})
    assert tree.match_prefix(NAMESPACE, tokens(range(8))).num_block_tokens == 8


def test_a_partial_block_that_is_stored_already_comes_back() -> None:
    tree = make_tree()
    filler = Filler(tree)
    filler.store(tokens(range(8)))
    filler.store(tokens(range(6)))
    assert (filler.duplicates, tree.residency.num_cached[Tier.DEVICE]) == ([2], 2)


def test_a_locked_partial_leaf_is_not_dropped() -> None:
    tree = make_tree()
    filler = Filler(tree)
    filler.store(tokens(range(6)))
    held = acquire(tree, tree.match_prefix(NAMESPACE, tokens(range(6), 99)))
    assert held.source is not None
    filler.store(tokens(range(8)))
    assert filler.dropped == []
    check_tree(tree, {held.node: 1, held.source: 1})
    tree.unlock(held.source)
    tree.unlock(held.node)
    assert sorted(evict(tree, 9)) == [0, 1, 2]


# ---------------------------------------------------------------- eviction


def test_tails_go_first_and_only_as_many_as_are_asked_for() -> None:
    tree = make_tree()
    Filler(tree).store(tokens(range(20)))
    assert evict(tree, 2) == [3, 4]
    check_tree(tree, {})
    assert num_matched(tree, tokens(range(20))) == 12
    assert evict(tree, 0) == []
    assert evict(tree, 100) == [0, 1, 2]
    assert (tree.residency.num_cached[Tier.DEVICE], tree.residency.num_evictable, tree.roots) == (
        0,
        0,
        {},
    )


def test_a_hit_path_is_touched_from_leaf_to_root() -> None:
    """The older path loses its whole tail before the newer loses anything."""
    tree = make_tree()
    filler = Filler(tree)
    head = range(4)
    filler.store(tokens(head, range(10, 18)))  # blocks 0, 1, 2
    filler.store(tokens(head, range(20, 28)))  # blocks 3, 4
    filler.store(tokens(head, range(10, 18)))  # hit
    order = [evict(tree, 1)[0] for _ in range(5)]
    assert order == [4, 3, 2, 1, 0]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("lru", [1, 0, 2]), ("lfu", [2, 1, 0]), ("fifo", [0, 1, 2])],
)
def test_policies_order_whole_prompts(policy: str, expected: list[int]) -> None:
    tree = make_tree(policy)
    filler = Filler(tree)
    prompts = [tokens(range(start, start + 4)) for start in (0, 10, 20)]
    for number in (0, 1, 0, 1, 0, 2):
        filler.store(prompts[number])
    assert [evict(tree, 1)[0] for _ in range(3)] == expected


def test_namespaces_do_not_see_each_other() -> None:
    tree = make_tree()
    salted = Namespace("f", cache_salt="s")
    Filler(tree).store(tokens(range(8)))
    assert num_matched(tree, tokens(range(8)), salted) == 0
    held = acquire(tree, tree.match_prefix(salted, tokens(range(8))))
    assert set(tree.roots) == {NAMESPACE.root_hash, salted.root_hash}
    tree.unlock(held.node)
    assert set(tree.roots) == {NAMESPACE.root_hash}


def test_unlocking_more_than_was_locked_is_an_error() -> None:
    tree = make_tree()
    Filler(tree).store(tokens(range(4)))
    node = acquire(tree, tree.match_prefix(NAMESPACE, tokens(range(4)))).node
    tree.unlock(node)
    with pytest.raises(AssertionError, match="unlocked more often"):
        tree.unlock(node)


# ---------------------------------------------------------------- many siblings


def test_many_continuations_of_one_prompt() -> None:
    tree = make_tree(num_blocks=6000)
    filler = Filler(tree)
    rng = np.random.default_rng(1)
    tails = rng.permutation(5000).astype(np.int32)
    for tail in tails:
        filler.store(tokens(range(4), 7, int(tail), 0, 0))
    check_tree(tree, {})
    for tail in tails[:200]:
        match = tree.match_prefix(NAMESPACE, tokens(range(4), 7, int(tail), 0, 9))
        assert (match.num_tokens, match.partial is not None) == (7, True)
    assert len(evict(tree, 4000)) == 4000
    check_tree(tree, {})
    survivors = sum(num_matched(tree, tokens(range(4), 7, int(t), 0, 0)) == 8 for t in tails)
    assert survivors == 1000


def test_children_across_buckets_have_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChildList, "MAX_BUCKET", 2)
    tree = make_tree(block_size=2)
    filler = Filler(tree)
    for first in (8, 2, 6, 4, 0, 12, 10):
        filler.store(tokens(first, first))
    check_tree(tree, {})
    for first in (0, 2, 4, 6, 8, 10, 12):
        assert num_matched(tree, tokens(first, first)) == 2
        assert num_matched(tree, tokens(first, 0)) == (2 if first == 0 else 1)
        assert num_matched(tree, tokens(first, 99)) == 1
        assert num_matched(tree, tokens(first)) == 1
        assert num_matched(tree, tokens(first + 1, 0)) == 0
    evict(tree, 3)
    check_tree(tree, {})


def test_buckets_survive_the_shortening_of_the_edges_they_begin_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ChildList, "MAX_BUCKET", 2)
    tree = make_tree(block_size=2)
    filler = Filler(tree)
    for first in (1, 2, 3, 4, 5, 6):
        filler.store(tokens(first, range(50, 57)))
    for first in (6, 4, 2, 1, 3, 5):
        filler.store(tokens(first, 50, 99, 99))
        check_tree(tree, {})
    for _ in range(tree.residency.num_cached[Tier.DEVICE]):
        assert len(evict(tree, 1)) == 1
        check_tree(tree, {})
    assert tree.roots == {}
