"""OpenTelemetry spans of requests, for who has the extra ``otel`` and a collector."""
