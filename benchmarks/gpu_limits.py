"""What the device itself can do: memory, arithmetic and the link to the host, as measured here.

Owns the loops and their sizes. A figure is the best of some rounds: a limit is what can be reached.
Knows nothing of models.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

ROUNDS = 5


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Bytes per second read from the device's memory and copied from pinned host memory to it, and
    operations per second of a matrix product in the model's type."""

    memory_bytes_s: float
    link_bytes_s: float
    product_operations_s: float


def measure_limits(device: torch.device, dtype: torch.dtype, *, scale: int) -> DeviceLimits:
    """``scale`` 1 is for a GPU; larger numbers shrink each loop by as much."""
    return DeviceLimits(
        memory_bytes_s=_memory(device, 2**32 // scale),
        link_bytes_s=_link(device, 2**30 // scale),
        product_operations_s=_product(device, dtype, max(64, 8192 // scale)),
    )


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def best_seconds(device: torch.device, function: Callable[[], object]) -> float:
    """Of one call, the device waited for."""
    function()
    best = float("inf")
    for _ in range(ROUNDS):
        wait_for(device)
        started = time.perf_counter()
        function()
        wait_for(device)
        best = min(best, time.perf_counter() - started)
    return best


def _memory(device: torch.device, num_bytes: int) -> float:
    """The better of a sum, which reads only, and a copy, which reads and writes."""
    numbers = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    read = num_bytes / best_seconds(device, numbers.sum)
    half = numbers[: len(numbers) // 2]
    target = torch.empty_like(half)
    copied = num_bytes / best_seconds(device, lambda: target.copy_(half))
    return max(read, copied)


def _link(device: torch.device, num_bytes: int) -> float:
    is_cuda = device.type == "cuda"
    source = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return num_bytes / best_seconds(device, lambda: target.copy_(source, non_blocking=True))


def _product(device: torch.device, dtype: torch.dtype, size: int) -> float:
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / best_seconds(device, lambda: left @ right)
