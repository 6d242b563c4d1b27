"""The operator's routes: POST /reset_prefix_cache and GET /dashboard/data.

Once any key is set they need an admin key (service.security).
"""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from service.dashboard_data import dashboard_data
from service.errors import Unavailable, WorkerLost
from service.gateway import gateway_of
from service.workers.base import WorkerLostError, WorkerNotReadyError

router = APIRouter()


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Drop every cached block that no running request holds, in all ready workers."""
    workers = gateway_of(request).registry.ready_workers()
    if not workers:
        raise Unavailable("No worker is ready.", code="no_worker", retry_after=5)
    try:
        dropped = await asyncio.gather(*(worker.reset_cache() for worker in workers))
    except (WorkerLostError, WorkerNotReadyError):
        raise WorkerLost("A worker was lost before it answered.", retry_after=5) from None
    return JSONResponse({"num_blocks_dropped": sum(dropped)})


@router.get("/dashboard/data")
async def data(request: Request) -> Response:
    body = msgspec.json.encode(dashboard_data(gateway_of(request)))
    return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})
