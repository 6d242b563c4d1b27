"""The answer to "how much of this prompt is stored".

Owns the result types of a match. They are snapshots: reading one locks nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cache_store.block_hash import Namespace
from cache_store.radix_node import RadixNode
from cache_store.token_bytes import TokenIds


@dataclass(frozen=True, slots=True)
class PartialBlock:
    """The first ``num_rows`` (at least 1) tokens of ``block_id`` are the prompt's next ones."""

    block_id: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class TreePosition:
    """Where in the tree a match ended; means something at one version of one tree only.

    The match covers everything above ``node`` and ``num_edge_blocks`` blocks of its edge. The
    partial block is the next one of ``source`` (which is ``node`` itself, or a child of it).
    """

    version: int
    node: RadixNode
    num_edge_blocks: int
    source: RadixNode | None


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest stored prefix of ``token_ids`` within ``namespace``.

    ``num_block_tokens`` tokens are whole blocks that can be shared as they are; ``partial`` names
    the block whose leading rows can be copied after them.
    """

    namespace: Namespace
    token_ids: TokenIds = field(repr=False)
    num_block_tokens: int = 0
    partial: PartialBlock | None = None
    position: TreePosition | None = field(default=None, repr=False)

    @property
    def num_tokens(self) -> int:
        return self.num_block_tokens + (self.partial.num_rows if self.partial else 0)
