"""GET /v1/cache/explain and /v1/cache/explain/{request_id}: why requests missed, and what breaks
prefixes. A tenant sees its own; an admin key sees all.
"""

from __future__ import annotations

import itertools
import re

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from service.diagnostics.viewer import Viewer
from service.errors import InvalidRequest, NotFound
from service.gateway import gateway_of
from service.schemas import bodies
from service.schemas.explain import MAX_LISTED, CacheExplanationList
from service.tenants.tenant import is_admin_in, tenant_in

__all__ = ["router", "viewer_of"]

router = APIRouter()

_DEFAULT_LIMIT = 20
_ANSWER_PREFIX = re.compile(r"(?:chatcmpl-|cmpl-|msg_|resp_)")


@router.get("/v1/cache/explain")
async def explain_latest(request: Request) -> Response:
    limit = request.query_params.get("limit", str(_DEFAULT_LIMIT))
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= MAX_LISTED):
        raise InvalidRequest(f"limit: must be from 1 to {MAX_LISTED}.", param="limit")
    diagnostics, viewer = gateway_of(request).diagnostics, viewer_of(request)
    await diagnostics.refresh()
    latest = itertools.islice(diagnostics.latest(viewer.scope), int(limit))
    return _json(
        CacheExplanationList(
            tuple(viewer.request(trace, told) for trace, told in latest),
            tuple(map(viewer.breaker, diagnostics.breakers(viewer.scope))),
        )
    )


@router.get("/v1/cache/explain/{request_id}")
async def explain_one(request: Request, request_id: str) -> Response:
    """By the answer's ``id`` or its X-Request-Id, unless the client gave that one itself."""
    diagnostics, viewer = gateway_of(request).diagnostics, viewer_of(request)
    await diagnostics.refresh()
    found = diagnostics.find(_ANSWER_PREFIX.sub("", request_id, count=1), viewer.scope)
    if found is None:
        raise NotFound("Nothing is known of this request, or not any more.")
    return _json(viewer.request(*found))


def viewer_of(request: Request) -> Viewer:
    config = gateway_of(request).config
    return Viewer(tenant_in(request).tenant_id, is_admin_in(request), config.show_prompt_text)


def _json(body: msgspec.Struct) -> Response:
    return Response(
        bodies.encode(body),
        media_type="application/json",
        headers={"Cache-Control": "no-store"},
    )
