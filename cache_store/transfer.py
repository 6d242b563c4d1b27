"""Copies of blocks between tiers: what is to be copied, and what came of it.

Owns the order that an executor carries out beside the engine, its result, and the job that ties
both to the nodes of the tree. Knows nothing of tensors, files or threads: an executor is given ids
and, for the disk, the names that each block has to bear.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from cache_store.events import Tier
from cache_store.token_bytes import TOKEN_BYTES

if TYPE_CHECKING:
    from cache_store.radix_node import RadixNode


@dataclass(frozen=True, slots=True)
class BlockKey:
    """What a block is: its namespace, all that lies before it, and its own tokens.

    Hashes are 16 bytes. ``tokens`` is the byte form of ``cache_store.token_bytes``; fewer than a
    block's are a partly filled one.
    """

    root_hash: bytes
    parent_hash: bytes
    block_hash: bytes
    tokens: bytes = field(repr=False)

    @property
    def num_rows(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class TransferOrder:
    """Copy ``source_ids[i]`` to ``target_ids[i]``, in this order, stopping at the first failure.

    ``keys`` are there if either end is the disk. Both ends are pinned until the result is taken.
    """

    number: int
    source: Tier
    target: Tier
    source_ids: Sequence[int]
    target_ids: Sequence[int]
    keys: Sequence[BlockKey] = ()


@dataclass(frozen=True, slots=True)
class TransferResult:
    """``num_done`` blocks arrived, the leading ones; ``seconds`` from the order to its end.
    ``is_corrupt``: the next one is not what had been written."""

    number: int
    num_done: int
    seconds: float
    error: str = ""
    is_corrupt: bool = False


class TransferExecutor(Protocol):
    """Carries orders out beside the engine. All methods are called by the engine's thread and
    return at once; each order has exactly one result, in any order."""

    def submit(self, order: TransferOrder) -> None: ...

    def delete(self, tier: Tier, block_ids: Sequence[int]) -> None:
        """The blocks are given up: nothing of them may be found there. Takes place before any
        order that is submitted later."""
        ...

    def take_results(self) -> list[TransferResult]: ...

    def close(self) -> None:
        """Finish what was ordered, within a bounded time."""
        ...


@dataclass(slots=True, eq=False)
class TransferJob:
    """One order as the tree sees it: which nodes it copies, and the ids they get.

    ``targets`` is in the order of the transfer. A node that is split while it is being copied
    stands there twice, its two halves one after the other. ``frees_source``: the copies at the
    source are given up once the job is done, to make room.
    """

    order: TransferOrder
    targets: dict[RadixNode, array[int]]
    started_s: float = 0.0
    frees_source: bool = False
    is_pending: bool = True
    has_failed: bool = False
    is_overdue: bool = False

    def split(self, node: RadixNode, upper: RadixNode, num_blocks: int) -> None:
        """``upper`` now stands for the first ``num_blocks`` blocks of ``node``."""
        targets: dict[RadixNode, array[int]] = {}
        for key, ids in self.targets.items():
            if key is node:
                targets[upper], targets[node] = ids[:num_blocks], ids[num_blocks:]
            else:
                targets[key] = ids
        self.targets = targets
