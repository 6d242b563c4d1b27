"""GET / and /dashboard/...: the dashboard's page and files, which hold no data."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse, Response

from service.errors import NotFound

router = APIRouter()

_FOLDER = Path(__file__).parent.parent / "dashboard" / "static"
# Nothing inline, nothing evaluated, nothing from elsewhere, and in no other page's frame.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@router.get("/")
async def page() -> Response:
    return _file("index.html")


@router.get("/dashboard/{name:path}")
async def file(name: str) -> Response:
    return _file(name)


def _file(name: str) -> Response:
    known = {str(path.relative_to(_FOLDER)): path for path in _FOLDER.rglob("*") if path.is_file()}
    if name not in known:
        raise NotFound("There is nothing at this path.")
    return FileResponse(known[name], headers=_HEADERS)
