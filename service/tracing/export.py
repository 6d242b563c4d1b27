"""Spans that go to a collector: OTLP over HTTP, in batches, from a thread of the library's own.

The only module that knows where spans go. What OpenTelemetry's own variables say (OTEL_*: headers
and certificates for the collector, sampling, resource attributes) the library reads by itself.
"""

from __future__ import annotations

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from service import __version__
from service.tracing.spans import RequestSpans

__all__ = ["exported_spans", "traces_url"]

_PATH = "/v1/traces"


def exported_spans(endpoint: str) -> RequestSpans:
    """``endpoint`` is the collector's address, http://collector:4318 or the whole URL. What cannot
    be delivered is dropped: no request ever waits for it."""
    ours = Resource.create({"service.name": "headstart", "service.version": __version__})
    resource = ours.merge(OTELResourceDetector().detect())  # the operator's word comes last
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(traces_url(endpoint))))
    return RequestSpans(provider)


def traces_url(endpoint: str) -> str:
    """Where spans are posted: as given if that names the path, else with the one that OTLP says."""
    return endpoint if endpoint.endswith(_PATH) else endpoint.rstrip("/") + _PATH
