"""GET /health (requests are answered), /live (the process runs) and /version. No key is needed."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from service import __version__
from service.errors import Unavailable
from service.gateway import gateway_of

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    gateway = gateway_of(request)
    reason = gateway.unready_reason
    if reason:
        raise Unavailable(f"Not ready: {reason}.", code="not_ready", retry_after=1)
    if gateway.degraded_reason:
        return JSONResponse({"status": "degraded", "reason": gateway.degraded_reason})
    return JSONResponse({"status": "ok"})


@router.get("/live")
async def live() -> Response:
    return JSONResponse({"status": "ok"})


@router.get("/version")
async def version() -> Response:
    return JSONResponse({"version": __version__})
