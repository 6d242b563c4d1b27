"""The latest requests with their way through the server.

Owns the form of GET /dashboard/data/requests. What is known of them is service.diagnostics'.
"""

from __future__ import annotations

import msgspec

from service.diagnostics.record import RequestRecord
from service.gateway import Gateway

__all__ = ["LatestRequests", "latest_requests"]


class LatestRequests(msgspec.Struct, frozen=True):
    requests: tuple[RequestRecord, ...]


async def latest_requests(gateway: Gateway, limit: int) -> LatestRequests:
    await gateway.diagnostics.refresh()
    return LatestRequests(tuple(gateway.diagnostics.recent(limit)))
