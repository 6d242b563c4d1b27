"""What is counted of sessions.

Owns the names. Knows no session's id, text or tokens.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

__all__ = ["SessionMetrics"]


class SessionMetrics:
    """Used from the event loop alone."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._turns = Counter(
            "headstart_session_turns",
            "Requests of sessions, by whether the last answer's ids were taken over.",
            ("history",),
            registry=registry,
        )
        for history in ("exact", "retokenized"):
            self._turns.labels(history)
        self.conflicts = Counter(
            "headstart_session_conflicts",
            "Turns that ended after another turn of their session had changed it.",
            registry=registry,
        )
        self.store_errors = Counter(
            "headstart_session_store_errors",
            "Calls for a session that the metadata store did not answer.",
            registry=registry,
        )
        self.histories_given_up = Counter(
            "headstart_session_histories_given_up",
            "Histories given up for the limit on their size.",
            registry=registry,
        )
        self.drops_given_up = Counter(
            "headstart_session_drops_given_up",
            "Deleted prefixes that a worker held to the last and that eviction is left to remove.",
            registry=registry,
        )
        self.sessions = Gauge(
            "headstart_sessions", "Sessions that this gateway keeps track of.", registry=registry
        )
        self.history_bytes = Gauge(
            "headstart_session_history_bytes", "Size of their histories.", registry=registry
        )

    def turn(self, history: str) -> None:
        self._turns.labels(history).inc()
