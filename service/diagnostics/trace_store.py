"""The traces of the latest requests, as long as they may be kept.

Owns the bounds: by number, by age and by bytes, whichever is reached first. In memory alone. Knows
nothing of what a trace says.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from service.diagnostics.trace import RequestTrace

__all__ = ["MAX_AGE_S", "MAX_BYTES", "MAX_TRACES", "TraceStore"]

MAX_TRACES = 1000
MAX_AGE_S = 3600.0
MAX_BYTES = 64 * 2**20


class TraceStore:
    """``clock`` counts seconds. Used from one event loop. What is too old or too much goes, the
    oldest first."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        max_traces: int = MAX_TRACES,
        max_age_s: float = MAX_AGE_S,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._clock = clock
        self._max_traces = max_traces
        self._max_age_s = max_age_s
        self._max_bytes = max_bytes
        self._traces: OrderedDict[int, tuple[RequestTrace, int]] = OrderedDict()
        self._by_id: dict[str, int] = {}
        self._num_added = 0
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._traces)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def add(self, trace: RequestTrace) -> None:
        self._num_added += 1
        trace.number = self._num_added
        self._traces[trace.number] = trace, trace.num_bytes
        self._num_bytes += trace.num_bytes
        self._by_id[trace.prompt.request_id] = trace.number
        self._prune()

    def grown(self, trace: RequestTrace) -> None:
        """It holds more than when it was added."""
        held = self._traces.get(trace.number)
        if held is not None and held[0] is trace:
            self._num_bytes += trace.num_bytes - held[1]
            self._traces[trace.number] = trace, trace.num_bytes
            self._prune()

    def get(self, request_id: str) -> RequestTrace | None:
        self._prune()
        number = self._by_id.get(request_id)
        return None if number is None else self._traces[number][0]

    def latest_first(self) -> Iterator[RequestTrace]:
        """Not to be changed meanwhile."""
        self._prune()
        return (trace for trace, _ in reversed(self._traces.values()))

    def forget(self, is_meant: Callable[[RequestTrace], bool]) -> list[RequestTrace]:
        """Drop those that ``is_meant`` is true of, and return them."""
        meant = [trace for trace, _ in self._traces.values() if is_meant(trace)]
        for trace in meant:
            self._drop(trace.number)
        return meant

    def _prune(self) -> None:
        oldest_allowed = self._clock() - self._max_age_s
        while self._traces:
            number, (trace, _) = next(iter(self._traces.items()))
            is_too_much = len(self._traces) > self._max_traces or self._num_bytes > self._max_bytes
            if not is_too_much and trace.received_at >= oldest_allowed:
                return
            self._drop(number)

    def _drop(self, number: int) -> None:
        trace, num_bytes = self._traces.pop(number)
        self._num_bytes -= num_bytes
        if self._by_id.get(trace.prompt.request_id) == number:
            del self._by_id[trace.prompt.request_id]
