"""Small arrays from the host to where a model computes.

Owns the way they go: on CUDA through pinned memory and in stream order, so that the host waits for
nothing. Knows nothing of what they are.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """On the CPU the array's own memory, where that is contiguous."""
    tensor = torch.as_tensor(array)
    if device.type == "cpu":
        return tensor
    # The allocator of pinned memory keeps the page until the stream has read it.
    return tensor.pin_memory().to(device, non_blocking=True)
