"""GET /health (requests are answered), /live (the process runs) and /version. No key is needed."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from service import __version__
from service.errors import Unavailable
from service.gateway import gateway_of
from service.schemas.bodies import encode
from service.schemas.operating import Health, Version

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    gateway = gateway_of(request)
    reason = gateway.unready_reason
    if reason:
        raise Unavailable(f"Not ready: {reason}.", code="not_ready", retry_after=1)
    if gateway.degraded_reason:
        return _json(Health("degraded", gateway.degraded_reason))
    return _json(Health())


@router.get("/live")
async def live() -> Response:
    return _json(Health())


@router.get("/version")
async def version() -> Response:
    return _json(Version(__version__))


def _json(body: Health | Version) -> Response:
    return Response(encode(body), media_type="application/json")
