"""The host tier: payloads of blocks in plain memory.

Owns the memory, which is a hard cap. It is reserved at construction; its pages are taken from the
system in the background from then on, since the first touch of a page can cost ten times the copy
of a block into it. Knows nothing of what a payload is or of who owns a block.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time

import numpy as np
import torch
from numpy.typing import NDArray

_MADV_POPULATE_WRITE = 23  # Linux 5.14: takes pages without changing what is in them
_STEP_BYTES = 8 * 2**20


class HostTier:
    """``num_blocks`` payloads of ``payload_bytes``; pinned where a GPU copies to and from it."""

    def __init__(self, num_blocks: int, payload_bytes: int, *, is_pinned: bool) -> None:
        """Raises MemoryError, OSError or RuntimeError when the host has no room."""
        self.num_blocks = num_blocks
        memory = np.frombuffer(mmap.mmap(-1, num_blocks * payload_bytes), dtype=np.uint8)
        if is_pinned:
            _pin(memory)
        else:
            threading.Thread(
                target=_take_pages, args=(memory,), name="host-tier-pages", daemon=True
            ).start()
        self.payloads: NDArray[np.uint8] = memory.reshape(num_blocks, payload_bytes)
        """(blocks, payload_bytes), to be read and written in place."""


def _pin(memory: np.ndarray) -> None:
    """Take all pages and let the GPU copy from and to them by itself, for as long as the process
    lives. Torch's own pinned memory comes in powers of two, which could be twice what was asked
    for."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
    torch.cuda.check_error(int(status))


def _take_pages(memory: np.ndarray) -> None:
    """Have all pages of ``memory`` (page-aligned) there, at half of one core's time.

    Ends at once where the system cannot do it, or has no more pages: they then come as they are
    used, or the store into them fails as it would have anyway.
    """
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start in range(0, memory.nbytes, _STEP_BYTES):
        length = min(_STEP_BYTES, memory.nbytes - start)
        began = time.perf_counter()
        if madvise(memory.ctypes.data + start, length, _MADV_POPULATE_WRITE) != 0:
            return
        time.sleep(time.perf_counter() - began)
