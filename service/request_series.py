"""The time series that a request adds to: of its tenant, of hits or of misses.

Owns the names, labels and buckets of what is measured of requests. A request looks its series up
once; a token then costs no look-up. Knows nothing of when anything is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram

__all__ = ["FIRST_TOKEN_BUCKETS", "INTERVAL_BUCKETS", "RequestSeries", "SeriesFamilies"]

FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 120.0),
)
INTERVAL_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0),
)
_REQUEST_BUCKETS = (*FIRST_TOKEN_BUCKETS, 300.0, 600.0)
_SOURCES = ("device", "host", "disk")
_OUTCOMES = ("stop", "length", "abort", "error")


@dataclass(frozen=True, slots=True)
class RequestSeries:
    """Of one tenant. The histograms are those of hits or of misses, the counters of both."""

    first_token: Histogram
    interval: Histogram
    e2e: Histogram
    queue: Histogram
    load: Histogram
    prefill: Histogram
    queries: Counter
    hits: Counter
    cached_in: Mapping[str, Counter]  # by source
    prompt_tokens: Counter
    generation_tokens: Counter
    saved: Counter
    ended: Mapping[str, Counter]  # by outcome


class SeriesFamilies:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._made: dict[tuple[str, bool], RequestSeries] = {}
        self._make_histograms()
        self._make_counters()

    def _make_histograms(self) -> None:
        self._first_token = self._histogram(
            "time_to_first_token_seconds",
            "From the request's body read to its first content written.",
            FIRST_TOKEN_BUCKETS,
        )
        self._interval = self._histogram(
            "inter_token_latency_seconds", "Between two output tokens.", INTERVAL_BUCKETS
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds",
            "From the request's body read to the end of its answer.",
            _REQUEST_BUCKETS,
        )
        self._queue = self._histogram(
            "request_queue_time_seconds",
            "From the worker's receipt of a request to its first admission.",
            _REQUEST_BUCKETS,
        )
        self._load = self._histogram(
            "request_load_time_seconds",
            "Wait of admitted requests for their blocks to come from lower tiers.",
            _REQUEST_BUCKETS,
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds",
            "From a request's first step to its first token.",
            _REQUEST_BUCKETS,
        )

    def _make_counters(self) -> None:
        self._queries = self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._cached = self._counter(
            "prompt_tokens_cached", "Prompt tokens that came out of a cache.", "source"
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of admitted requests.")
        self._generation_tokens = self._counter(
            "generation_tokens", "Output tokens that counted in a request's usage."
        )
        self._saved = self._counter(
            "prefill_seconds_saved",
            "Cached prompt tokens, each at what prefilling a token took the worker of late.",
        )
        self._requests = self._counter(
            "requests", "Requests by how they ended: stop, length, abort or error.", "outcome"
        )

    def of(self, tenant: str, *, is_hit: bool) -> RequestSeries:
        """``tenant`` is a label, of which there are not many."""
        series = self._made.get((tenant, is_hit))
        if series is None:
            series = self._made[tenant, is_hit] = self._make(tenant, "hit" if is_hit else "miss")
        return series

    def _make(self, tenant: str, cache: str) -> RequestSeries:
        return RequestSeries(
            first_token=self._first_token.labels(cache, tenant),
            interval=self._interval.labels(cache, tenant),
            e2e=self._e2e.labels(cache, tenant),
            queue=self._queue.labels(cache, tenant),
            load=self._load.labels(cache, tenant),
            prefill=self._prefill.labels(cache, tenant),
            queries=self._queries.labels(tenant),
            hits=self._hits.labels(tenant),
            cached_in={source: self._cached.labels(source, tenant) for source in _SOURCES},
            prompt_tokens=self._prompt_tokens.labels(tenant),
            generation_tokens=self._generation_tokens.labels(tenant),
            saved=self._saved.labels(tenant),
            ended={outcome: self._requests.labels(outcome, tenant) for outcome in _OUTCOMES},
        )

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(
            f"headstart_{name}",
            text,
            ("cache", "tenant"),
            buckets=tuple(buckets),
            registry=self._registry,
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"headstart_{name}", text, (*labels, "tenant"), registry=self._registry)
