"""POST /v1/chat/completions."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from service.answer_rules import chat_rules
from service.conversation import Conversation, Ending
from service.diagnostics.trace import PromptSource
from service.gateway import Gateway, gateway_of
from service.routes.answering import answer
from service.routes.asked import Generation, Prompt
from service.schemas.chat import ChatRequest, content_text, parse_chat_request
from service.security import read_body
from service.sessions.identity import SessionKey, named_session, tenant_of
from service.sessions.turn import Turn
from service.shapes.chat import ChatShape
from service.tools.definitions import template_tools

__all__ = ["chat_generation", "conversation_of", "router"]

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    gateway = gateway_of(request)
    content = await read_body(request, gateway.config.max_body_size)
    received_at = gateway.metrics.clock()
    body = parse_chat_request(content)
    session = named_session(request, body.session_id)
    asked = chat_generation(gateway, body, received_at, session, tenant_of(request))
    return await answer(request, asked)


def chat_generation(
    gateway: Gateway,
    body: ChatRequest,
    received_at: float,
    session: SessionKey | None,
    tenant: str = "",
) -> Generation:
    """``tenant`` is whose grammars are looked at. Raises ModelNotFound or Unavailable."""
    model = gateway.model(body.model)
    is_canonical = gateway.config.canonical_tools

    async def prompts(turn: Turn | None) -> list[Prompt]:
        conversation = conversation_of(body, is_canonical=is_canonical)
        token_ids = await model.encode_chat(conversation, turn)  # whether tools can be shown at all
        rules = await chat_rules(
            body, model.tools, gateway.grammar_checks, tenant, is_canonical=is_canonical
        )
        max_tokens = model.max_tokens(body.requested_max_tokens, len(token_ids))
        params = body.sampling_params(max_tokens, model.card.vocab_size)
        start = content_text(body.messages[-1].content) if body.is_continued else ""
        return [
            Prompt(
                token_ids,
                msgspec.structs.replace(params, grammar=rules.grammar),
                prefix=start if body.echo else "",
                is_continuation=body.is_continued,
                reader=rules.reader,
                decode=rules.decode,
                source=PromptSource(conversation),
            )
        ]

    return Generation(
        body=body,
        session=session,
        num_prompts=1,
        prompts=prompts,
        received_at=received_at,
        shape=lambda identity: ChatShape(
            identity,
            model.tokenizer.vocabulary,
            body.stream_usage,
            has_logprobs=body.logprobs,
            has_prompt_logprobs=body.prompt_logprobs is not None,
        ),
        id_prefix="chatcmpl",
    )


def conversation_of(body: ChatRequest, *, is_canonical: bool) -> Conversation:
    """What the template is to write: the tools too where none of them may be called, so that what
    comes behind them stays a cached prefix."""
    ending = Ending.NEW_TURN if body.opens_turn else Ending.CLOSED
    return Conversation(
        body.messages,
        Ending.CONTINUED if body.is_continued else ending,
        tools=template_tools(body.tools, is_canonical=is_canonical),
        variables=body.chat_template_kwargs,
    )
