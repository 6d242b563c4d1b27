"""Tells a listener of each copy of each full block as it comes and goes, tier by tier.

Owns the reading of a node's hashes for that. It is told by residency, which knows when; it changes
nothing and remembers nothing. Knows nothing of who listens, who must be quick: the engine waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from cache_store.events import CopyEvent, CopyRemoved, CopyStored, Tier
from cache_store.radix_node import RadixNode

__all__ = ["CopyFeed", "CopyListener"]

CopyListener = Callable[[CopyEvent], None]


class CopyFeed:
    """``hashes`` has a row for each block id of each tier; ``block_bytes`` are those of the tokens
    of a full block. A partly filled one is not told of: nobody could ask for it by a hash."""

    def __init__(
        self, hashes: Mapping[Tier, NDArray[np.uint8]], block_bytes: int, tell: CopyListener
    ) -> None:
        self._hashes = hashes
        self._block_bytes = block_bytes
        self._tell = tell

    def stored(self, node: RadixNode, tier: Tier, first: int = 0) -> None:
        """``tier`` has just got the blocks of ``node`` from index ``first`` on."""
        joined = self._joined(node, tier, first)
        if joined:
            self._tell(CopyStored(tier, self._hash_before(node, tier, first), joined))

    def removed(self, node: RadixNode, tier: Tier, first: int = 0) -> None:
        """``tier`` is about to give up the blocks of ``node`` from index ``first`` on."""
        joined = self._joined(node, tier, first)
        if joined:
            self._tell(CopyRemoved(tier, joined))

    def left(self, nodes: Sequence[RadixNode]) -> None:
        """``nodes`` are about to give up all their copies."""
        for tier in self._hashes:
            joined = b"".join(self._joined(node, tier, 0) for node in nodes)
            if joined:
                self._tell(CopyRemoved(tier, joined))

    def _joined(self, node: RadixNode, tier: Tier, first: int) -> bytes:
        ids = node.ids_in(tier)
        if not ids or len(node.tokens) < self._block_bytes:
            return b""
        joined: bytes = self._hashes[tier][ids[first:]].tobytes()
        return joined

    def _hash_before(self, node: RadixNode, tier: Tier, first: int) -> bytes:
        if first:
            ids = node.ids_in(tier)
            assert ids is not None
            return bytes(self._hashes[tier][ids[first - 1]].data)
        parent = node.parent
        if parent is None or parent.parent is None:  # a root
            return b""
        ids = parent.ids_in(parent.tier)
        assert ids is not None
        return bytes(self._hashes[parent.tier][ids[-1]].data)
