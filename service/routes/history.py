"""GET /v1/cache/history: what was asked lately, as a trace.

It is the operator's: once any key is set it needs an admin key (service.security).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from service.errors import InvalidRequest, NotFound
from service.gateway import gateway_of
from service.request_history import MAX_REQUESTS, RequestRecord
from service.schemas.history import LINES, history_lines

router = APIRouter()

_LINES_AT_ONCE = 32  # the event loop has others to serve


@router.get("/v1/cache/history")
async def history(request: Request) -> Response:
    kept = gateway_of(request).history
    if kept is None:
        raise NotFound("No history is kept here: --no-request-history.", code="no_history")
    records = kept.records()[-_limit(request.query_params.get("limit")) :]
    return StreamingResponse(
        _encoded(records), media_type=LINES, headers={"Cache-Control": "no-store"}
    )


async def _encoded(records: Sequence[RequestRecord]) -> AsyncIterator[bytes]:
    encoder, lines = msgspec.json.Encoder(), history_lines(records)
    while batch := list(itertools.islice(lines, _LINES_AT_ONCE)):
        yield encoder.encode_lines(batch)
        await asyncio.sleep(0)


def _limit(given: str | None) -> int:
    if given is None:
        return MAX_REQUESTS
    if not (given.isascii() and given.isdecimal() and 1 <= int(given[:9]) <= MAX_REQUESTS):
        raise InvalidRequest(
            f"limit: must be a whole number from 1 to {MAX_REQUESTS}.", param="limit"
        )
    return int(given)
