"""What is known of the latest requests, for who may ask: the facade of this package.

Owns the traces. A tenant sees its own; who sees those of all is the caller's to say. Knows nothing
of HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from service.diagnostics.record import RequestRecord
from service.diagnostics.trace import RequestTrace, TracedPrompt
from service.diagnostics.trace_store import TraceStore

__all__ = ["Diagnostics"]


class Diagnostics:
    """``clock`` is what requests' times are measured with, in seconds. Used from one event loop."""

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._wall = wall
        self._store = TraceStore(clock)
        self._listeners: list[Callable[[RequestTrace], None]] = []

    def add_listener(self, listener: Callable[[RequestTrace], None]) -> None:
        """To be called with each trace, listed or not, that has ended."""
        self._listeners.append(listener)

    @property
    def num_listeners(self) -> int:
        return len(self._listeners)

    def begin(
        self, prompt: TracedPrompt, received_at: float, *, is_listed: bool = True
    ) -> RequestTrace:
        """Of a request that is about to be sent to a worker; listed from now on, unless it is
        a further choice of a prompt, which finds what the first one has computed."""
        started_at = self._wall() - (self._clock() - received_at)
        trace = RequestTrace(prompt, received_at, self._clock, started_at, self._ended)
        if is_listed:
            self._store.add(trace)
        return trace

    def _ended(self, trace: RequestTrace) -> None:
        self._store.grown(trace)
        for listener in self._listeners:
            listener(trace)

    def recent(self, limit: int, tenant: str | None = None) -> list[RequestRecord]:
        """The latest requests, the last one first; of ``tenant`` alone, if given."""
        found: list[RequestRecord] = []
        for trace in self._store.latest_first():
            if len(found) >= limit:
                break
            if tenant is None or trace.prompt.tenant == tenant:
                found.append(trace.record())
        return found

    def forget(self, tenant: str, session: str | None = None) -> None:
        """Drop what is held of ``tenant``, or of one session of it."""
        self._store.forget(
            lambda trace: trace.prompt.tenant == tenant and session in (None, trace.prompt.session)
        )
