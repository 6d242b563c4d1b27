"""What both generating endpoints do once their body is parsed: admit, prepare, answer.

Owns the order of these steps, and that places in the queue are given back whatever happens. Knows
nothing of what distinguishes the endpoints beyond the shape of their answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from model_worker.protocol import SamplingParams
from service.answers import Answer, AnswerIdentity, Shape
from service.gateway import Gateway, gateway_of
from service.generation import GenerationRequest
from service.request_context import request_id_of
from service.request_gate import Ticket
from service.schemas.sampling import CommonFields
from service.sse import EventStream, client_gone

__all__ = ["Prompt", "answer"]

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


async def answer(
    request: Request,
    body: CommonFields,
    *,
    num_prompts: int,
    prompts: Callable[[], Awaitable[Sequence[Prompt]]],
    received_at: float,
    shape: ShapeFactory,
    id_prefix: str,
) -> Response:
    """The response; errors before any event are raised as GatewayError."""
    gateway = gateway_of(request)
    tickets = gateway.gate.admit(num_prompts)
    try:
        prepared = await prompts()
        _log_received(request, body, prepared)
        made = _answer(gateway, request, body, prepared, tickets, received_at, shape, id_prefix)
        if body.stream:
            chunks = made.chunks(
                has_usage=body.has_usage, has_continuous_usage=body.has_continuous_usage
            )
            return EventStream(chunks, keepalive=gateway.keepalive, on_end=lambda: _close(tickets))
        response = await _unless_gone(request, made.whole())
    except BaseException:
        _close(tickets)
        raise
    _close(tickets)
    return response


def _answer(
    gateway: Gateway,
    request: Request,
    body: CommonFields,
    prompts: Sequence[Prompt],
    tickets: Sequence[Ticket],
    received_at: float,
    shape: ShapeFactory,
    id_prefix: str,
) -> Answer:
    model = gateway.model(body.model)
    request_id = f"{id_prefix}-{request_id_of(request)}"
    identity = AnswerIdentity(request_id, int(time.time()), body.model, model.system_fingerprint)
    events = [
        gateway.generator.events(
            GenerationRequest(
                request_id=f"{request_id}-{index}",
                prompt_token_ids=prompt.token_ids,
                sampling_params=prompt.sampling_params,
                received_at=received_at,
                stop=body.stop_strings,
                cache_salt=body.cache_salt or "",
                is_continuation=prompt.is_continuation,
            ),
            model.tokenizer.decode,
            ticket,
        )
        for index, (prompt, ticket) in enumerate(zip(prompts, tickets, strict=True))
    ]
    return Answer(
        shape(identity, is_usage_null=body.has_usage),
        events,
        [len(prompt.token_ids) for prompt in prompts],
        [prompt.prefix for prompt in prompts],
    )


async def _unless_gone(request: Request, whole: Coroutine[Any, Any, bytes]) -> Response:
    """The whole answer, given up as soon as the client has left."""
    working = asyncio.create_task(whole)
    watching = asyncio.create_task(client_gone(request.receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return Response(working.result(), media_type="application/json")
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def _close(tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        ticket.close()


def _log_received(request: Request, body: CommonFields, prompts: Sequence[Prompt]) -> None:
    _log.info(
        "request %s received: %s prompts=%d prompt_tokens=%d max_tokens=%d stream=%s",
        request_id_of(request),
        request.scope["path"],
        len(prompts),
        sum(len(prompt.token_ids) for prompt in prompts),
        max(prompt.sampling_params.max_tokens for prompt in prompts),
        body.stream,
    )
