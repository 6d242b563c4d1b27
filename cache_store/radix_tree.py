"""Which token prefixes are stored, and in which blocks.

Owns the nodes of all namespaces, their shape, locks and recency. It handles token ids and block ids
only: blocks that it gives up wait in ``residency`` to be collected, and it knows nothing of pools,
of leases, or of what a block contains. Not thread-safe: owned by the engine thread.

Every operation costs time in the length of the tokens concerned, in the depth of the path in
nodes, and in the logarithm of the number of siblings and leaves; none walks the tree, except
``nodes``.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence

from cache_store.block_hash import HASH_BYTES, Namespace, chain_hashes
from cache_store.events import Tier
from cache_store.eviction import EvictionPolicy
from cache_store.prefix_match import (
    Insertion,
    LockedPrefix,
    PartialBlock,
    PrefixMatch,
    TreePosition,
)
from cache_store.prefix_search import find_prefix
from cache_store.radix_node import RadixNode, RootNode, is_arriving, path_of, subtree_of
from cache_store.residency import Residency
from cache_store.tenant_shares import TenantShare
from cache_store.token_bytes import TOKEN_BYTES, TokenIds, encode_tokens, num_common_tokens


def no_time() -> int:
    """A clock that stands still: recency is the order of the accesses alone."""
    return 0


class RadixTree:
    """Edges of whole blocks below one root per namespace.

    A lock counts on every node from the locked one to its root, so what lies below an unlocked
    node is unlocked too.
    """

    def __init__(
        self,
        capacities: Mapping[Tier, int],
        block_size: int,
        policy: EvictionPolicy,
        *,
        clock_ns: Callable[[], int] = no_time,
        event_blocks: int = 0,
    ) -> None:
        """``capacities`` bounds the block ids of each tier, ``block_size`` is in tokens."""
        self.block_size = block_size
        self.block_bytes = block_size * TOKEN_BYTES
        self.roots: dict[bytes, RootNode] = {}
        self.residency = Residency(capacities, policy, clock_ns, event_blocks, self.block_bytes)
        self._nobody = self.residency.shares.nobody  # whom blocks without a tenant are charged to
        self._clock_ns = clock_ns
        self._clock = 0
        self._version = 0  # changes whenever a TreePosition may have become untrue

    def nodes(self) -> Iterator[RadixNode]:
        """All nodes but the roots, parents first."""
        stack: list[RadixNode] = list(self.roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            if node.children is not None:
                stack.extend(node.children)

    # ------------------------------------------------------------ match and lock

    def match_prefix(self, namespace: Namespace, token_ids: TokenIds) -> PrefixMatch:
        """The longest stored prefix, to the token. Changes nothing."""
        root = self.roots.get(namespace.root_hash)
        if root is None:
            return PrefixMatch(namespace, token_ids)
        found = find_prefix(root, encode_tokens(token_ids), self.block_size)
        partial = None
        if found.source is not None:
            partial = PartialBlock(found.num_rows, found.source.tier)
        position = TreePosition(self._version, found.node, found.num_edge_blocks, found.source)
        return PrefixMatch(
            namespace,
            token_ids,
            found.num_blocks * self.block_size,
            partial,
            position,
            found.num_host_blocks * self.block_size,
            found.num_disk_blocks * self.block_size,
        )

    def current(self, match: PrefixMatch) -> PrefixMatch:
        """``match``, made afresh if the tree has changed since."""
        position = match.position
        if position is not None and position.version == self._version:
            return match
        return self.match_prefix(match.namespace, match.token_ids)

    def acquire(
        self, match: PrefixMatch, lowest: Tier = Tier.DISK, bonus_ns: int = 0
    ) -> LockedPrefix:
        """Lock what ``match`` found in ``lowest`` and the quicker tiers; counts as a hit.

        Edges are split so that exactly the matched blocks, and the partial one, are locked.
        ``match`` has to be current.
        """
        position = match.position
        if position is None:
            root = self._root(match.namespace.root_hash)
            self.lock(root)
            return LockedPrefix(root, [], None, 0, self.residency.began(root, self._clock_ns()))
        assert position.version == self._version, "the match is outdated"
        node, source = position.node, position.source
        if position.num_edge_blocks < node.num_blocks:
            node = self._split(node, position.num_edge_blocks)
        while node.tier.is_below(lowest):
            assert node.parent is not None
            node, source = node.parent, None
        self.lock(node)
        num_rows = 0
        if source is None or match.partial is None or source.tier.is_below(lowest):
            source = None
        else:
            num_rows = match.partial.num_rows
            source = self._split(source, 1) if source.num_blocks > 1 else source
            self.lock(source)
        now = self._clock_ns()
        self.residency.ages.reused(source or node, now)
        self.touch(source or node, is_hit=True, bonus_ns=bonus_ns)
        return LockedPrefix(node, path_of(node), source, num_rows, self.residency.began(node, now))

    def lock(self, node: RadixNode) -> None:
        """Protect the path from ``node`` to its root from eviction."""
        step: RadixNode | None = node
        while step is not None:
            if step.lock_ref == 0 and step.block_ids:
                self.residency.count_evictable(step, -len(step.block_ids))
            step.lock_ref += 1
            step = step.parent

    def unlock(self, node: RadixNode) -> None:
        """Undo one :meth:`lock` of ``node``; a root that nothing needs any more is dropped."""
        step: RadixNode | None = node
        while step is not None:
            assert step.lock_ref > 0, "unlocked more often than locked"
            step.lock_ref -= 1
            if step.lock_ref == 0:
                if step.block_ids:
                    self.residency.count_evictable(step, len(step.block_ids))
                self._on_idle(step)
            step = step.parent

    def touch(self, node: RadixNode, is_hit: bool = False, bonus_ns: int = 0) -> None:
        """Renew the path's recency from ``node``, which becomes its oldest, up to the root: so the
        tail of an idle path goes before what leads to it. ``bonus_ns``: as if used so much later.
        """
        self._clock = max(self._clock, self._clock_ns())
        step: RadixNode | None = node
        while step is not None:
            self._clock += 1
            step.last_access = max(step.last_access, self._clock + bonus_ns)
            step.num_hits += is_hit
            step = step.parent

    # ------------------------------------------------------------ insert

    def insert(
        self,
        node: RadixNode,
        encoded: bytes,
        block_ids: Sequence[int],
        owner: TenantShare,
        hashes: bytes = b"",
    ) -> Insertion:
        """Store full blocks below ``node`` and move one lock of ``node`` down to their end.

        ``encoded`` holds the tokens of exactly ``block_ids``, ``hashes`` those of the first, if
        known. What is on the device or on its way there is left as it is, and the blocks offered
        for it are returned as duplicates; what is in a lower tier only takes them as its copy on
        the device. ``owner`` is charged with what is new.
        """
        duplicates: list[int] = []
        index = 0
        while index < len(block_ids):
            child = self._shared_child(node, encoded, index * self.block_bytes)
            if child is None:
                rest, ids = encoded[index * self.block_bytes :], array("i", block_ids[index:])
                self._set_hashes(node, rest, ids, hashes[index * HASH_BYTES :])
                node = self._append(node, rest, ids, owner)
                break
            offered = block_ids[index : index + child.num_blocks]
            if child.block_ids is None and not is_arriving(child):
                self.add_copy(child, Tier.DEVICE, array("i", offered))
            else:
                duplicates.extend(offered)
            if child.lock_ref == 0 and child.block_ids is not None:
                self.residency.count_evictable(child, -len(child.block_ids))
            child.lock_ref += 1
            index += child.num_blocks
            node = child
        return Insertion(node, duplicates)

    def insert_partial(
        self, node: RadixNode, encoded: bytes, block_id: int, owner: TenantShare
    ) -> Insertion:
        """Store a partly filled block as a leaf below ``node``, unlocked.

        It comes back as a duplicate if some child of ``node`` begins with the same tokens.
        """
        assert 0 < len(encoded) < self.block_bytes, "a partial block is neither empty nor full"
        if node.child_with(encoded) is not None:
            return Insertion(node, [block_id])
        ids = array("i", [block_id])
        self._set_hashes(node, encoded, ids)
        return Insertion(self._add_leaf(node, encoded, ids, 0, owner), [])

    def restore(
        self,
        parent: RadixNode | bytes,
        encoded: bytes,
        ids: array[int],
        hashes: bytes,
        last_access: int,
    ) -> RadixNode | None:
        """A new leaf for blocks that were found on disk, below ``parent`` or a namespace's root.

        None if some child has the first of these blocks already.
        """
        above = self._root(parent) if isinstance(parent, bytes) else parent
        if above.child_with(encoded[: self.block_bytes]) is not None:
            return None
        self.residency.set_hashes(Tier.DISK, ids, hashes)
        self._clock = max(self._clock, last_access)
        return self._new_leaf(above, encoded, Tier.DISK, ids, 0, last_access, self._nobody)

    # ------------------------------------------------------------ copies

    def add_copy(self, node: RadixNode, tier: Tier, ids: array[int]) -> None:
        self.residency.add_copy(node, tier, ids)
        self._version += 1

    def trim(self, leaf: RadixNode, num_blocks: int) -> None:
        """Drop the last blocks of an unlocked leaf that is on the device alone."""
        self.residency.trim(leaf, num_blocks, num_blocks * self.block_bytes)
        self._version += 1

    def drop_copy(self, node: RadixNode, tier: Tier) -> None:
        """Give up a copy; the node leaves the tree with its last one, and must be childless."""
        self.residency.drop_copy(node, tier)
        self._version += 1
        if not node.has_copies():
            self.detach(node)

    def drop(self, node: RadixNode) -> int:
        """Drop an unlocked node and all that lies below it, in all tiers; the number of blocks."""
        doomed = subtree_of(node)
        assert not any(step.lock_ref for step in doomed), "a locked node cannot be dropped"
        num_blocks = self.residency.give_up(doomed)
        for step in doomed[1:]:
            step.parent = None
            self.residency.forget(step)
        node.children = None
        self.detach(node)
        return num_blocks

    def split_tail(self, node: RadixNode, num_blocks: int) -> None:
        """Leave ``node`` with its last ``num_blocks`` blocks, the others in a new parent."""
        if num_blocks < node.num_blocks:
            self._split(node, node.num_blocks - num_blocks)

    # ------------------------------------------------------------ inside

    def _root(self, root_hash: bytes) -> RootNode:
        root = self.roots.get(root_hash)
        if root is None:
            root = self.roots[root_hash] = RootNode(root_hash, self._clock, self._nobody)
        return root

    def _shared_child(self, node: RadixNode, encoded: bytes, start: int) -> RadixNode | None:
        """The child whose whole edge stands in ``encoded`` at ``start``, split off if need be."""
        child = node.child_with(encoded[start : start + self.block_bytes])
        if child is None:
            return None
        offered = encoded[start : start + len(child.tokens)]
        num_common = num_common_tokens(child.tokens, offered) // self.block_size
        return child if num_common == child.num_blocks else self._split(child, num_common)

    def _append(
        self, node: RadixNode, encoded: bytes, ids: array[int], owner: TenantShare
    ) -> RadixNode:
        """Store blocks that no child of ``node`` shares; the node they end in, locked once."""
        is_own = node.lock_ref == 1 and node.num_hits == 0 and node.children is None
        is_plain = node.host_ids is None and node.disk_ids is None and node.transfer is None
        if not (is_own and is_plain) or node.parent is None or node.owner is not owner:
            return self._add_leaf(node, encoded, ids, 1, owner)
        # Only the caller holds this leaf, and it was never hit, so its stamps and counts are
        # true of the new blocks too: a growing answer stays one edge.
        node.tokens += encoded
        self.residency.extend(node, ids)
        self._version += 1
        return node

    def _add_leaf(
        self, parent: RadixNode, encoded: bytes, ids: array[int], lock_ref: int, owner: TenantShare
    ) -> RadixNode:
        """A new child on the device; a partial leaf that it makes redundant goes."""
        if parent.children is not None:
            before = parent.children.neighbours(encoded)[0]
            if before is not None and before.lock_ref == 0 and encoded.startswith(before.tokens):
                self.drop(before)
        self._clock = max(self._clock + 1, self._clock_ns())
        return self._new_leaf(parent, encoded, Tier.DEVICE, ids, lock_ref, self._clock, owner)

    def _new_leaf(
        self,
        parent: RadixNode,
        encoded: bytes,
        tier: Tier,
        ids: array[int],
        lock_ref: int,
        created: int,
        owner: TenantShare,
    ) -> RadixNode:
        start = parent.start + parent.num_blocks
        leaf = RadixNode(parent, bytearray(encoded), start, created, owner)
        leaf.lock_ref = lock_ref
        if tier is Tier.DEVICE:
            leaf.last_access = 0  # its first release says how late it counts as used
        self.residency.add_copy(leaf, tier, ids)
        parent.add_child(leaf)
        self._version += 1
        return leaf

    def _set_hashes(
        self, parent: RadixNode, encoded: bytes, ids: array[int], known: bytes = b""
    ) -> None:
        hashes = chain_hashes(self.end_hash(parent), encoded, self.block_size, known)
        self.residency.set_hashes(Tier.DEVICE, ids, hashes.joined)

    def _split(self, node: RadixNode, num_blocks: int) -> RadixNode:
        """Put a new node with the first ``num_blocks`` blocks of the edge above ``node``.

        ``node`` itself remains the lower part, so that what points to it still points to the end
        of the same path.
        """
        parent = node.parent
        assert parent is not None
        assert parent.children is not None
        assert 0 < num_blocks < node.num_blocks, "a split needs blocks on both sides"
        cut = num_blocks * self.block_bytes
        upper = RadixNode(parent, node.tokens[:cut], node.start, node.created, node.owner)
        upper.lock_ref, upper.num_hits = node.lock_ref, node.num_hits
        upper.last_access, upper.transfer = node.last_access, node.transfer
        self.residency.split(node, upper, num_blocks)
        parent.children.replace(node, upper)
        node.tokens = node.tokens[cut:]
        node.parent = upper
        node.start += num_blocks
        upper.add_child(node)
        if node.transfer is not None:
            node.transfer.split(node, upper, num_blocks)
            if node.transfer.is_pending:
                self.lock(upper)  # it holds a lock on each of its nodes
        self._version += 1
        return upper

    def detach(self, leaf: RadixNode) -> None:
        """Take a childless node without copies out; its parent may become a leaf or be unused."""
        parent = leaf.parent
        assert parent is not None
        assert parent.children is not None
        assert leaf.children is None, "children without a parent"
        if parent.children.remove(leaf):
            parent.children = None
        leaf.parent = None
        if leaf.queue_marks:
            self.residency.forget(leaf)
        if parent.lock_ref == 0:
            self._on_idle(parent)
        self._version += 1

    def _on_idle(self, node: RadixNode) -> None:
        """``node`` has just lost its last lock or a child."""
        if not isinstance(node, RootNode):
            self.residency.push(node)
        elif node.children is None:
            del self.roots[node.root_hash]
            self._version += 1

    def end_hash(self, node: RadixNode) -> bytes:
        """The chained hash of everything up to the end of ``node``."""
        if isinstance(node, RootNode):
            return node.root_hash
        return self.residency.last_hash(node)
