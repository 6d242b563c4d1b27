"""The operations behind the dashboard, which are its own and may change with it.

Part of service.openapi.operations; it only describes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from service.dashboard.findings import Findings
from service.dashboard.requests import LatestRequests
from service.dashboard.series import SeriesBody
from service.dashboard.sessions import MAX_ROWS, SessionAction, SessionDone, SessionPage
from service.openapi.operation import Access, Answer, Body, Operation, Parameter

__all__ = ["DASHBOARD"]

_Rows = Annotated[int, msgspec.Meta(ge=1, le=MAX_ROWS)]
_Offset = Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]

DASHBOARD = (
    Operation(
        method="get",
        path="/dashboard/data",
        summary="The dashboard's figures of this moment",
        access=Access.ADMIN,
        answers={200: Answer((dict[str, Any],))},
    ),
    Operation(
        method="get",
        path="/dashboard/data/series",
        summary="The points of its charts",
        access=Access.ADMIN,
        parameters=(
            Parameter("span", "query", Literal["10m", "2h", "1d"]),
            Parameter("after", "query", float, "seconds since 1970: only what is later"),
        ),
        answers={200: Answer((SeriesBody,))},
        errors=frozenset({400}),
    ),
    Operation(
        method="get",
        path="/dashboard/data/requests",
        summary="The latest requests, the last one first",
        access=Access.ADMIN,
        parameters=(Parameter("limit", "query", _Rows),),
        answers={200: Answer((LatestRequests,))},
        errors=frozenset({400}),
    ),
    Operation(
        method="get",
        path="/dashboard/data/findings",
        summary="What recent requests have in common, what breaks it, what more memory would find",
        access=Access.ADMIN,
        answers={200: Answer((Findings,))},
    ),
    Operation(
        method="get",
        path="/dashboard/data/sessions",
        summary="A page of all sessions, whoever's they are",
        access=Access.ADMIN,
        parameters=(
            Parameter("search", "query", str, "a part of a session's or a tenant's id"),
            Parameter("offset", "query", _Offset),
            Parameter("limit", "query", _Rows),
        ),
        answers={200: Answer((SessionPage,))},
        errors=frozenset({400}),
    ),
    Operation(
        method="post",
        path="/dashboard/data/sessions",
        summary="Fork, evict or delete a session",
        access=Access.ADMIN,
        body=Body.of(SessionAction),
        answers={200: Answer((SessionDone,))},
        errors=frozenset({404, 503}),
    ),
    Operation(
        method="get",
        path="/",
        summary="The dashboard",
        access=Access.OPEN,
        answers={200: Answer(media_type="text/html")},
    ),
    Operation(
        method="get",
        path="/dashboard/{name}",
        summary="Its files",
        access=Access.OPEN,
        answers={200: Answer(media_type="*/*")},
        errors=frozenset({404}),
    ),
)
