"""Blocks to and from a device with memory of its own, through two buffers there.

Owns the overlap: while one buffer is copied over the link, the other is coded, in large steps and
without the host waiting before the end. The host's memory is read and written in place. Knows
nothing of what drives the device: it queues work on two streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic

import numpy as np
import torch
from numpy.typing import NDArray

from cache_store.tiers.codec import BlockCodec, PayloadRows
from cache_store.tiers.device import DeviceTier
from cache_store.tiers.payload_coder import payload_coder
from cache_store.tiers.streams import MarkT, SideStream

# Of one buffer: some hundred microseconds of the fastest links, against which the cost of queueing
# a step is small.
STEP_BYTES = 16 * 2**20


class StagedBlocks(Generic[MarkT]):
    def __init__(
        self,
        tier: DeviceTier,
        codec: BlockCodec,
        *,
        copying: SideStream[MarkT],
        coding: SideStream[MarkT],
    ) -> None:
        self._device = tier.keys.device
        self._coder = payload_coder(tier, codec)
        self._payload_bytes = codec.payload_bytes
        self._copying = copying
        self._coding = coding
        self.batch_blocks = min(max(1, STEP_BYTES // codec.payload_bytes), tier.num_blocks)
        shape = (self.batch_blocks, codec.payload_bytes)
        self._buffers = [
            torch.empty(shape, dtype=torch.uint8, device=self._device) for _ in range(2)
        ]

    def new_rows(self, num_rows: int) -> NDArray[np.uint8]:
        is_pinned = self._device.type == "cuda"
        shape = (num_rows, self._payload_bytes)
        rows: NDArray[np.uint8] = torch.empty(
            shape, dtype=torch.uint8, pin_memory=is_pinned
        ).numpy()
        return rows

    @torch.inference_mode()
    def store(self, block_ids: Sequence[int], rows: PayloadRows) -> None:
        with self._until_done():
            copied: list[MarkT] = []
            for number, step in enumerate(self._steps(len(block_ids))):
                buffer = self._buffers[number % 2][: step.stop - step.start]
                with self._coding.use():
                    if number >= 2:
                        self._coding.wait(copied[number - 2])
                    self._coder.encode(self._ids(block_ids[step]), buffer)
                with self._copying.use():
                    self._copying.wait(self._coding.mark())
                    for memory, part in _pairs(rows.memory, rows.row_ids[step], buffer):
                        memory.copy_(part, non_blocking=True)
                copied.append(self._copying.mark())

    @torch.inference_mode()
    def load(self, rows: PayloadRows, block_ids: Sequence[int]) -> None:
        with self._until_done():
            decoded: list[MarkT] = []
            for number, step in enumerate(self._steps(len(block_ids))):
                buffer = self._buffers[number % 2][: step.stop - step.start]
                with self._copying.use():
                    if number >= 2:
                        self._copying.wait(decoded[number - 2])
                    for memory, part in _pairs(rows.memory, rows.row_ids[step], buffer):
                        part.copy_(memory, non_blocking=True)
                with self._coding.use():
                    self._coding.wait(self._copying.mark())
                    self._coder.decode(buffer, self._ids(block_ids[step]))
                decoded.append(self._coding.mark())

    @contextmanager
    def _until_done(self) -> Iterator[None]:
        """Waits for both streams in any case: what failed half-way is still being copied, too."""
        try:
            yield
        finally:
            self._copying.synchronize()
            self._coding.synchronize()

    def _steps(self, num_blocks: int) -> Iterator[slice]:
        for start in range(0, num_blocks, self.batch_blocks):
            yield slice(start, min(start + self.batch_blocks, num_blocks))

    def _ids(self, block_ids: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor(list(block_ids), dtype=torch.int64)
        if self._device.type != "cuda":
            return ids
        return ids.pin_memory().to(self._device, non_blocking=True)


def _pairs(
    memory: NDArray[np.uint8], row_ids: Sequence[int], buffer: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The rows of ``memory`` and, of ``buffer``, what belongs to them: one pair for each stretch of
    consecutive rows."""
    rows = torch.from_numpy(memory)
    first = 0
    for place in range(1, len(row_ids) + 1):
        if place == len(row_ids) or row_ids[place] != row_ids[place - 1] + 1:
            start = row_ids[first]
            yield rows[start : start + place - first], buffer[first:place]
            first = place
