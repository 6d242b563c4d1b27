"""Which token prefixes are stored, and in which blocks.

Owns the nodes of all namespaces, locks, recency, and the choice of what to evict. It handles token
ids and block ids only: blocks that it gives up are returned to the caller, and it knows nothing of
the pool, of leases, or of what a block contains. Not thread-safe: owned by the engine thread.

Every operation costs time in the length of the tokens concerned, in the depth of the path in
nodes, and in the logarithm of the number of siblings and leaves; none walks the tree.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cache_store.block_hash import HASH_BYTES, Namespace, chain_hashes
from cache_store.eviction import EvictionPolicy, EvictionQueue
from cache_store.prefix_match import PartialBlock, PrefixMatch, TreePosition
from cache_store.radix_node import RadixNode, RootNode
from cache_store.token_bytes import TOKEN_BYTES, TokenIds, encode_tokens, num_common_tokens


@dataclass(frozen=True, slots=True)
class LockedPrefix:
    """A match that has been locked: its last node and its blocks.

    ``source``, locked on its own, is the node of one block whose first ``num_rows`` rows match.
    """

    node: RadixNode
    block_ids: list[int]
    source: RadixNode | None
    num_rows: int


@dataclass(frozen=True, slots=True)
class Insertion:
    """What became of blocks offered to the tree.

    ``node`` ends the inserted path. ``duplicates`` are offered blocks that the tree did not take
    because it has their tokens already; ``dropped`` are blocks it gave up as redundant.
    """

    node: RadixNode
    duplicates: list[int]
    dropped: list[int]


class RadixTree:
    """Edges of whole blocks below one root per namespace.

    A lock counts on every node from the locked one to its root, so what lies below an unlocked
    node is unlocked too, and ``num_evictable`` is the sum over unlocked nodes.
    """

    def __init__(self, num_blocks: int, block_size: int, policy: EvictionPolicy) -> None:
        """``num_blocks`` bounds the block ids, ``block_size`` is in tokens."""
        self.block_size = block_size
        self.num_cached = 0  # blocks owned by the tree
        self.num_evictable = 0  # of these, not locked
        self.roots: dict[Namespace, RootNode] = {}
        self.queue = EvictionQueue(policy)
        self._block_bytes = block_size * TOKEN_BYTES
        self._block_hashes = np.zeros((num_blocks, HASH_BYTES), dtype=np.uint8)
        self._clock = 0
        self._version = 0  # changes whenever a TreePosition may have become untrue

    def block_hash(self, block_id: int) -> bytes:
        """The chained hash under which a full block was stored last."""
        return bytes(self._block_hashes[block_id].data)

    # ------------------------------------------------------------ match and lock

    def match_prefix(self, namespace: Namespace, token_ids: TokenIds) -> PrefixMatch:
        """The longest stored prefix, to the token. Changes nothing."""
        root = self.roots.get(namespace)
        if root is None:
            return PrefixMatch(namespace, token_ids)
        encoded = encode_tokens(token_ids)
        node: RadixNode = root
        start = num_edge_blocks = 0
        while True:
            child, num_rows = self._closest_child(node, encoded[start : start + self._block_bytes])
            if child is None or num_rows < self.block_size:
                break  # the path ends with a whole edge; child is at most good for some rows
            end = start + len(child.tokens)
            if child.tokens == encoded[start:end]:
                node, start, num_edge_blocks = child, end, child.num_blocks
                continue
            num_common = num_common_tokens(child.tokens, encoded[start:end])
            num_edge_blocks, num_rows = divmod(num_common, self.block_size)
            node = child
            start += num_edge_blocks * self._block_bytes
            break
        partial = None
        if child is not None and num_rows:
            index = num_edge_blocks if child is node else 0
            partial = PartialBlock(child.block_ids[index], num_rows)
        position = TreePosition(self._version, node, num_edge_blocks, child if partial else None)
        return PrefixMatch(namespace, token_ids, start // TOKEN_BYTES, partial, position)

    def acquire(self, match: PrefixMatch) -> LockedPrefix:
        """Lock what ``match`` found, made afresh if the tree has changed; counts as a hit.

        Edges are split so that exactly the matched blocks, and the partial one, are locked.
        """
        position = match.position
        if position is None or position.version != self._version:
            match = self.match_prefix(match.namespace, match.token_ids)
            position = match.position
        if position is None:
            root = self._root(match.namespace)
            self.lock(root)
            return LockedPrefix(root, [], None, 0)
        node, source = position.node, position.source
        if position.num_edge_blocks < node.num_blocks:
            node = self._split(node, position.num_edge_blocks)
        self.lock(node)
        num_rows = 0
        if source is not None and match.partial is not None:
            num_rows = match.partial.num_rows
            if source.num_blocks > 1:
                source = self._split(source, 1)
            self.lock(source)
        self.touch(source or node, is_hit=True)
        return LockedPrefix(node, _path_block_ids(node), source, num_rows)

    def lock(self, node: RadixNode) -> None:
        """Protect the path from ``node`` to its root from eviction."""
        step: RadixNode | None = node
        while step is not None:
            if step.lock_ref == 0:
                self.num_evictable -= step.num_blocks
            step.lock_ref += 1
            step = step.parent

    def unlock(self, node: RadixNode) -> None:
        """Undo one :meth:`lock` of ``node``; a root that nothing needs any more is dropped."""
        step: RadixNode | None = node
        while step is not None:
            assert step.lock_ref > 0, "unlocked more often than locked"
            step.lock_ref -= 1
            if step.lock_ref == 0:
                self.num_evictable += step.num_blocks
                self._on_idle(step)
            step = step.parent

    def touch(self, node: RadixNode, is_hit: bool = False) -> None:
        """Renew the path's recency from ``node``, which becomes its oldest, up to the root.

        So the tail of an idle path always goes before what leads to it, and before the newer
        heads of paths used earlier.
        """
        step: RadixNode | None = node
        while step is not None:
            self._clock += 1
            step.last_access = self._clock
            step.num_hits += is_hit
            step = step.parent

    # ------------------------------------------------------------ insert

    def insert(self, node: RadixNode, encoded: bytes, block_ids: Sequence[int]) -> Insertion:
        """Store full blocks below ``node`` and move one lock of ``node`` down to their end.

        ``encoded`` holds the tokens of exactly ``block_ids``. What is stored there already is
        left as it is, and the offered blocks for it are returned as duplicates.
        """
        duplicates: list[int] = []
        dropped: list[int] = []
        index = 0
        while index < len(block_ids):
            start = index * self._block_bytes
            child = self._shared_child(node, encoded, start)
            if child is None:
                node = self._append(node, encoded[start:], block_ids[index:], dropped)
                break
            if child.lock_ref == 0:
                self.num_evictable -= child.num_blocks
            child.lock_ref += 1
            duplicates.extend(block_ids[index : index + child.num_blocks])
            index += child.num_blocks
            node = child
        return Insertion(node, duplicates, dropped)

    def insert_partial(self, node: RadixNode, encoded: bytes, block_id: int) -> Insertion:
        """Store a partly filled block as a leaf below ``node``, unlocked.

        It comes back as a duplicate if some child of ``node`` begins with the same tokens.
        """
        assert 0 < len(encoded) < self._block_bytes, "a partial block is neither empty nor full"
        if node.children is not None:
            at = node.children.neighbours(encoded)[1]
            if at is not None and at.tokens.startswith(encoded):
                return Insertion(node, [block_id], [])
        dropped: list[int] = []
        leaf = self._add_leaf(node, encoded, [block_id], dropped)
        self.num_evictable += 1
        self.queue.push(leaf)
        return Insertion(leaf, [], dropped)

    # ------------------------------------------------------------ evict

    def evict(self, num_blocks: int) -> list[int]:
        """Drop up to ``num_blocks`` unlocked blocks, tails of leaves first, by the policy."""
        evicted: list[int] = []
        while len(evicted) < num_blocks:
            leaf = self.queue.pop()
            if leaf is None:
                break
            excess = len(leaf.block_ids) + len(evicted) - num_blocks
            if excess > 0:
                evicted.extend(leaf.block_ids[excess:])
                del leaf.block_ids[excess:]
                del leaf.tokens[excess * self._block_bytes :]
                self.queue.put_back(leaf)
            else:
                evicted.extend(leaf.block_ids)
                self._detach(leaf)
        self.num_cached -= len(evicted)
        self.num_evictable -= len(evicted)
        self._version += bool(evicted)
        return evicted

    # ------------------------------------------------------------ inside

    def _root(self, namespace: Namespace) -> RootNode:
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = RootNode(namespace, self._clock)
        return root

    def _closest_child(self, node: RadixNode, block: bytes) -> tuple[RadixNode | None, int]:
        """The child with the longest common prefix with ``block``, and its length in tokens."""
        if node.children is None or not block:
            return None, 0
        before, at = node.children.neighbours(block)
        if at is not None and at.tokens.startswith(block):
            return at, len(block) // TOKEN_BYTES
        rows_before = num_common_tokens(before.tokens, block) if before is not None else 0
        rows_at = num_common_tokens(at.tokens, block) if at is not None else 0
        closest, num_rows = (at, rows_at) if rows_at >= rows_before else (before, rows_before)
        return (closest, num_rows) if num_rows else (None, 0)

    def _shared_child(self, node: RadixNode, encoded: bytes, start: int) -> RadixNode | None:
        """The child whose whole edge stands in ``encoded`` at ``start``, split off if need be."""
        if node.children is None:
            return None
        block = encoded[start : start + self._block_bytes]
        child = node.children.neighbours(block)[1]
        if child is None or not child.tokens.startswith(block):
            return None
        offered = encoded[start : start + len(child.tokens)]
        num_common = num_common_tokens(child.tokens, offered) // self.block_size
        return child if num_common == child.num_blocks else self._split(child, num_common)

    def _append(
        self, node: RadixNode, encoded: bytes, block_ids: Sequence[int], dropped: list[int]
    ) -> RadixNode:
        """Store blocks that no child of ``node`` shares; the node they end in, locked once."""
        parent_hash = self._end_hash(node)
        hashes = chain_hashes(parent_hash, encoded, self.block_size).joined
        self._block_hashes[block_ids] = np.frombuffer(hashes, np.uint8).reshape(-1, HASH_BYTES)
        is_own = node.lock_ref == 1 and node.num_hits == 0 and node.children is None
        if is_own and node.parent is not None:
            # Only the caller holds this leaf, and it was never hit, so its stamps and counts are
            # true of the new blocks too: a growing answer stays one edge.
            node.tokens += encoded
            node.block_ids.extend(block_ids)
            self.num_cached += len(block_ids)
            self._version += 1
            return node
        leaf = self._add_leaf(node, encoded, block_ids, dropped)
        leaf.lock_ref = 1
        return leaf

    def _add_leaf(
        self, parent: RadixNode, encoded: bytes, block_ids: Sequence[int], dropped: list[int]
    ) -> RadixNode:
        """A new child; a partial leaf that it makes redundant goes, its block to ``dropped``."""
        if parent.children is not None:
            before = parent.children.neighbours(encoded)[0]
            if before is not None and before.lock_ref == 0 and encoded.startswith(before.tokens):
                self._drop_partial(before, dropped)
        self._clock += 1
        leaf = RadixNode(parent, bytearray(encoded), array("i", block_ids), self._clock)
        parent.add_child(leaf)
        self.num_cached += len(block_ids)
        self._version += 1
        return leaf

    def _drop_partial(self, leaf: RadixNode, dropped: list[int]) -> None:
        assert leaf.parent is not None
        dropped.extend(leaf.block_ids)
        self.num_cached -= leaf.num_blocks
        self.num_evictable -= leaf.num_blocks
        leaf.parent.remove_child(leaf)
        leaf.parent = None
        self.queue.forget(leaf)

    def _split(self, node: RadixNode, num_blocks: int) -> RadixNode:
        """Put a new node with the first ``num_blocks`` blocks of the edge above ``node``.

        ``node`` itself remains the lower part, so that what points to it still points to the end
        of the same path.
        """
        parent = node.parent
        assert parent is not None
        assert parent.children is not None
        assert 0 < num_blocks < node.num_blocks, "a split needs blocks on both sides"
        cut = num_blocks * self._block_bytes
        upper = RadixNode(parent, node.tokens[:cut], node.block_ids[:num_blocks], node.created)
        upper.lock_ref, upper.num_hits = node.lock_ref, node.num_hits
        upper.last_access = node.last_access
        parent.children.replace(node, upper)
        node.tokens, node.block_ids = node.tokens[cut:], node.block_ids[num_blocks:]
        node.parent = upper
        upper.add_child(node)
        self._version += 1
        return upper

    def _detach(self, leaf: RadixNode) -> None:
        """Take an evicted leaf out; its parent may become the next leaf, or an unused root."""
        parent = leaf.parent
        assert parent is not None
        parent.remove_child(leaf)
        leaf.parent = None
        if parent.children is None and parent.lock_ref == 0:
            self._on_idle(parent)

    def _on_idle(self, node: RadixNode) -> None:
        """``node`` has just lost its last lock or its last child."""
        if node.children is not None:
            return
        if isinstance(node, RootNode):
            del self.roots[node.namespace]
            self._version += 1
        else:
            self.queue.push(node)

    def _end_hash(self, node: RadixNode) -> bytes:
        if isinstance(node, RootNode):
            return node.namespace.root_hash
        return self.block_hash(node.block_ids[-1])


def _path_block_ids(node: RadixNode) -> list[int]:
    """The blocks from the root to the end of ``node``, in token order."""
    edges = []
    step: RadixNode | None = node
    while step is not None:
        edges.append(step.block_ids)
        step = step.parent
    return [block_id for edge in reversed(edges) for block_id in edge]
