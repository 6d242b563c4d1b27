"""GET /metrics in Prometheus' text format, and GET /load, how many requests are in flight."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from service.gateway import gateway_of
from service.metrics import CONTENT_TYPE
from service.schemas.bodies import encode
from service.schemas.operating import Load

router = APIRouter()


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(gateway_of(request).metrics.exposition(), media_type=CONTENT_TYPE)


@router.get("/load")
async def load(request: Request) -> Response:
    """As vLLM has it, for load balancers that count."""
    body = Load(gateway_of(request).gate.num_in_flight)
    return Response(encode(body), media_type="application/json")
