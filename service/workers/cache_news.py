"""What a worker's cache has told its gateway, and those who listen.

Owns the news and its delivery. Knows nothing of links, nor of what is made of the news.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cache_store.events import CacheEvent

_log = logging.getLogger("headstart.workers")


@dataclass(frozen=True, slots=True)
class CacheNews:
    """Events in the order in which they happened; hints, never proof (cache_store.events)."""

    worker_id: str
    epoch: int  # of the worker's life in which they happened
    events: Sequence[CacheEvent]  # at least one


CacheListener = Callable[[CacheNews], None]


class CacheNewsBoard:
    """Those who listen to one worker's cache. Belongs to one event loop."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._listeners: list[CacheListener] = []

    def add_listener(self, listener: CacheListener) -> None:
        self._listeners.append(listener)

    def tell(self, epoch: int, events: Sequence[CacheEvent]) -> None:
        """No events are no news."""
        if not events:
            return
        news = CacheNews(self._worker_id, epoch, events)
        for listener in self._listeners:
            try:
                listener(news)
            except Exception:  # whoever listens must not keep outputs from their streams
                _log.exception("a listener to the cache of worker %s failed", self._worker_id)
