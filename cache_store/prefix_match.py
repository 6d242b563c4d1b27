"""The answers of the tree: how much of a prompt is stored, what was locked, what was inserted.

Owns the result types. They are snapshots: reading one locks nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cache_store.adaptive import Visit
from cache_store.block_hash import Namespace
from cache_store.events import Tier
from cache_store.radix_node import RadixNode
from cache_store.token_bytes import TokenIds


@dataclass(frozen=True, slots=True)
class PartialBlock:
    """The first ``num_rows`` (at least 1) tokens of a block are the prompt's next ones."""

    num_rows: int
    tier: Tier


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

    ``num_block_tokens`` tokens are whole blocks that can be shared as they are, the last
    ``num_disk_tokens`` of them once they are promoted from disk, and the ``num_host_tokens`` before
    those from host memory. ``partial`` is the block whose leading rows can be copied after them.
    """

    namespace: Namespace
    token_ids: TokenIds = field(repr=False)
    num_block_tokens: int = 0
    partial: PartialBlock | None = None
    position: TreePosition | None = field(default=None, repr=False)
    num_host_tokens: int = 0
    num_disk_tokens: int = 0

    @property
    def num_device_tokens(self) -> int:
        return self.num_block_tokens - self.num_host_tokens - self.num_disk_tokens

    @property
    def num_tokens(self) -> int:
        return self.num_block_tokens + (self.partial.num_rows if self.partial else 0)


@dataclass(frozen=True, slots=True)
class LockedPrefix:
    """A match that has been locked: its last node and the nodes from the root to there.

    ``source``, locked on its own, is the node of one block whose first ``num_rows`` rows match.
    ``visit`` is what an adaptive policy wants to know again when the request ends.
    """

    node: RadixNode
    path: list[RadixNode]
    source: RadixNode | None
    num_rows: int
    visit: Visit | None = None


@dataclass(frozen=True, slots=True)
class Insertion:
    """What became of blocks offered to the tree.

    ``node`` ends the inserted path. ``duplicates`` are offered blocks that the tree did not take
    because it has their tokens already.
    """

    node: RadixNode
    duplicates: list[int]
