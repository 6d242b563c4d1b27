"""The life of sessions: /v1/sessions, and DELETE /v1/tenants/me/data.

Everything is scoped to the caller's tenant: the sessions of others are not found.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from cache_store.metadata.base import SessionRecord
from service.errors import Conflict, InvalidRequest, NotFound
from service.gateway import Gateway, gateway_of
from service.routes.answering import prewarm
from service.routes.cache import prewarm_generation
from service.routes.needing_store import needs_store
from service.schemas import bodies
from service.schemas.session import (
    MAX_PAGE,
    CreateSession,
    DataDeleted,
    ForkSession,
    Prewarmed,
    PrewarmSession,
    SessionDeleted,
    SessionList,
    SessionView,
    TierCounts,
    parse,
)
from service.security import read_body
from service.sessions.history import History
from service.sessions.identity import (
    SessionKey,
    check_session_id,
    is_response_session,
    named_session,
    tenant_of,
)
from service.sessions.records import ends_at, key_of
from service.sessions.sessions import SessionSettings
from service.sessions.turn import ModelView
from service.tenants.tenant import tenant_in

router = APIRouter()

_DEFAULT_LIMIT = 20
_T = TypeVar("_T")


@router.post("/v1/sessions")
@needs_store
async def create_session(request: Request) -> Response:
    gateway = gateway_of(request)
    view = gateway.served_model().view
    body = await _parsed(request, CreateSession)
    named = named_session(request, body.session_id)
    session_id = None if named is None else named.session_id
    # What is left out is as much as the tenant may have.
    tenant_in(request).caps.check(body.priority or None, body.retention or None)
    settings = SessionSettings(
        ttl=body.ttl,
        retention=body.retention,
        priority=body.priority,
        cache_salt=body.cache_salt or "",
    )
    record = await gateway.sessions.create(tenant_of(request), session_id, settings)
    if record is None:
        raise _exists(session_id)
    if body.messages is not None:
        try:
            await _prewarm_messages(request, record, body.model, body.messages)
        except BaseException:  # a session that nobody was told of is none
            await gateway.sessions.delete(key_of(record))
            raise
        record = await _found(request, record.session_id)
    return _json(await _view(gateway, record, view), status=201)


@router.get("/v1/sessions")
@needs_store
async def list_sessions(request: Request) -> Response:
    gateway = gateway_of(request)
    view = gateway.served_model().view
    cursor = request.query_params.get("cursor", "")
    limit = _limit(request.query_params.get("limit"))
    page, following = await gateway.sessions.records.page(tenant_of(request), cursor, limit)
    whole = await asyncio.gather(
        *(
            gateway.sessions.records.get(key_of(item))
            for item in page
            if not is_response_session(item.session_id)
        )
    )
    views = await asyncio.gather(*(_view(gateway, item, view) for item in whole if item))
    return _json(SessionList(tuple(views), following or None))


@router.get("/v1/sessions/{session_id}")
@needs_store
async def get_session(request: Request, session_id: str) -> Response:
    gateway = gateway_of(request)
    record = await _found(request, session_id)
    return _json(await _view(gateway, record, gateway.served_model().view))


@router.post("/v1/sessions/{session_id}/fork")
@needs_store
async def fork_session(request: Request, session_id: str) -> Response:
    gateway = gateway_of(request)
    view = gateway.served_model().view
    body = await _parsed(request, ForkSession)
    if body.session_id is not None:
        check_session_id(body.session_id)
    record = await _found(request, session_id)
    forked = await gateway.sessions.fork(record, body.session_id, view)
    if forked is None:
        raise _exists(body.session_id)
    return _json(await _view(gateway, forked, view), status=201)


@router.post("/v1/sessions/{session_id}/prewarm")
@needs_store
async def prewarm_session(request: Request, session_id: str) -> Response:
    """Compute what ``messages`` say, or whatever of the history is not in the cache any more."""
    gateway = gateway_of(request)
    body = await _parsed(request, PrewarmSession)
    record = await _found(request, session_id)
    if body.messages is not None:
        return _json(await _prewarm_messages(request, record, body.model, body.messages))
    model = gateway.served_model()
    history = History.decode(record.history, model.card.fingerprint)
    if history is None or not history.ids:
        raise InvalidRequest("messages: required, as the session has no history.", param="messages")
    caps = tenant_in(request).caps
    fields = {
        "prompt": history.token_ids[: model.card.max_model_len - 1].tolist(),
        "priority": caps.priority(record.priority),
        "retention": caps.retention(record.retention_s),
        **_salt(request, record),
    }
    if body.model is not None:
        fields["model"] = body.model
    received_at = gateway.metrics.clock()
    asked = prewarm_generation(gateway, fields, received_at, None, record.worker_id)
    usage = await prewarm(request, asked)
    await gateway.sessions.touch(key_of(record))
    return _json(Prewarmed(usage))


@router.delete("/v1/sessions/{session_id}")
@needs_store
async def delete_session(request: Request, session_id: str) -> Response:
    key = SessionKey(tenant_of(request), session_id)
    gateway = gateway_of(request)
    if not await gateway.sessions.delete(key):
        raise _unknown()
    if gateway.history is not None:
        gateway.history.forget(tenant_in(request).charged_as, session_id)
    return _json(SessionDeleted(session_id))


@router.delete("/v1/tenants/me/data")
@needs_store
async def delete_tenant_data(request: Request) -> Response:
    """All sessions of the caller's tenant, and what is stored for them alone."""
    gateway = gateway_of(request)
    num_deleted = await gateway.sessions.delete_all(tenant_of(request))
    if gateway.history is not None:
        gateway.history.forget(tenant_in(request).charged_as)
    return _json(DataDeleted(num_deleted))


async def _prewarm_messages(
    request: Request, record: SessionRecord, model: str | None, messages: list[Any]
) -> Prewarmed:
    gateway = gateway_of(request)
    fields = {"messages": messages, **_salt(request, record)}
    if model is not None:
        fields["model"] = model
    asked = prewarm_generation(gateway, fields, gateway.metrics.clock(), key_of(record))
    return Prewarmed(await prewarm(request, asked))


async def _parsed(request: Request, into: type[_T]) -> _T:
    limit = gateway_of(request).config.max_body_size
    return parse(await read_body(request, limit, may_be_empty=True), into)


async def _found(request: Request, session_id: str) -> SessionRecord:
    key = SessionKey(tenant_of(request), session_id)
    record = await gateway_of(request).sessions.records.get(key)
    if record is None:
        raise _unknown()
    return record


async def _view(gateway: Gateway, record: SessionRecord, model: ModelView) -> SessionView:
    history = History.decode(record.history, model.fingerprint)
    blocks = await gateway.sessions.tiers_of(record, model)
    asked, cached = record.num_prompt_tokens_total, record.num_cached_tokens_total
    return SessionView(
        id=record.session_id,
        created_at=record.created_at,
        last_active_at=record.last_active_at,
        expires_at=ends_at(record),
        priority=record.priority,
        retention=record.retention_s,
        num_tokens=0 if history is None else len(history.token_ids),
        blocks=TierCounts(blocks.device, blocks.host, blocks.disk),
        hit_rate=cached / asked if asked else None,
        splicing=model.tokenizer.splicer.problem or "on",
    )


def _salt(request: Request, record: SessionRecord) -> dict[str, str]:
    salt = tenant_in(request).client_salt(record.cache_salt)
    return {"cache_salt": salt} if salt else {}


def _limit(given: str | None) -> int:
    if given is None:
        return _DEFAULT_LIMIT
    if not (given.isascii() and given.isdecimal() and 1 <= int(given[:9]) <= MAX_PAGE):
        raise InvalidRequest(f"limit: must be a whole number from 1 to {MAX_PAGE}.", param="limit")
    return int(given)


def _exists(session_id: str | None) -> Conflict:
    return Conflict(
        f"The session '{session_id}' exists already.", param="session_id", code="session_exists"
    )


def _unknown() -> NotFound:
    return NotFound("There is no such session.", code="session_not_found")


def _json(body: msgspec.Struct, status: int = 200) -> Response:
    return Response(bodies.encode(body), status_code=status, media_type="application/json")
