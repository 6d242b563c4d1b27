"""The block tables of a step as one array, converted once and extended as they grow.

A long table hardly changes between two steps, and turning a list of ints into an array costs thirty
times what comparing it does. Owns the arrays of the last step's tables, told apart by content:
nothing is taken over on a list's identity alone. Knows nothing of devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model_worker.attention.metadata import SequenceSpan

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class FlatTables:
    """All tables of a step one after another: span i's begins at ``starts[i]``.

    ``are_known``: each table is one of the last step's, unchanged or longer.
    """

    block_ids: Int32Array
    starts: Int32Array
    are_known: bool


@dataclass(frozen=True, slots=True)
class _Table:
    block_ids: Sequence[int]
    array: Int32Array


class BlockTables:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._tables: dict[int, _Table] = {}

    def flatten(self, spans: Sequence[SequenceSpan]) -> FlatTables:
        """The blocks that hold the spans' context and new tokens, span by span."""
        tables: dict[int, _Table] = {}
        arrays = []
        are_known = True
        for span in spans:
            num_blocks = -(-span.kv_len // self._block_size)
            key = id(span.block_ids)
            table = self._extend(self._tables.get(key), span.block_ids, num_blocks)
            if table is None:
                are_known = False
                ids = span.block_ids[:num_blocks]
                table = _Table(ids, np.array(ids, dtype=np.int32))
            tables[key] = table
            arrays.append(table.array[:num_blocks])
        self._tables = tables
        lengths = [len(array) for array in arrays]
        starts = np.zeros(len(arrays), dtype=np.int32)
        np.cumsum(lengths[:-1], out=starts[1:])
        flat = np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int32)
        return FlatTables(flat, starts, are_known)

    @staticmethod
    def _extend(table: _Table | None, block_ids: Sequence[int], num_blocks: int) -> _Table | None:
        """The table with at least ``num_blocks`` blocks; None if it is another's."""
        if table is None:
            return None
        known = min(len(table.block_ids), num_blocks)
        if table.block_ids[:known] != block_ids[:known]:
            return None
        if known == num_blocks:
            return table
        added = np.array(block_ids[known:num_blocks], dtype=np.int32)
        return _Table(block_ids[:num_blocks], np.concatenate([table.array, added]))
