"""The latest requests with their way through the server.

Owns the form of GET /dashboard/data/requests. What is known of them is service.diagnostics'.
"""

from __future__ import annotations

import msgspec

from service.diagnostics.record import RequestRecord
from service.gateway import Gateway

__all__ = ["LatestRequests", "latest_requests"]


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """As service.diagnostics.record.RequestRecord says; durations in seconds."""

    request_id: str
    started_at: float
    tenant: str
    session: str
    model: str
    worker_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_device_tokens: int
    num_host_tokens: int
    num_disk_tokens: int
    num_output_tokens: int
    reason: str
    queue_s: float | None
    load_s: float | None
    prefill_s: float | None
    decode_s: float | None
    ttft_s: float | None
    outcome: str


class LatestRequests(msgspec.Struct, frozen=True):
    requests: tuple[RequestRow, ...]


async def latest_requests(gateway: Gateway, limit: int) -> LatestRequests:
    await gateway.diagnostics.refresh()
    return LatestRequests(tuple(map(_row, gateway.diagnostics.recent(limit))))


def _row(record: RequestRecord) -> RequestRow:
    names = RequestRow.__struct_fields__
    return RequestRow(**{name: getattr(record, name) for name in names})
