"""A work plan in device memory: one buffer, one copy, addresses that stay.

Owns the layout of the int32 buffer that the kernels read: counts first, then one section for each
array, each of a capacity fixed at construction, so that a captured launch finds the next step's
plan where it found this one's. Knows nothing of what the numbers mean.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np
import torch

from model_worker.attention.work_plan import ITEM_FIELDS, WorkPlan

_ALIGNMENT = 4  # in ints: kernels are compiled for pointers at multiples of 16 bytes
_NUM_COUNTS = 4


@dataclass(frozen=True, slots=True)
class PlanCapacity:
    """The most of each that a plan holds; ``rows``: new tokens; ``query_rows``: with repetitions
    in shared prefixes; ``parts``: rows of partial results; ``table_blocks``: over all tables."""

    small: int
    large: int
    query_rows: int
    rows: int
    parts: int
    table_blocks: int

    @classmethod
    def of(cls, work: WorkPlan) -> PlanCapacity:
        return cls(
            small=len(work.small),
            large=len(work.large),
            query_rows=len(work.query_rows),
            rows=work.num_rows,
            parts=work.num_parts,
            table_blocks=len(work.tables),
        )

    def holds(self, other: PlanCapacity) -> bool:
        return all(need <= have for need, have in zip(astuple(other), astuple(self), strict=True))


class PlanBuffer:
    """``num_small``, ``num_large`` and ``num_rows`` are int32 tensors of one element; the other
    tensors are those of the WorkPlan. Their contents hold from the last ``fill``."""

    def __init__(self, capacity: PlanCapacity, device: torch.device) -> None:
        self.capacity = capacity
        sizes = (
            _NUM_COUNTS * _ALIGNMENT,
            capacity.small * ITEM_FIELDS,
            capacity.large * ITEM_FIELDS,
            capacity.query_rows,
            capacity.rows,
            capacity.rows + 1,
            capacity.parts,
            capacity.table_blocks,
        )
        padded = [-(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        self._offsets = [0, *np.cumsum(padded).tolist()]
        self._device = device
        self._memory = torch.zeros(self._offsets[-1], dtype=torch.int32, device=device)
        counts, *sections = (
            self._memory[start : start + size]
            for start, size in zip(self._offsets, padded, strict=False)
        )
        self.num_small = counts[0:1]
        self.num_large = counts[_ALIGNMENT : _ALIGNMENT + 1]
        self.num_rows = counts[2 * _ALIGNMENT : 2 * _ALIGNMENT + 1]
        self.small, self.large, self.query_rows, self.row_limits = sections[:4]
        self.part_starts, self.part_ids, self.tables = sections[4:]

    def fill(self, work: WorkPlan) -> None:
        """In stream order; the host waits for nothing. The plan must fit the capacity."""
        assert self.capacity.holds(PlanCapacity.of(work))
        arrays = (
            np.array([len(work.small), 0, 0, 0, len(work.large), 0, 0, 0, work.num_rows]),
            work.small.reshape(-1),
            work.large.reshape(-1),
            work.query_rows,
            work.row_limits,
            work.part_starts,
            work.part_ids,
            work.tables,
        )
        used = self._offsets[len(arrays) - 1] + len(work.tables)
        host = torch.zeros(used, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        view = host.numpy()
        for offset, array in zip(self._offsets, arrays, strict=False):
            view[offset : offset + len(array)] = array
        # The allocator of pinned memory keeps the page until the stream has read it.
        self._memory[:used].copy_(host, non_blocking=True)
