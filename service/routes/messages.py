"""POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from service.dialects.cache_diagnostics import anthropic_diagnostics
from service.dialects.messages import Chat, Marks, chat_of
from service.gateway import Gateway, gateway_of
from service.routes.answering import answer
from service.routes.asked import Comparison, Generation, Prompt, told_as
from service.routes.chat import chat_generation, conversation_of
from service.schemas import bodies
from service.schemas.message_bodies import Diagnostics, TokenCount
from service.schemas.messages import (
    MessagesRequest,
    parse_counted_messages,
    parse_messages_request,
)
from service.security import read_body
from service.served_model import ServedModel
from service.sessions.identity import SessionKey, named_session, tenant_of
from service.sessions.turn import Turn
from service.shapes.base import AnswerIdentity
from service.shapes.messages import CachedPrefixes, MessagesShape
from service.tenants.tenant import tenant_in

__all__ = ["messages_generation", "router"]

router = APIRouter()


@router.post("/v1/messages")
async def messages(request: Request) -> Response:
    gateway = gateway_of(request)
    content = await read_body(request, gateway.config.max_body_size)
    received_at = gateway.metrics.clock()
    body = parse_messages_request(content)
    session = named_session(request, body.session_id)
    most = tenant_in(request).caps.max_retention
    chat = chat_of(body, most_retention=most)
    asked = messages_generation(gateway, body, chat, received_at, session, tenant_of(request))
    return await answer(request, asked)


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    """What the input tokens of the same message would be, the cached ones included."""
    gateway = gateway_of(request)
    content = await read_body(request, gateway.config.max_body_size)
    body = parse_counted_messages(content)
    model = gateway.model(body.model)
    chat = chat_of(body)
    with chat.retelling.of_refusals():
        conversation = conversation_of(chat.request, is_canonical=gateway.config.canonical_tools)
        ids = await model.encode_chat(conversation, is_bounded=False)
    return Response(bodies.encode(TokenCount(len(ids))), media_type="application/json")


def messages_generation(
    gateway: Gateway,
    body: MessagesRequest,
    chat: Chat,
    received_at: float,
    session: SessionKey | None,
    tenant: str,
) -> Generation:
    """``chat`` says the same as ``body``. Raises InvalidRequest, ModelNotFound or Unavailable."""
    asked = chat_generation(gateway, chat.request, received_at, session, tenant)
    model = gateway.model(body.model)
    prefixes = CachedPrefixes()

    async def prompts(turn: Turn | None) -> Sequence[Prompt]:
        with chat.retelling.of_refusals():
            made = told_as(await asked.prompts(turn), chat.retelling)
        is_canonical = gateway.config.canonical_tools
        await _measure(prefixes, model, body, len(made[0].token_ids), is_canonical)
        return made

    previous = "" if body.diagnostics is None else body.diagnostics.previous_message_id or ""
    comparison = Comparison(previous.removeprefix("msg_")) if previous else None

    def shape(identity: AnswerIdentity) -> MessagesShape:
        told: Diagnostics | UnsetType | None = UNSET
        if body.diagnostics is not None:
            told = anthropic_diagnostics(None if comparison is None else comparison.found)
        return MessagesShape(identity, prefixes, body.max_tokens, told)

    return replace(asked, prompts=prompts, shape=shape, id_prefix="msg", comparison=comparison)


async def _measure(
    prefixes: CachedPrefixes,
    model: ServedModel,
    body: MessagesRequest,
    num_tokens: int,
    is_canonical: bool,
) -> None:
    """How much of the prompt stands before its breakpoints."""
    if next(body.breakpoints(), None) is None:
        return
    marks = Marks()
    marked = chat_of(body, marks)
    counts = await model.tokens_before(
        conversation_of(marked.request, is_canonical=is_canonical),
        [mark for mark, _ in marks.written],
        num_tokens,
    )
    for count, (_, control) in zip(counts, marks.written, strict=True):
        if control.ttl == "1h":
            prefixes.num_tokens_1h = max(prefixes.num_tokens_1h, count)
        else:
            prefixes.num_tokens_5m = max(prefixes.num_tokens_5m, count)
