"""GET /metrics in Prometheus' text format."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from service.gateway import gateway_of
from service.metrics import CONTENT_TYPE

router = APIRouter()


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(gateway_of(request).metrics.exposition(), media_type=CONTENT_TYPE)
