"""POST /v1/cache/prewarm and POST /reset_prefix_cache.

The reset is the operator's: once any key is set it needs an admin key (service.security).
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from service.dashboard.marks import MarkKind
from service.errors import Conflict, InvalidRequest, Unavailable, WorkerLost
from service.gateway import Gateway, gateway_of
from service.routes.answering import prewarm
from service.routes.asked import Generation
from service.routes.chat import chat_generation
from service.routes.completions import completion_generation
from service.schemas import bodies
from service.schemas.chat import chat_request
from service.schemas.completion import completion_request
from service.schemas.operating import BlocksDropped, CacheReset, Running
from service.schemas.session import Prewarmed, PrewarmPrefix, parse
from service.security import read_body
from service.sessions.identity import SessionKey, named_session
from service.workers.base import WorkerLostError, WorkerNotReadyError

__all__ = ["prewarm_generation", "router"]

router = APIRouter()


@router.post("/v1/cache/prewarm")
async def prewarm_prefix(request: Request) -> Response:
    """Compute the KV of a prompt, so that requests that begin like it need not."""
    gateway = gateway_of(request)
    content = await read_body(request, gateway.config.max_body_size)
    received_at = gateway.metrics.clock()
    body = parse(content, PrewarmPrefix)
    fields = {
        name: value for name in body.__struct_fields__ if (value := getattr(body, name)) is not None
    }
    session = named_session(request, None)
    asked = prewarm_generation(gateway, fields, received_at, session)
    done = Prewarmed(await prewarm(request, asked))
    return Response(bodies.encode(done), media_type="application/json")


def prewarm_generation(
    gateway: Gateway,
    fields: dict[str, Any],
    received_at: float,
    session: SessionKey | None,
    worker_id: str = "",
) -> Generation:
    """A request that generates nothing, from ``fields`` of one of the generating endpoints; the
    model is the one that is served unless they name another. Raises GatewayError."""
    fields = {"model": gateway.default_model(), **fields, "max_tokens": 0}
    if "tools" in fields:
        fields["tool_choice"] = "none"  # nothing is generated, so nothing is read
    if "prompt" in fields:
        if "tools" in fields:
            raise InvalidRequest("tools: only with messages.", param="tools")
        body = completion_request(fields)
        if len(body.prompts) > 1:
            raise InvalidRequest("prompt: must be a single one.", param="prompt")
        return completion_generation(gateway, body, received_at, session, worker_id)
    if "add_special_tokens" in fields:
        raise InvalidRequest(
            "add_special_tokens: only with prompt; a template writes its own.",
            param="add_special_tokens",
        )
    return chat_generation(gateway, chat_request(fields), received_at, session)


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Drop the cached blocks of all ready workers, in every tier."""
    gateway = gateway_of(request)
    content = await read_body(request, gateway.config.max_body_size, may_be_empty=True)
    given = parse(content, CacheReset)
    if "running" in request.query_params:
        given = parse(msgspec.json.encode({"running": request.query_params["running"]}), CacheReset)
    await _wait_for_running(gateway, given.running)
    workers = gateway.registry.ready_workers()
    if not workers:
        raise Unavailable("No worker is ready.", code="no_worker", retry_after=5)
    try:
        dropped = await asyncio.gather(*(worker.reset_cache() for worker in workers))
    except (WorkerLostError, WorkerNotReadyError):
        raise WorkerLost("A worker was lost before it answered.", retry_after=5) from None
    gateway.board.marks.add(MarkKind.RESET, f"cache reset: {sum(dropped)} blocks dropped")
    body = bodies.encode(BlocksDropped(sum(dropped)))
    return Response(body, media_type="application/json")


async def _wait_for_running(gateway: Gateway, running: Running) -> None:
    if running == "refuse" and gateway.gate.num_in_flight:
        raise Conflict(
            f"{gateway.gate.num_in_flight} requests are running.", code="requests_running"
        )
    if running == "drain":
        limit = gateway.config.drain_timeout
        if not await gateway.gate.wait_for_present(limit):
            raise Conflict(
                f"Requests were still running after {limit:g} seconds.", code="requests_running"
            )
