"""The operator's own routes: /dashboard/data and what is below it.

Once any key is set they need an admin key (service.security).
"""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from service.dashboard.data import dashboard_data
from service.dashboard.findings import find
from service.dashboard.history import SPANS
from service.dashboard.requests import latest_requests
from service.dashboard.series import series_body
from service.dashboard.sessions import MAX_ROWS, SessionAction, act_on_session, session_page
from service.errors import InvalidRequest
from service.gateway import gateway_of
from service.routes.needing_store import needs_store
from service.schemas.session import parse
from service.security import read_body

router = APIRouter()

_DEFAULT_ROWS = 20
_MAX_BODY = 4096
_MAX_OFFSET = 10_000_000
_MAX_SEARCH = 200  # characters


@router.get("/dashboard/data")
async def data(request: Request) -> Response:
    return _json(dashboard_data(gateway_of(request)))


@router.get("/dashboard/data/series")
async def series(request: Request) -> Response:
    """The charts' points: of one span, and later than ``after`` if given."""
    span = request.query_params.get("span", "10m")
    if span not in SPANS:
        raise InvalidRequest(f"span: one of {', '.join(SPANS)}.", param="span")
    return _json(series_body(gateway_of(request).board, span, _after(request)))


@router.get("/dashboard/data/requests")
async def requests(request: Request) -> Response:
    limit = _number(request, "limit", _DEFAULT_ROWS, 1, MAX_ROWS)
    return _json(await latest_requests(gateway_of(request), limit))


@router.get("/dashboard/data/findings")
async def findings(request: Request) -> Response:
    return _json(await find(gateway_of(request)))


@router.get("/dashboard/data/sessions")
async def sessions(request: Request) -> Response:
    search = request.query_params.get("search", "")[:_MAX_SEARCH]
    offset = _number(request, "offset", 0, 0, _MAX_OFFSET)
    limit = _number(request, "limit", _DEFAULT_ROWS, 1, MAX_ROWS)
    return _json(await session_page(gateway_of(request), search, offset, limit))


@router.post("/dashboard/data/sessions")
@needs_store
async def act(request: Request) -> Response:
    """Fork, evict or delete a session, whoever's it is."""
    asked = parse(await read_body(request, _MAX_BODY), SessionAction)
    return _json(await act_on_session(gateway_of(request), asked))


def _after(request: Request) -> float:
    given = request.query_params.get("after", "0")
    try:
        return float(given)
    except ValueError:
        raise InvalidRequest("after: seconds since 1970.", param="after") from None


def _number(request: Request, name: str, default: int, least: int, most: int) -> int:
    given = request.query_params.get(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdecimal() and least <= int(given[:9]) <= most):
        raise InvalidRequest(f"{name}: a whole number from {least} to {most}.", param=name)
    return int(given)


def _json(body: dict[str, object] | msgspec.Struct) -> Response:
    return Response(
        msgspec.json.encode(body),
        media_type="application/json",
        headers={"Cache-Control": "no-store"},
    )
