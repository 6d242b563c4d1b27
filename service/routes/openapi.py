"""GET /openapi.json: the API, described for programs. No key is needed."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from service.openapi.document import encoded_document

router = APIRouter()


@router.get("/openapi.json")
async def openapi() -> Response:
    return Response(encoded_document(), media_type="application/json")
