"""The gateway's metrics: what was measured of requests.

Owns the registry, which belongs to the app that made it and never to the process, and one recorder
per request. Metric names are stable and have the prefix ``headstart_``. What workers report of
themselves is ``service.worker_metrics``. Knows no prompt and no text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from service.recent import RecentSamples
from service.sessions.metrics import SessionMetrics
from service.worker_metrics import QueueReading, WorkerCollector, WorkerReading

__all__ = ["CONTENT_TYPE", "GatewayMetrics", "RequestRecorder"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 120.0),
)
_INTERVAL_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0),
)
CACHE_SOURCES = ("device", "host", "disk")
_REQUEST_BUCKETS = (*_FIRST_TOKEN_BUCKETS, 300.0, 600.0)


class GatewayMetrics:
    """Used from the event loop alone; scraping it included."""

    def __init__(
        self,
        workers: Callable[[], Sequence[WorkerReading]],
        queue: Callable[[], QueueReading],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        self.started_at = clock()
        self.recent = RecentSamples()
        self.registry = CollectorRegistry()
        self._first_token = self._histogram(
            "time_to_first_token_seconds",
            "From the request's body read to its first content written.",
            _FIRST_TOKEN_BUCKETS,
            ("cache",),
        )
        self._first_token_of = {
            is_hit: self._first_token.labels("hit" if is_hit else "miss")
            for is_hit in (False, True)
        }
        self._interval = self._histogram(
            "inter_token_latency_seconds", "Between two output tokens.", _INTERVAL_BUCKETS
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds",
            "From the request's body read to the end of its answer.",
            _REQUEST_BUCKETS,
        )
        self._queue_time = self._histogram(
            "request_queue_time_seconds",
            "From the worker's receipt of a request to its first admission.",
            _REQUEST_BUCKETS,
        )
        self._queries = self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._cached = self._counter(
            "prompt_tokens_cached", "Prompt tokens that came out of a cache.", ("source",)
        )
        self._cached_in = {source: self._cached.labels(source) for source in CACHE_SOURCES}
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of admitted requests.")
        self._generation_tokens = self._counter(
            "generation_tokens", "Output tokens that counted in a request's usage."
        )
        self._requests = self._counter(
            "requests", "Requests by how they ended: stop, length, abort or error.", ("outcome",)
        )
        for outcome in ("stop", "length", "abort", "error"):
            self._requests.labels(outcome)
        self.sessions = SessionMetrics(self.registry)
        self.registry.register(WorkerCollector(workers, queue))

    def record(
        self, num_prompt_tokens: int, received_at: float, *, counts_prompt: bool = True
    ) -> RequestRecorder:
        """``received_at`` is when the body had been read, by :attr:`clock`. A further sample of a
        prompt that was counted already counts no prompt tokens."""
        return RequestRecorder(self, num_prompt_tokens, received_at, counts_prompt)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)

    def total(self, name: str, labels: Mapping[str, str] | None = None) -> float:
        """The present value of a counter, by its exported name; 0 if there is none."""
        return self.registry.get_sample_value(f"headstart_{name}", dict(labels or {})) or 0.0

    def _histogram(
        self, name: str, text: str, buckets: Sequence[float], labels: Sequence[str] = ()
    ) -> Histogram:
        return Histogram(
            f"headstart_{name}", text, labels, buckets=tuple(buckets), registry=self.registry
        )

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"headstart_{name}", text, labels, registry=self.registry)


class RequestRecorder:
    """What is measured of one request. A call too many, or after the end, changes nothing."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        num_prompt_tokens: int,
        received_at: float,
        counts_prompt: bool,
    ) -> None:
        self._metrics = metrics
        self._counts_prompt = counts_prompt
        self._num_prompt_tokens = num_prompt_tokens
        self._received_at = received_at
        self._num_cached_tokens: int | None = None
        self._last_token_at: float | None = None
        self.first_text_s: float | None = None  # seconds from the body read
        self._has_ended = False

    def admitted(
        self,
        num_cached_tokens: int,
        queue_s: float,
        num_host_tokens: int = 0,
        num_disk_tokens: int = 0,
    ) -> None:
        """Counted once per request, at its first admission. Of the cached tokens those of lower
        tiers are named; the others were on the device."""
        if self._num_cached_tokens is not None:
            return
        self._num_cached_tokens = num_cached_tokens
        metrics = self._metrics
        metrics._queue_time.observe(queue_s)
        if not self._counts_prompt:
            return
        metrics._queries.inc(self._num_prompt_tokens)
        metrics._hits.inc(num_cached_tokens)
        num_below = num_host_tokens + num_disk_tokens
        in_tier = (num_cached_tokens - num_below, num_host_tokens, num_disk_tokens)
        for source, num_tokens in zip(CACHE_SOURCES, in_tier, strict=True):
            metrics._cached_in[source].inc(num_tokens)
        metrics._prompt_tokens.inc(self._num_prompt_tokens)
        metrics.recent.add_admission(metrics.clock(), self._num_prompt_tokens, num_cached_tokens)

    def tokens(self, num_tokens: int) -> None:
        """Output tokens that have just arrived together and that count in the usage."""
        if num_tokens == 0:
            return
        metrics = self._metrics
        now = metrics.clock()
        num_intervals = num_tokens if self._last_token_at is not None else num_tokens - 1
        if num_intervals:
            start = now if self._last_token_at is None else self._last_token_at
            seconds = (now - start) / num_intervals
            for _ in range(num_intervals):
                metrics._interval.observe(seconds)
                metrics.recent.add_interval(now, seconds)
        self._last_token_at = now
        metrics._generation_tokens.inc(num_tokens)

    def text(self) -> None:
        """Content is about to be written."""
        if self.first_text_s is not None:
            return
        metrics = self._metrics
        now = metrics.clock()
        self.first_text_s = now - self._received_at
        is_hit = bool(self._num_cached_tokens)
        metrics._first_token_of[is_hit].observe(self.first_text_s)
        metrics.recent.add_first_token(now, self.first_text_s, is_hit=is_hit)

    def end(self, outcome: str) -> None:
        """``outcome``: stop | length | abort | error."""
        if self._has_ended:
            return
        self._has_ended = True
        if outcome in ("stop", "length"):
            self.text()  # an answer without any text has its end for first content
            self._metrics._e2e.observe(self._metrics.clock() - self._received_at)
        self._metrics._requests.labels(outcome).inc()
