"""Whether something that can be out of reach is worth another try.

Owns the state (closed, or open after failures in a row) and how long it was open. Whoever opens it
tries by himself whether to close it. Knows nothing of what is tried.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Breaker"]


class Breaker:
    """``clock`` is in seconds and never goes back."""

    def __init__(self, max_failures: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_failures = max_failures
        self._clock = clock
        self._num_failures = 0
        self._opened_at: float | None = None
        self._open_s = 0.0

    @property
    def is_open(self) -> bool:
        return self._opened_at is not None

    @property
    def open_s(self) -> float:
        """Seconds it was open so far, the present time included."""
        return self._open_s + (0.0 if self._opened_at is None else self._clock() - self._opened_at)

    def fail(self) -> bool:
        """Count a failure; whether this one opened the breaker."""
        self._num_failures += 1
        return self._num_failures >= self._max_failures and self.open()

    def open(self) -> bool:
        """Whether it was closed until now."""
        if self._opened_at is not None:
            return False
        self._opened_at = self._clock()
        return True

    def succeed(self) -> None:
        """Forget the failures in a row; an open breaker stays open until :meth:`close`."""
        self._num_failures = 0

    def close(self) -> float:
        """Seconds it was open."""
        seconds = 0.0 if self._opened_at is None else self._clock() - self._opened_at
        self._open_s += seconds
        self._opened_at = None
        self._num_failures = 0
        return seconds
