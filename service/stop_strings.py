"""Finds stop strings in text that arrives in pieces.

Owns the text that might be the beginning of a stop string, and holds it back. Knows nothing of
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopStrings"]


class StopStrings:
    """The stop strings of one answer; ``matched`` is the one that was found, if any."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that certainly belongs to the answer. After a match, nothing more does."""
        if not self._stop or self.matched is not None:
            return "" if self.matched is not None else text
        self._held += text
        found = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.matched = min(found)
            return self._release(at, keep=False)
        return self._release(self._first_possible_start(), keep=True)

    def finish(self) -> str:
        """What was held back for a stop string that was never completed."""
        return self._release(len(self._held), keep=False)

    def _release(self, at: int, *, keep: bool) -> str:
        text, rest = self._held[:at], self._held[at:]
        self._held = rest if keep else ""
        return text

    def _first_possible_start(self) -> int:
        first = len(self._held)
        for stop in self._stop:
            at = self._held.find(stop[0], max(0, len(self._held) - len(stop) + 1))
            while 0 <= at < first:
                if stop.startswith(self._held[at:]):
                    first = at
                    break
                at = self._held.find(stop[0], at + 1)
        return first
