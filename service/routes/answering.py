"""What all that generates does once its body is parsed: admit, prepare, answer.

Owns the order of these steps, and that places in the queue and turns of sessions are given back
whatever happens. Knows nothing of what distinguishes the endpoints beyond the shape of their
answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from model_worker.protocol import SamplingParams
from service.answers import Answer, AnswerIdentity, Shape
from service.gateway import Gateway, gateway_of
from service.generation import GenerationRequest
from service.request_context import request_id_of
from service.request_gate import Ticket
from service.router import Affinity
from service.schemas.responses import Usage
from service.schemas.sampling import CommonFields
from service.sessions.identity import SessionKey
from service.sessions.turn import Turn
from service.sse import EventStream, client_gone
from service.tenants.tenant import Tenant, tenant_in

__all__ = ["Generation", "Prompt", "answer", "prewarm"]

HISTORY_HEADER = "X-Session-History"
_log = logging.getLogger("headstart.requests")
_CLIENT_CLOSED_REQUEST = 499  # nobody reads it; logs of proxies know the number


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready for a worker. ``prefix`` is text to put before its answer."""

    token_ids: NDArray[np.int32]
    sampling_params: SamplingParams
    prefix: str = ""
    is_continuation: bool = False


ShapeFactory = Callable[..., Shape]
MakePrompts = Callable[[Turn | None], Awaitable[Sequence[Prompt]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What an endpoint asks for. ``prompts`` makes them, with what a turn of ``session`` knows of
    them already; ``worker_id`` is a worker to prefer where no session says."""

    body: CommonFields
    session: SessionKey | None
    num_prompts: int
    prompts: MakePrompts
    received_at: float
    shape: ShapeFactory
    id_prefix: str
    worker_id: str = ""


async def answer(request: Request, asked: Generation) -> Response:
    """The response; errors before any event are raised as GatewayError."""
    body, gateway = asked.body, gateway_of(request)
    place = _Place(gateway, gateway.gate.admit(asked.num_prompts, tenant_in(request)))
    try:
        made = await _begin(request, asked, place)
        headers = place.headers
        if body.stream:
            chunks = made.chunks(
                has_usage=body.has_usage, has_continuous_usage=body.has_continuous_usage
            )
            keepalive = gateway.keepalive
            return EventStream(chunks, keepalive=keepalive, on_end=place.close, headers=headers)
        response = await _unless_gone(request, made.whole(), headers)
    except BaseException:
        place.close()
        raise
    place.close()
    return response


async def prewarm(request: Request, asked: Generation) -> Usage:
    """As :func:`answer`, for those who want no answer."""
    gateway = gateway_of(request)
    place = _Place(gateway, gateway.gate.admit(asked.num_prompts, tenant_in(request)))
    try:
        made = await _begin(request, asked, place)
        return await made.usage()
    finally:
        place.close()


class _Place:
    """What a request holds until it ends: its tickets, and its turn of a session."""

    def __init__(self, gateway: Gateway, tickets: Sequence[Ticket]) -> None:
        self._gateway = gateway
        self.tickets = tickets
        self.turn: Turn | None = None

    @property
    def history(self) -> str | None:
        return None if self.turn is None else self.turn.history

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.history is None else {HISTORY_HEADER: self.history}

    def close(self) -> None:
        for ticket in self.tickets:
            ticket.close()
        if self.turn is not None:
            self.turn.end()


async def _begin(request: Request, asked: Generation, place: _Place) -> Answer:
    gateway, body = gateway_of(request), asked.body
    tenant_in(request).caps.check(body.priority, body.retention)
    if asked.session is not None:
        view = gateway.model(body.model).view
        place.turn = await gateway.sessions.begin_turn(asked.session, view, body.cache_salt)
    prepared = await asked.prompts(place.turn)
    if place.turn is not None:
        gateway.sessions.count_turn(place.turn)
    _log_received(request, body, prepared)
    return _answer(request, asked, prepared, place)


def _answer(
    request: Request, asked: Generation, prompts: Sequence[Prompt], place: _Place
) -> Answer:
    gateway, body, turn = gateway_of(request), asked.body, place.turn
    model = gateway.model(body.model)
    for prompt, ticket in zip(prompts, place.tickets, strict=True):
        ticket.reserve(len(prompt.token_ids), prompt.sampling_params.max_tokens)
    request_id = f"{asked.id_prefix}-{request_id_of(request)}"
    identity = AnswerIdentity(request_id, int(time.time()), body.model, model.system_fingerprint)
    events = [
        gateway.generator.events(
            _generation_request(f"{request_id}-{index}", asked, prompt, turn, ticket.tenant),
            model.tokenizer.decode,
            ticket,
        )
        for index, (prompt, ticket) in enumerate(zip(prompts, place.tickets, strict=True))
    ]
    return Answer(
        asked.shape(identity, is_usage_null=body.has_usage, history=place.history or UNSET),
        events,
        [len(prompt.token_ids) for prompt in prompts],
        [prompt.prefix for prompt in prompts],
    )


def _generation_request(
    request_id: str, asked: Generation, prompt: Prompt, turn: Turn | None, tenant: Tenant
) -> GenerationRequest:
    body = asked.body
    priority = tenant.caps.priority(0) if turn is None else turn.priority
    retention_s = 0.0 if turn is None else turn.retention_s
    key = body.prompt_cache_key or ""
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=prompt.token_ids,
        sampling_params=prompt.sampling_params,
        received_at=asked.received_at,
        stop=body.stop_strings,
        tenant=tenant.charged_as,
        cache_salt=tenant.namespace_salt(body.cache_salt) if turn is None else turn.cache_salt,
        is_continuation=prompt.is_continuation,
        priority=priority if body.priority is None else body.priority,
        retention_s=retention_s if body.retention is None else body.retention,
        affinity=(
            Affinity(asked.worker_id, key)
            if turn is None
            else Affinity(turn.worker_id, turn.key.session_id)
        ),
        keeper=turn,
    )


async def _unless_gone(
    request: Request, whole: Coroutine[Any, Any, bytes], headers: dict[str, str]
) -> Response:
    """The whole answer, given up as soon as the client has left."""
    working = asyncio.create_task(whole)
    watching = asyncio.create_task(client_gone(request.receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return Response(working.result(), media_type="application/json", headers=headers)
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def _log_received(request: Request, body: CommonFields, prompts: Sequence[Prompt]) -> None:
    _log.info(
        "request %s received: %s prompts=%d prompt_tokens=%d max_tokens=%d stream=%s",
        request_id_of(request),
        request.scope["route"].path,
        len(prompts),
        sum(len(prompt.token_ids) for prompt in prompts),
        max(prompt.sampling_params.max_tokens for prompt in prompts),
        body.stream,
    )
