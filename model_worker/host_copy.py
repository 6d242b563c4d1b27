"""Small arrays between the host and where a model computes.

Owns the way they go: on CUDA through pinned memory and in stream order, so that the host waits for
nothing but a result. Knows nothing of what they are.
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


class StreamMark:
    """Passed once all that a device's current stream has to do so far is done."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class ToHost:
    """A tensor on its way to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
        self._arrived = StreamMark(tensor.device)

    def wait(self) -> torch.Tensor:
        """The tensor. Once it is here, all that was queued before it is done as well."""
        self._arrived.wait()
        return self._tensor
