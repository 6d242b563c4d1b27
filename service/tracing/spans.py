"""The spans of requests: one for each HTTP request, and below it what its prompts went through.

Owns the spans that are open, and joins to them what the diagnostics tell of each prompt when it has
ended. Workers know nothing of spans: they report durations, and all spans are made here, with the
times given. Knows nothing of ASGI or of where spans are sent.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from service.diagnostics.trace import RequestTrace
from service.tracing.attributes import operation_of, request_attributes
from service.tracing.phases import phases_of

__all__ = ["ClosedWith", "RequestSpans"]


@dataclass(frozen=True, slots=True)
class ClosedWith:
    """How an HTTP request ended. ``route`` is the pattern that matched, empty if none did;
    ``status`` is 0 if nothing was answered; ``error`` names the kind of a failure of ours."""

    route: str
    status: int
    error: str = ""


@dataclass(slots=True)
class _OpenSpan:
    span: Span
    traces: list[RequestTrace] = field(default_factory=list)


class RequestSpans:
    """Used on one event loop; ``provider`` is shut down by :meth:`close`."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer: Tracer = provider.get_tracer("headstart")
        self._propagator = TraceContextTextMapPropagator()
        self._open: dict[str, _OpenSpan] = {}

    def open(self, request_id: str, method: str, carrier: Mapping[str, Sequence[str]]) -> None:
        """``carrier`` holds the headers of W3C Trace Context, as far as the client sent them: the
        span belongs to the trace that they name, and is recorded if that one is."""
        span = self._tracer.start_span(
            method,
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": method, "headstart.request_id": request_id},
        )
        self._open[request_id] = _OpenSpan(span)

    def ended(self, trace: RequestTrace) -> None:
        """A prompt, or one more choice of it, is done with."""
        found = self._open.get(trace.prompt.request_id.partition("-")[0])
        if found is None or not found.span.is_recording():
            return
        found.traces.append(trace)
        context = set_span_in_context(found.span)
        attributes = {"headstart.request_id": trace.prompt.request_id}
        for phase in phases_of(trace):
            child = self._tracer.start_span(
                phase.name, context, attributes=attributes, start_time=phase.start_ns
            )
            child.end(phase.end_ns)

    def end(self, request_id: str, how: ClosedWith) -> None:
        """The HTTP request is over; all that it asked for has ended before."""
        found = self._open.pop(request_id)
        span = found.span
        if span.is_recording():
            _describe(span, how, found.traces)
        span.end()

    def close(self, timeout_s: float) -> None:
        """Send what is left, for so long at most. May be called from any thread."""
        # A collector that does not answer would hold the process up for as long as it is retried.
        ending = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        ending.start()
        ending.join(timeout_s)


def _describe(span: Span, how: ClosedWith, traces: Sequence[RequestTrace]) -> None:
    found = request_attributes(traces)
    span.set_attributes(found)
    if how.route:
        span.update_name(f"POST {how.route}")
        span.set_attribute("http.route", how.route)
        operation = operation_of(how.route)
        if operation is not None:
            span.set_attribute("gen_ai.operation.name", operation)
    if how.status:
        span.set_attribute("http.response.status_code", how.status)
    error = how.error
    if not error and how.status >= 400:
        error = str(how.status)
    if not error and found.get("headstart.outcome") == "error":
        error = "error"  # after an answer had begun
    if error:
        span.set_attribute("error.type", error)
    if error and not 400 <= how.status < 500:  # those are the client's
        span.set_status(StatusCode.ERROR)
