"""What all that generates does once its body is parsed: admit, prepare, answer.

Owns the order of these steps, and that places in the queue and turns of sessions are given back
whatever happens. Knows nothing of what distinguishes the endpoints beyond the shape of their
answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from model_worker.protocol import SamplingParams, log_event
from service.answers import Answer, BeforeEnd, ChoiceSource
from service.diagnostics.trace import RequestTrace, TracedPrompt
from service.gateway import Gateway, gateway_of
from service.generation import GenerationRequest, Placement
from service.request_context import request_id_of
from service.request_gate import Ticket
from service.router import Affinity
from service.routes.asked import Generation, Prompt
from service.routes.explain import viewer_of
from service.schemas.bodies import Usage
from service.schemas.cache_explanation import CacheExplanation
from service.schemas.sampling import CommonFields
from service.served_model import ServedModel
from service.sessions.turn import Turn
from service.shapes.base import AnswerIdentity, AnswerNotes, Choice, Shape
from service.sse import EventStream, client_gone
from service.tenants.tenant import Tenant, tenant_in

__all__ = ["answer", "prewarm"]

HISTORY_HEADER = "X-Session-History"
WORKER_HEADER = "X-Headstart-Worker"
CACHED_HEADER = "X-Headstart-Cached-Tokens"
REASON_HEADER = "X-Headstart-Cache-Reason"
EXPLAIN_HEADER = "X-Headstart-Explain"  # of a request
_log = logging.getLogger("headstart.requests")
_CLIENT_CLOSED_REQUEST = 499  # nobody reads it; logs of proxies know the number


async def answer(request: Request, asked: Generation) -> Response:
    """The response; errors before any event are raised as GatewayError."""
    gateway = gateway_of(request)
    place = _Place(gateway, gateway.gate.admit(asked.num_choices, tenant_in(request)))
    try:
        begun = await _begin(request, asked, place)
        if asked.body.stream:
            return EventStream(
                begun.answer.events(),
                begun.shape.failure,
                keepalive=gateway.keepalive,
                on_end=place.close,
                headers=begun.headers,
            )
        response = await _unless_gone(request, begun)
    except BaseException:
        place.close()
        raise
    place.close()
    return response


async def prewarm(request: Request, asked: Generation) -> Usage:
    """As :func:`answer`, for those who want no answer."""
    gateway = gateway_of(request)
    place = _Place(gateway, gateway.gate.admit(asked.num_choices, tenant_in(request)))
    try:
        begun = await _begin(request, asked, place)
        return await begun.answer.usage()
    finally:
        place.close()


@dataclass(frozen=True, slots=True)
class _Begun:
    """An answer under way. ``placements`` are where its prompts go."""

    answer: Answer
    shape: Shape
    placements: Sequence[Placement]
    history: str
    notes: AnswerNotes

    def headers(self) -> dict[str, str]:
        """As far as they are known: a stream whose first event is late is begun without."""
        headers = {HISTORY_HEADER: self.history} if self.history else {}
        worker_ids = dict.fromkeys(item.worker_id for item in self.placements if item.worker_id)
        if worker_ids:
            headers[WORKER_HEADER] = ", ".join(worker_ids)
        if isinstance(self.notes.cache_explanation, CacheExplanation):
            headers[REASON_HEADER] = self.notes.cache_explanation.header
        num_cached_tokens = self.answer.num_cached_tokens
        if num_cached_tokens is not None:
            headers[CACHED_HEADER] = str(num_cached_tokens)
        return headers


class _Place:
    """What a request holds until it ends: its tickets, and its turn of a session."""

    def __init__(self, gateway: Gateway, tickets: Sequence[Ticket]) -> None:
        self._gateway = gateway
        self.tickets = tickets
        self.turn: Turn | None = None

    @property
    def history(self) -> str:
        """Empty where no session goes on."""
        return "" if self.turn is None else self.turn.history

    def close(self) -> None:
        for ticket in self.tickets:
            ticket.close()
        if self.turn is not None:
            self.turn.end()


async def _begin(request: Request, asked: Generation, place: _Place) -> _Begun:
    gateway, body = gateway_of(request), asked.body
    tenant_in(request).caps.check(body.priority, body.retention)
    if asked.session is not None:
        view = gateway.model(body.model).view
        place.turn = await gateway.sessions.begin_turn(
            asked.session, view, body.cache_salt, asked.branch
        )
    prepared = await asked.prompts(place.turn)
    if place.turn is not None:
        gateway.sessions.count_turn(place.turn)
    _log_received(request, body, prepared)
    if gateway.config.log_prompts:
        _log_prompts(request, gateway.model(body.model), prepared)
    return _begun(request, asked, prepared, place)


def _begun(request: Request, asked: Generation, prompts: Sequence[Prompt], place: _Place) -> _Begun:
    gateway = gateway_of(request)
    model = gateway.model(asked.body.model)
    request_id = f"{asked.id_prefix}-{request_id_of(request)}"
    placements = [Placement() for _ in prompts]
    samples = [
        _Sample(prompt, number, placement)
        for prompt, placement in zip(prompts, placements, strict=True)
        for number in range(asked.body.n)
    ]
    for sample, ticket in zip(samples, place.tickets, strict=True):
        # The prompt is computed by the first of its samples alone.
        num_prompt_tokens = 0 if sample.number else len(sample.prompt.token_ids)
        ticket.reserve(num_prompt_tokens, sample.sampling_params.max_tokens)
    sources = [
        ChoiceSource(
            gateway.generator.events(
                _generation_request(
                    f"{request_id}-{index}",
                    asked,
                    sample,
                    place.turn,
                    ticket.tenant,
                    _trace(request, asked, sample, place.turn, index),
                ),
                sample.prompt.decode or model.tokenizer.decode,
                ticket,
            ),
            sample.prompt.reader(),
            index // asked.body.n,
            sample.prompt.prefix,
        )
        for index, (sample, ticket) in enumerate(zip(samples, place.tickets, strict=True))
    ]
    notes = AnswerNotes()
    shape = asked.shape(
        AnswerIdentity(
            request_id,
            int(time.time()),
            asked.body.model,
            model.system_fingerprint,
            place.history,
            notes,
        )
    )
    counts = [len(prompt.token_ids) for prompt in prompts]
    before_end = asked.before_end
    if asked.body.explain_cache or request.headers.get(EXPLAIN_HEADER, "").lower() in ("1", "true"):
        before_end = _explaining(request, notes, asked.before_end)
    made = Answer(shape, sources, counts, before_end)
    return _Begun(made, shape, placements, place.history, notes)


def _explaining(request: Request, notes: AnswerNotes, then: BeforeEnd | None) -> BeforeEnd:
    """Has ``notes`` say why no more of the first prompt was cached, and then does what is to be
    done before the end."""

    async def before_end(choices: Sequence[Choice], usage: Usage) -> None:
        diagnostics, viewer = gateway_of(request).diagnostics, viewer_of(request)
        await diagnostics.refresh()
        found = diagnostics.find(request_id_of(request), viewer.tenant)
        if found is not None and found[1] is not None:
            notes.cache_explanation = viewer.explanation(found[0], found[1])
        if then is not None:
            await then(choices, usage)

    return before_end


@dataclass(frozen=True, slots=True)
class _Sample:
    """The ``number``-th choice of a prompt. Each has noise of its own."""

    prompt: Prompt
    number: int
    placement: Placement

    @property
    def sampling_params(self) -> SamplingParams:
        params = self.prompt.sampling_params
        if params.seed is None or not self.number:
            return params
        seed = (params.seed + self.number + 2**63) % 2**64 - 2**63
        return msgspec.structs.replace(params, seed=seed)


def _trace(
    request: Request, asked: Generation, sample: _Sample, turn: Turn | None, index: int
) -> RequestTrace:
    gateway, prompt, tenant = gateway_of(request), sample.prompt, tenant_in(request)
    card = gateway.served_model().card
    hex_id = request_id_of(request)
    traced = TracedPrompt(
        request_id=f"{hex_id}-{index}" if index else hex_id,
        tenant=tenant.tenant_id,
        session="" if asked.session is None else asked.session.session_id,
        previous_id=asked.previous_id,
        model=asked.body.model,
        fingerprint=card.fingerprint,
        block_size=card.block_size,
        cache_salt=_cache_salt(asked, turn, tenant),
        num_tokens=len(prompt.token_ids),
        token_ids=prompt.token_ids,
        source=prompt.source,
        had_other_model=turn is not None and turn.had_other_model,
        is_scored=prompt.sampling_params.num_prompt_logprobs is not None,
    )
    if asked.comparison is not None and not index:
        earlier = asked.comparison.request_id
        asked.comparison.found = gateway.diagnostics.compare(earlier, traced)
    return gateway.diagnostics.begin(traced, asked.received_at, is_listed=not sample.number)


def _cache_salt(asked: Generation, turn: Turn | None, tenant: Tenant) -> str:
    return tenant.namespace_salt(asked.body.cache_salt) if turn is None else turn.cache_salt


def _generation_request(
    request_id: str,
    asked: Generation,
    sample: _Sample,
    turn: Turn | None,
    tenant: Tenant,
    trace: RequestTrace,
) -> GenerationRequest:
    body, prompt = asked.body, sample.prompt
    priority = tenant.caps.priority(0) if turn is None else turn.priority
    retention_s = body.retention_s(tenant.caps.max_retention)
    if retention_s is None:
        retention_s = 0.0 if turn is None else turn.retention_s
    key = body.prompt_cache_key or ""
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=prompt.token_ids,
        sampling_params=sample.sampling_params,
        received_at=asked.received_at,
        stop=body.stop_strings,
        tenant=tenant.charged_as,
        cache_salt=_cache_salt(asked, turn, tenant),
        is_continuation=prompt.is_continuation,
        priority=priority if body.priority is None else body.priority,
        retention_s=retention_s,
        affinity=(
            Affinity(asked.worker_id, key)
            if turn is None
            else Affinity(turn.worker_id, key if asked.branch else turn.key.session_id)
        ),
        placement=sample.placement,
        is_first_sample=sample.number == 0,
        keeper=turn,
        trace=trace,
    )


async def _unless_gone(request: Request, begun: _Begun) -> Response:
    """The whole answer, given up as soon as the client has left."""
    working = asyncio.create_task(begun.answer.whole())
    watching = asyncio.create_task(client_gone(request.receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        body = working.result()
        return Response(body, media_type="application/json", headers=begun.headers())
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def _log_received(request: Request, body: CommonFields, prompts: Sequence[Prompt]) -> None:
    log_event(
        _log,
        logging.INFO,
        "request received",
        request_id=request_id_of(request),
        route=request.scope["route"].path,
        tenant=gateway_of(request).tenant_labels.of(tenant_in(request).charged_as) or None,
        prompts=len(prompts),
        prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
        max_tokens=max(prompt.sampling_params.max_tokens for prompt in prompts),
        stream=body.stream,
    )


def _log_prompts(request: Request, model: ServedModel, prompts: Sequence[Prompt]) -> None:
    """What users say, for the operator who has asked for it."""
    for prompt in prompts:
        text = model.tokenizer.decode(prompt.token_ids.tolist())
        log_event(_log, logging.INFO, "prompt", request_id=request_id_of(request), text=text)
