"""Assertions over the whole cache: every block has one owner, every count is true.

Owns no state. Walks everything, so it is for tests and idle moments, never for a hot path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from cache_store.adaptive_queue import AdaptiveQueue
from cache_store.block_hash import HASH_BYTES, chain_hashes
from cache_store.block_pool import BlockPool
from cache_store.events import Tier
from cache_store.eviction import EvictionQueue
from cache_store.radix_node import RadixNode, RootNode, is_arriving
from cache_store.radix_tree import RadixTree
from cache_store.tenant_shares import TenantShare
from cache_store.token_bytes import TOKEN_BYTES


def check_ownership(pool: BlockPool, owned: Sequence[int], private: Sequence[int]) -> None:
    """Assert that each block is free, private to one lease, or owned by the tree once."""
    pool.check_integrity()
    held = [*owned, *private]
    assert len(set(held)) == len(held), "a block has two owners"
    assert not any(pool.is_free(block_id) for block_id in held), "a block in use is free"
    assert len(held) + pool.num_free == pool.num_blocks, "a block was lost"


def check_tree(tree: RadixTree, locks: Mapping[RadixNode, int]) -> dict[Tier, list[int]]:
    """Assert the tree's structure, residency and counts; the blocks it owns in each tier.

    ``locks`` says how often each node was locked by somebody (not counting those below it).
    """
    expected_locks = _path_locks(locks)
    residency = tree.residency
    owned: dict[Tier, list[int]] = {tier: [] for tier in residency.num_cached}
    num_evictable = 0
    stack: list[tuple[RadixNode, bytes]] = []
    for root_hash, root in tree.roots.items():
        assert root.root_hash == root_hash, "a root under another namespace"
        assert root.children is not None or root.lock_ref, "an unused root was kept"
        stack.append((root, root_hash))
    seen: list[RadixNode] = []
    while stack:
        node, parent_hash = stack.pop()
        assert node.lock_ref == expected_locks.pop(node, 0), "lock_ref is not what leases hold"
        if not isinstance(node, RootNode):
            seen.append(node)
            parent_hash = _check_edge(tree, node, parent_hash)
            _check_residency(node, owned)
            if node.lock_ref == 0 and node.block_ids is not None:
                num_evictable += len(node.block_ids)
        children = _checked_children(node, tree.block_bytes)
        stack.extend((child, parent_hash) for child in children)
    assert not expected_locks, "a lease holds a node that is not in the tree"
    for tier, block_ids in owned.items():
        assert residency.num_cached[tier] == len(block_ids), "cached blocks miscounted"
    assert residency.num_evictable == num_evictable, "evictable blocks miscounted"
    of_tenant: dict[str, list[RadixNode]] = {}
    for node in seen:
        of_tenant.setdefault(node.owner.tenant, []).append(node)
    for share in residency.shares:
        _check_share(share, of_tenant.pop(share.tenant, []))
    assert not of_tenant, "blocks are charged to a tenant that is not known"
    return owned


def check_charges(shares: Iterable[TenantShare], leases: Iterable[tuple[TenantShare, int]]) -> None:
    """Assert that each tenant is charged with the private blocks of its own leases."""
    charged: dict[str, tuple[int, int]] = {}
    for share, num_private in leases:
        before = charged.get(share.tenant, (0, 0))
        charged[share.tenant] = (before[0] + 1, before[1] + num_private)
    for share in shares:
        expected = charged.pop(share.tenant, (0, 0))
        assert (share.num_leases, share.num_private) == expected, "private blocks miscounted"
    assert not charged, "a lease of a tenant that is not known"


def _check_share(share: TenantShare, nodes: Sequence[RadixNode]) -> None:
    """Assert the account of one tenant, whose ``nodes`` these are, and its queues."""
    for node in nodes:
        assert node.owner is share, "two accounts of one tenant"
    for tier, queue in share.queues.items():
        copies = [ids for node in nodes if (ids := node.ids_in(tier)) is not None]
        assert share.num_cached[tier] == sum(map(len, copies)), "a tenant's blocks miscounted"
        leaving = [node.num_blocks for node in nodes if _is_leaving(node, tier)]
        assert share.num_leaving[tier] == sum(leaving), "a tenant's leaving blocks miscounted"
        _check_queue(queue, tier, nodes)
    evictable = [n.block_ids for n in nodes if n.lock_ref == 0 and n.block_ids is not None]
    assert share.num_evictable == sum(map(len, evictable)), "a tenant's blocks miscounted"


def _is_leaving(node: RadixNode, tier: Tier) -> bool:
    job = node.transfer
    return job is not None and job.is_pending and job.frees_source and job.order.source is tier


def _check_residency(node: RadixNode, owned: dict[Tier, list[int]]) -> None:
    """Assert that a node's copies are whole, and no quicker than its parent's."""
    assert node.has_copies(), "a node that is nowhere"
    for tier, block_ids in owned.items():
        ids = node.ids_in(tier)
        if ids is not None:
            assert len(ids) == node.num_blocks, "a copy of another length"
            block_ids += ids
    parent = node.parent
    assert parent is not None
    is_gap = parent.tier.is_below(node.tier) and not is_arriving(parent)
    if parent.transfer is None or not parent.transfer.has_failed:
        assert not is_gap, "a node in a quicker tier than its parent"
    assert node.start == parent.start + parent.num_blocks, "an edge at another depth"
    tiers = [child.tier for child in node.children or ()]
    assert node.num_device_children == tiers.count(Tier.DEVICE), "children miscounted"
    assert node.num_host_children == tiers.count(Tier.HOST), "children miscounted"


def _check_queue(
    queue: EvictionQueue | AdaptiveQueue, tier: Tier, nodes: Sequence[RadixNode]
) -> None:
    """Assert that whatever of one tenant may leave the tier is queued, under a key that is not too
    large."""
    entries = {id(node): key for key, node in queue}
    assert len(entries) == len(queue), "a node is queued twice"
    for node in nodes:
        if node.is_evictable_from(tier):
            assert queue.holds(node), "an evictable leaf is not queued"
            if isinstance(queue, EvictionQueue):
                late = entries[id(node)] > queue.policy.key(node)
                assert not late, "a queued key is too large"
        assert queue.holds(node) == (id(node) in entries), "a node's queue mark is wrong"


def _path_locks(locks: Mapping[RadixNode, int]) -> dict[RadixNode, int]:
    expected: dict[RadixNode, int] = {}
    for locked, count in locks.items():
        node: RadixNode | None = locked
        while node is not None:
            expected[node] = expected.get(node, 0) + count
            node = node.parent
    return expected


def _check_edge(tree: RadixTree, node: RadixNode, parent_hash: bytes) -> bytes:
    """Assert one edge's form and its block hashes; the hash at its end."""
    assert node.num_blocks > 0, "an edge without blocks"
    if len(node.tokens) < tree.block_bytes:
        assert node.num_blocks == 1, "a partial leaf of several blocks"
        assert node.tokens, "a partial leaf without tokens"
        assert len(node.tokens) % TOKEN_BYTES == 0, "half a token"
        assert node.children is None, "a partial leaf with children"
    else:
        whole = node.num_blocks * tree.block_bytes
        assert len(node.tokens) == whole, "tokens and blocks disagree"
    hashes = chain_hashes(parent_hash, node.tokens, tree.block_size)
    for tier in tree.residency.num_cached:
        for index, block_id in enumerate(node.ids_in(tier) or ()):
            stored = tree.residency.block_hash(tier, block_id)
            assert stored == hashes[index], "a block is stored under another hash"
    assert len(hashes[0]) == HASH_BYTES, "a hash of the wrong size"
    return hashes[len(hashes) - 1]


def _checked_children(node: RadixNode, block_bytes: int) -> list[RadixNode]:
    """The children, asserted to be in order and to differ in their first block."""
    children = [] if node.children is None else list(node.children)
    assert node.children is None or children, "an empty list of children was kept"
    for child in children:
        assert child.parent is node, "a child has another parent"
        assert node.children is not None
        assert node.children.neighbours(child.tokens)[1] is child, "a child cannot be found"
    for left, right in pairwise(children):
        assert left.tokens < right.tokens, "children out of order"
        assert left.tokens[:block_bytes] != right.tokens[:block_bytes], "children share a block"
    return children
