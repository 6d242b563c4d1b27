"""POST /v1/completions."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from service.answer_rules import AnswerRules, plain_rules
from service.diagnostics.trace import PromptSource
from service.gateway import Gateway, gateway_of
from service.routes.answering import answer
from service.routes.asked import Generation, Prompt
from service.schemas.completion import CompletionRequest, parse_completion_request
from service.security import read_body
from service.served_model import ServedModel
from service.sessions.identity import SessionKey, named_session, tenant_of
from service.sessions.turn import Turn
from service.shapes.completion import CompletionShape

__all__ = ["completion_generation", "router"]

router = APIRouter()


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    gateway = gateway_of(request)
    content = await read_body(request, gateway.config.max_body_size)
    received_at = gateway.metrics.clock()
    body = parse_completion_request(content)
    session = named_session(request, body.session_id)
    asked = completion_generation(gateway, body, received_at, session, tenant=tenant_of(request))
    return await answer(request, asked)


def completion_generation(
    gateway: Gateway,
    body: CompletionRequest,
    received_at: float,
    session: SessionKey | None,
    worker_id: str = "",
    tenant: str = "",
) -> Generation:
    """``worker_id`` is a worker to prefer, ``tenant`` whose grammars are looked at.

    Raises InvalidRequest, ModelNotFound or Unavailable."""
    model = gateway.model(body.model)

    async def prompts(turn: Turn | None) -> list[Prompt]:
        rules = await plain_rules(body, gateway.grammar_checks, tenant)
        is_one = len(body.prompts) == 1
        return [
            await _prompt(
                model, body, given, turn, rules, "prompt" if is_one else f"prompt[{index}]"
            )
            for index, given in enumerate(body.prompts)
        ]

    return Generation(
        body=body,
        session=session,
        num_prompts=len(body.prompts),
        prompts=prompts,
        received_at=received_at,
        shape=lambda identity: CompletionShape(
            identity,
            model.tokenizer.vocabulary,
            body.stream_usage,
            has_logprobs=body.logprobs is not None,
            has_prompt_logprobs=body.prompt_logprobs is not None,
        ),
        id_prefix="cmpl",
        worker_id=worker_id,
    )


async def _prompt(
    model: ServedModel,
    body: CompletionRequest,
    given: str | list[int],
    turn: Turn | None,
    rules: AnswerRules,
    name: str,
) -> Prompt:
    if isinstance(given, str):
        add_special_tokens = body.add_special_tokens
        token_ids = await model.encode_text(given, add_special_tokens=add_special_tokens, turn=turn)
    else:
        token_ids = model.check_ids(given, turn)
    max_tokens = model.max_tokens(body.requested_max_tokens, len(token_ids))
    params = body.sampling_params(max_tokens, model.card.vocab_size)
    prefix = ""
    if body.echo:
        prefix = given if isinstance(given, str) else model.tokenizer.decode(given)
    params = msgspec.structs.replace(params, grammar=rules.grammar)
    source = PromptSource(field=name)
    return Prompt(token_ids, params, prefix=prefix, is_continuation=True, source=source)
