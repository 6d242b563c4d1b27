"""The operator's own route: GET /dashboard/data.

Once any key is set it needs an admin key (service.security).
"""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from service.dashboard_data import dashboard_data
from service.gateway import gateway_of

router = APIRouter()


@router.get("/dashboard/data")
async def data(request: Request) -> Response:
    body = msgspec.json.encode(dashboard_data(gateway_of(request)))
    return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})
