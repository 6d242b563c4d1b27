"""The host tier: payloads of blocks in plain memory.

Owns the memory, which is a hard cap: it is reserved at construction and taken from the system page
by page as blocks are first stored. Knows nothing of what a payload is or of who owns a block.
"""

from __future__ import annotations

import numpy as np
import torch

from cache_store.tiers.codec import Payload


class HostTier:
    """``num_blocks`` payloads of ``payload_bytes``; pinned where a GPU copies to and from it."""

    def __init__(self, num_blocks: int, payload_bytes: int, *, is_pinned: bool) -> None:
        """Raises MemoryError or RuntimeError when the host has no room."""
        self.num_blocks = num_blocks
        shape = (num_blocks, payload_bytes)
        if is_pinned:
            memory = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
            self._payloads: np.ndarray = memory.numpy()
        else:
            self._payloads = np.empty(shape, dtype=np.uint8)

    def payload(self, block_id: int) -> Payload:
        """The block's bytes, to be read or written in place."""
        row: Payload = self._payloads[block_id]
        return row
