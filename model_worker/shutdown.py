"""How a worker process is asked to end, by signals or by the loss of its parent.

Owns the two stages: the first SIGTERM or SIGINT drains, the second ends at once, and so does a
parent that is gone, since nobody is left to read an answer. Knows nothing of what is drained.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

# A step cannot be interrupted from outside; past this the process is ended under it.
GRACE_S = 10.0
EXIT_ABRUPT = 1


class Shutdown:
    """``is_draining`` and ``is_immediate`` are read by the engine loop between steps."""

    def __init__(self) -> None:
        self.is_draining = False
        self.is_immediate = False
        self._wake: Callable[[], None] | None = None

    def install(self) -> None:
        """Take over SIGTERM and SIGINT. Call it from the main thread."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def serving(self, wake: Callable[[], None]) -> None:
        """From here on a signal drains; before, there is nothing to drain and it just ends."""
        self._wake = wake

    def parent_gone(self) -> None:
        """End at once; called from the thread that watches the parent."""
        self._end_now()
        if self._wake is None:
            os._exit(EXIT_ABRUPT)
        self._wake()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._wake is None:
            raise SystemExit(EXIT_ABRUPT)
        if self.is_draining:
            self._end_now()
        self.is_draining = True
        self._wake()

    def _end_now(self) -> None:
        self.is_draining = True
        self.is_immediate = True
        timer = threading.Timer(GRACE_S, os._exit, (EXIT_ABRUPT,))
        timer.daemon = True
        timer.start()
