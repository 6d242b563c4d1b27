"""The gateway's metrics: what was measured of requests.

Owns the registry, which belongs to the app that made it and never to the process, and one recorder
per request. Metric names are stable and have the prefix ``headstart_``. What workers report of
themselves is ``service.worker_metrics``. Knows no prompt and no text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, generate_latest

from service.errors import GatewayError
from service.life_counters import WorkerReading
from service.recent import RecentSamples
from service.request_series import RequestSeries, SeriesFamilies
from service.running_totals import RunningTotals
from service.sessions.metrics import SessionMetrics
from service.worker_metrics import QueueReading, WorkerCollector
from service.workers.base import StateChange, WorkerState

__all__ = ["CONTENT_TYPE", "GatewayMetrics", "RequestRecorder"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class GatewayMetrics:
    """Used from the event loop alone; scraping it included.

    ``tenant_label`` tells under which name a tenant's figures stand.
    """

    def __init__(
        self,
        workers: Callable[[], Sequence[WorkerReading]],
        queue: Callable[[], QueueReading],
        clock: Callable[[], float] = time.perf_counter,
        tenant_label: Callable[[str], str] = lambda tenant: "",
    ) -> None:
        self.clock = clock
        self.started_at = clock()
        self.recent = RecentSamples()
        self.totals = RunningTotals()
        self.registry = CollectorRegistry()
        self._tenant_label = tenant_label
        self._families = SeriesFamilies(self.registry)
        self._errors = Counter(
            "headstart_request_errors",
            "Errors that requests were answered with, by the type and code that clients are told.",
            ("type", "code"),
            registry=self.registry,
        )
        self._losses = Counter(
            "headstart_worker_losses",
            "Times that a worker was lost: its process ended or its link broke.",
            registry=self.registry,
        )
        self._lost: set[str] = set()
        self.sessions = SessionMetrics(self.registry)
        self.registry.register(WorkerCollector(workers, queue))
        for is_hit in (False, True):
            self.series("", is_hit=is_hit)

    def record(
        self,
        num_prompt_tokens: int,
        received_at: float,
        *,
        counts_prompt: bool = True,
        tenant: str = "",
    ) -> RequestRecorder:
        """``received_at`` is when the body had been read, by :attr:`clock`. A further sample of a
        prompt that was counted already counts no prompt tokens."""
        return RequestRecorder(self, num_prompt_tokens, received_at, counts_prompt, tenant)

    def series(self, tenant: str, *, is_hit: bool) -> RequestSeries:
        return self._families.of(self._tenant_label(tenant), is_hit=is_hit)

    def count_error(self, error: GatewayError) -> None:
        """A request was answered with it, or its stream ended with it."""
        self._errors.labels(error.type, error.code or "").inc()

    def worker_changed(self, change: StateChange) -> None:
        if change.state is not WorkerState.LOST:
            self._lost.discard(change.worker_id)
        elif change.worker_id not in self._lost:  # it may be told once more, with another detail
            self._lost.add(change.worker_id)
            self._losses.inc()

    def exposition(self) -> bytes:
        return generate_latest(self.registry)

    def total(self, name: str, labels: Mapping[str, str] | None = None) -> float:
        """The present sum of a counter or gauge of the gateway's own over the series that have
        ``labels``, by its exported name; 0 if there is none."""
        exported = f"headstart_{name}"
        wanted = dict(labels or {}).items()
        found = self.registry.restricted_registry([exported])
        return sum(
            sample.value
            for family in found.collect()
            for sample in family.samples
            if sample.name == exported and wanted <= sample.labels.items()
        )


class RequestRecorder:
    """What is measured of one request. A call too many, or after the end, changes nothing."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        num_prompt_tokens: int,
        received_at: float,
        counts_prompt: bool,
        tenant: str,
    ) -> None:
        self._metrics = metrics
        self._counts_prompt = counts_prompt
        self._tenant = tenant
        self._series = metrics.series(tenant, is_hit=False)
        self._num_prompt_tokens = num_prompt_tokens
        self._received_at = received_at
        self._num_cached_tokens: int | None = None
        self._last_token_at: float | None = None
        self.first_text_s: float | None = None  # seconds from the body read
        self._has_ended = False

    @property
    def _is_hit(self) -> bool:
        """Whether most of the prompt came out of the cache. A few tokens always do, those that a
        template begins every prompt with: by them all requests would be hits, the slow ones too."""
        return 2 * (self._num_cached_tokens or 0) >= max(self._num_prompt_tokens, 1)

    def admitted(
        self,
        num_cached_tokens: int,
        queue_s: float,
        num_host_tokens: int = 0,
        num_disk_tokens: int = 0,
        *,
        load_s: float | None = None,
        prefill_token_s: float | None = None,
    ) -> None:
        """Counted once per request, at its first admission. Of the cached tokens those of lower
        tiers are named; the others were on the device. ``prefill_token_s`` is what computing a
        token of the prompt would have taken."""
        if self._num_cached_tokens is not None:
            return
        self._num_cached_tokens = num_cached_tokens
        metrics = self._metrics
        series = self._series = metrics.series(self._tenant, is_hit=self._is_hit)
        series.queue.observe(queue_s)
        if num_host_tokens + num_disk_tokens and load_s is not None:
            series.load.observe(load_s)
        if not self._counts_prompt:
            return
        series.queries.inc(self._num_prompt_tokens)
        series.hits.inc(num_cached_tokens)
        num_device_tokens = num_cached_tokens - num_host_tokens - num_disk_tokens
        saved_s = num_cached_tokens * (prefill_token_s or 0.0)
        series.cached_in["device"].inc(num_device_tokens)
        series.cached_in["host"].inc(num_host_tokens)
        series.cached_in["disk"].inc(num_disk_tokens)
        series.prompt_tokens.inc(self._num_prompt_tokens)
        series.saved.inc(saved_s)
        totals = metrics.totals
        totals.queried += self._num_prompt_tokens
        totals.device += num_device_tokens
        totals.host += num_host_tokens
        totals.disk += num_disk_tokens
        totals.saved_s += saved_s
        metrics.recent.add_admission(metrics.clock(), self._num_prompt_tokens, num_cached_tokens)

    def prefilled(self, seconds: float) -> None:
        """The worker has computed the prompt: from its first step to the first token."""
        self._series.prefill.observe(seconds)

    def tokens(self, num_tokens: int) -> None:
        """Output tokens that have just arrived together and that count in the usage."""
        if num_tokens == 0:
            return
        metrics, series = self._metrics, self._series
        now = metrics.clock()
        num_intervals = num_tokens if self._last_token_at is not None else num_tokens - 1
        if num_intervals:
            start = now if self._last_token_at is None else self._last_token_at
            seconds = (now - start) / num_intervals
            for _ in range(num_intervals):
                series.interval.observe(seconds)
                metrics.recent.add_interval(now, seconds)
            metrics.totals.itl.add(seconds, num_intervals)
        self._last_token_at = now
        series.generation_tokens.inc(num_tokens)
        metrics.totals.generated += num_tokens

    def text(self) -> None:
        """Content is about to be written."""
        if self.first_text_s is not None:
            return
        metrics = self._metrics
        now = metrics.clock()
        self.first_text_s = now - self._received_at
        self._series.first_token.observe(self.first_text_s)
        metrics.recent.add_first_token(now, self.first_text_s, is_hit=self._is_hit)
        times = metrics.totals.ttft_hit if self._is_hit else metrics.totals.ttft_miss
        times.add(self.first_text_s)

    def end(self, outcome: str) -> None:
        """``outcome``: stop | length | abort | error."""
        if self._has_ended:
            return
        self._has_ended = True
        if outcome in ("stop", "length"):
            self.text()  # an answer without any text has its end for first content
            self._series.e2e.observe(self._metrics.clock() - self._received_at)
        self._series.ended[outcome].inc()
