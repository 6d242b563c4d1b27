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

from cache_store.events import Tier
from service.errors import InvalidRequest, NotFound
from service.gateway import Gateway, gateway_of
from service.request_history import MAX_REQUESTS, RequestRecord
from service.schemas.history import BLOCK_BYTES_HEADER, BLOCKS_HEADER, LINES, history_lines

router = APIRouter()

_LINES_AT_ONCE = 32  # the event loop has others to serve


@router.get("/v1/cache/history")
async def history(request: Request) -> Response:
    gateway = gateway_of(request)
    kept = gateway.history
    if kept is None:
        raise NotFound("No history is kept here: --no-request-history.", code="no_history")
    records = kept.records()[-_limit(request.query_params.get("limit")) :]
    headers = {"Cache-Control": "no-store", **_sizes(gateway)}
    return StreamingResponse(_encoded(records), media_type=LINES, headers=headers)


def _sizes(gateway: Gateway) -> dict[str, str]:
    """What the workers have room for, since a simulation is about other sizes than these."""
    counts = dict.fromkeys(Tier, 0)
    for worker in gateway.registry.workers:
        counts[Tier.DEVICE] += worker.stats.num_blocks
        for report in worker.stats.tiers:
            counts[report.tier] += report.num_blocks
    sizes = {BLOCKS_HEADER: ", ".join(f"{tier.value}={count}" for tier, count in counts.items())}
    if gateway.served is not None:
        card = gateway.served.card
        sizes[BLOCK_BYTES_HEADER] = str(card.kv_bytes_per_token * card.block_size)
    return sizes


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
