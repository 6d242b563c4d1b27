"""The latest batches of a stream, for subscribers that have missed some.

Owns the bounds: by number and by bytes, whichever is reached first. Knows nothing of what a batch
says or who asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

__all__ = ["ReplayLog"]


class ReplayLog:
    """Batches are numbered from ``first`` on without gaps; the oldest go first, and the last one
    stays."""

    def __init__(self, max_batches: int, max_bytes: int, first: int = 0) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._batches: deque[tuple[int, bytes]] = deque()
        self._num_bytes = 0
        self._next = first

    def append(self, payload: bytes) -> int:
        """The number that it has got."""
        number = self._next
        self._next += 1
        self._batches.append((number, payload))
        self._num_bytes += len(payload)
        while len(self._batches) > 1 and self._is_too_much:
            self._num_bytes -= len(self._batches.popleft()[1])
        return number

    def since(self, number: int) -> Iterator[tuple[int, bytes]]:
        """Those from ``number`` on that are still here."""
        return (batch for batch in self._batches if batch[0] >= number)

    @property
    def _is_too_much(self) -> bool:
        return len(self._batches) > self._max_batches or self._num_bytes > self._max_bytes
