"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from service.answers import ChatShape
from service.gateway import Gateway, gateway_of
from service.routes.answering import Generation, Prompt, answer
from service.schemas.chat import ChatRequest, parse_chat_request
from service.security import read_body
from service.sessions.identity import SessionKey, named_session
from service.sessions.turn import Turn

__all__ = ["chat_generation", "router"]

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    gateway = gateway_of(request)
    content = await read_body(request, gateway.config.max_body_size)
    received_at = gateway.metrics.clock()
    body = parse_chat_request(content)
    session = named_session(request, body.session_id)
    return await answer(request, chat_generation(gateway, body, received_at, session))


def chat_generation(
    gateway: Gateway, body: ChatRequest, received_at: float, session: SessionKey | None
) -> Generation:
    """Raises ModelNotFound or Unavailable."""
    model = gateway.model(body.model)

    async def prompts(turn: Turn | None) -> list[Prompt]:
        token_ids = await model.encode_chat(body.messages, turn)
        max_tokens = model.max_tokens(body.requested_max_tokens, len(token_ids))
        params = body.sampling_params(max_tokens, model.card.vocab_size)
        return [Prompt(token_ids, params)]

    return Generation(
        body=body,
        session=session,
        num_prompts=1,
        prompts=prompts,
        received_at=received_at,
        shape=ChatShape,
        id_prefix="chatcmpl",
    )
