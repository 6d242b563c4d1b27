"""The order of work on a device that works beside the host.

Owns the seam between what is queued in order and what may run at once, and its CUDA form. Knows
nothing of what is queued.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import torch

MarkT = TypeVar("MarkT")


class SideStream(Protocol[MarkT]):
    """A queue whose work is done in order, beside that of other queues."""

    def use(self) -> AbstractContextManager[object]:
        """What is queued inside goes here."""
        ...

    def mark(self) -> MarkT:
        """The point that all that is queued so far has passed."""
        ...

    def wait(self, mark: MarkT) -> None:
        """Nothing queued later begins before another queue has passed ``mark``."""
        ...

    def synchronize(self) -> None:
        """The calling thread waits for all that is queued."""
        ...


class CudaStream:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def use(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return context

    def mark(self) -> torch.cuda.Event:
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        self._stream.wait_event(mark)

    def synchronize(self) -> None:
        self._stream.synchronize()
