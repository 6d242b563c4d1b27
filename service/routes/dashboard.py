"""GET / and /dashboard/...: the dashboard's page and files, which hold no data."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse, Response

from service.errors import NotFound

router = APIRouter()

_FOLDER = Path(__file__).parent.parent / "dashboard"
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


@router.get("/")
async def page() -> Response:
    return _file("index.html")


@router.get("/dashboard/{name}")
async def file(name: str) -> Response:
    return _file(name)


def _file(name: str) -> Response:
    known = {entry.name: entry for entry in _FOLDER.iterdir()} if _FOLDER.is_dir() else {}
    if name not in known or not known[name].is_file():
        raise NotFound("There is nothing at this path.")
    return FileResponse(known[name], headers=_HEADERS)
