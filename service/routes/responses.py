"""POST /v1/responses, and what was stored of responses: to be read, listed and deleted.

Everything is scoped to the caller's tenant: the responses of others are not found.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from service.dialects.cache_diagnostics import openai_diagnostics
from service.dialects.responses import chat_of_response
from service.errors import InvalidRequest, NotFound
from service.gateway import Gateway, gateway_of
from service.request_context import request_id_of
from service.routes.answering import answer
from service.routes.asked import Comparison, Generation, Prompt, told_as
from service.routes.chat import chat_generation
from service.routes.needing_store import needs_store
from service.schemas import bodies
from service.schemas.bodies import Usage
from service.schemas.response_bodies import (
    ItemList,
    PromptCacheDiagnostics,
    ResponseDeleted,
)
from service.schemas.responses import MAX_PAGE, Item, ResponsesRequest, parse_responses_request
from service.security import read_body
from service.sessions.identity import HEADER, named_session, tenant_of
from service.sessions.stored_responses import FoundResponse, StoredResponse, StoredResponses
from service.sessions.turn import SessionBranch, Turn
from service.shapes.base import AnswerIdentity, Choice
from service.shapes.responses import ResponsesShape

__all__ = ["router"]

router = APIRouter()

_DEFAULT_LIMIT = 20


@router.post("/v1/responses")
@needs_store
async def create_response(request: Request) -> Response:
    gateway = gateway_of(request)
    content = await read_body(request, gateway.config.max_body_size)
    received_at = gateway.metrics.clock()
    body = parse_responses_request(content)
    if named_session(request, None) is not None:
        raise InvalidRequest(
            f"{HEADER}: not with responses, which go on from each other by previous_response_id.",
            param=HEADER,
        )
    previous = await _previous(request, body.previous_response_id)
    exchange = _Exchange(request, gateway, body, previous)
    return await answer(request, exchange.generation(received_at))


@router.get("/v1/responses/{response_id}")
@needs_store
async def get_response(request: Request, response_id: str) -> Response:
    if request.query_params.get("stream", "false").lower() not in ("false", "0", ""):
        raise InvalidRequest(
            "stream: a response that is over is not streamed again.",
            param="stream",
            code="unsupported_parameter",
        )
    found = await _found(request, response_id)
    return Response(found.stored.body, media_type="application/json")


@router.delete("/v1/responses/{response_id}")
@needs_store
async def delete_response(request: Request, response_id: str) -> Response:
    if not await gateway_of(request).responses.delete(tenant_of(request), response_id):
        raise _unknown(response_id)
    return _json(ResponseDeleted(response_id))


@router.get("/v1/responses/{response_id}/input_items")
@needs_store
async def list_input_items(request: Request, response_id: str) -> Response:
    """The items that the response was asked with, its own alone, the latest first."""
    found = await _found(request, response_id)
    items: list[dict[str, Any]] = msgspec.json.decode(found.stored.asked)
    query = request.query_params
    order, limit = query.get("order", "desc"), query.get("limit", str(_DEFAULT_LIMIT))
    if order not in ("asc", "desc"):
        raise InvalidRequest("order: must be asc or desc.", param="order")
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= MAX_PAGE):
        raise InvalidRequest(f"limit: must be from 1 to {MAX_PAGE}.", param="limit")
    if order == "desc":
        items.reverse()
    if "after" in query:
        after = [number for number, item in enumerate(items) if item["id"] == query["after"]]
        if not after:
            raise InvalidRequest("after: no input item of this response.", param="after")
        items = items[after[0] + 1 :]
    page = items[: int(limit)]
    first_id, last_id = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return _json(ItemList(page, first_id, last_id, len(items) > len(page)))


@router.post("/v1/responses/{response_id}/cancel")
@needs_store
async def cancel_response(request: Request, response_id: str) -> Response:
    """Only a response in the background could be cancelled, and there are none."""
    await _found(request, response_id)
    raise InvalidRequest("Only a response that was created with background true can be cancelled.")


class _Exchange:
    """One response as it comes about: what it is asked, and what is kept of it."""

    def __init__(
        self,
        request: Request,
        gateway: Gateway,
        body: ResponsesRequest,
        previous: FoundResponse | None,
    ) -> None:
        self._gateway = gateway
        self._body = body
        self._previous = previous
        self._hex = request_id_of(request)
        is_kept = body.store and not gateway.config.no_store
        origin = None if previous is None else previous.record
        self._branch = SessionBranch(origin, is_kept)
        self._key = StoredResponses.key(tenant_of(request), f"resp_{self._hex}")
        self._earlier = _items_after(previous)
        self._shape: ResponsesShape | None = None

    def generation(self, received_at: float) -> Generation:
        """Raises InvalidRequest, ModelNotFound or Unavailable."""
        gateway, body = self._gateway, self._body
        earlier = [msgspec.convert(item, Item) for item in self._earlier]
        chat = chat_of_response(body, earlier)
        has_session = self._branch.is_kept or self._previous is not None
        session = self._key if has_session else None
        asked = chat_generation(gateway, chat.request, received_at, session, self._key.tenant)
        vocabulary = gateway.model(body.model).tokenizer.vocabulary

        async def prompts(turn: Turn | None) -> Sequence[Prompt]:
            with chat.retelling.of_refusals():
                return told_as(await asked.prompts(turn), chat.retelling)

        comparison = self._comparison()

        def shape(identity: AnswerIdentity) -> ResponsesShape:
            is_stored = self._branch.is_kept
            told: PromptCacheDiagnostics | UnsetType = UNSET
            if comparison is not None and comparison.found is not None:
                told = openai_diagnostics(comparison.found)
            self._shape = ResponsesShape(
                identity, body, vocabulary, is_stored=is_stored, diagnostics=told
            )
            return self._shape

        return replace(
            asked,
            prompts=prompts,
            shape=shape,
            id_prefix="resp",
            branch=self._branch if has_session else None,
            comparison=comparison,
            previous_id=(body.previous_response_id or "").removeprefix("resp_"),
            before_end=self._keep if self._branch.is_kept else None,
        )

    def _comparison(self) -> Comparison | None:
        options = self._body.prompt_cache_options
        if options is None or options.comparison_response_id is None:
            return None
        return Comparison(options.comparison_response_id.removeprefix("resp_"))

    async def _keep(self, choices: Sequence[Choice], usage: Usage) -> None:
        """Where that fails, the response says that it is not stored."""
        shape = self._shape
        assert shape is not None
        finished = shape.finished(choices, usage)
        stored = StoredResponse(
            body=bodies.encode(finished),
            asked=msgspec.json.encode(self._asked_items()),
            earlier=msgspec.json.encode(self._earlier),
        )
        view = self._gateway.served_model().view
        shape.is_stored = await self._gateway.responses.keep(self._key, stored, self._branch, view)

    def _asked_items(self) -> list[dict[str, Any]]:
        """With the ids that they can be told apart by; whatever ids they came with are others'."""
        items: list[dict[str, Any]] = msgspec.to_builtins(self._body.items)
        prefixes = {"message": "msg", "function_call": "fc", "function_call_output": "fco"}
        for number, item in enumerate(items):
            item["id"] = f"{prefixes[item['type']]}_{self._hex}_in{number}"
            item["status"] = "completed"
            if item["type"] == "message" and isinstance(item["content"], str):
                kind = "output_text" if item["role"] == "assistant" else "input_text"
                item["content"] = [{"type": kind, "text": item["content"]}]
        return items


def _items_after(previous: FoundResponse | None) -> list[dict[str, Any]]:
    """All that was said up to the end of a response, its instructions left out."""
    if previous is None:
        return []
    stored = previous.stored
    output = msgspec.json.decode(stored.body)["output"]
    asked = (msgspec.json.decode(text) for text in (stored.earlier, stored.asked))
    return [*itertools.chain(*asked), *output]


async def _previous(request: Request, response_id: str | None) -> FoundResponse | None:
    if response_id is None:
        return None
    found = await gateway_of(request).responses.find(tenant_of(request), response_id)
    if found is None:
        raise InvalidRequest(
            f"Previous response with id '{response_id[:64]}' not found.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return found


async def _found(request: Request, response_id: str) -> FoundResponse:
    found = await gateway_of(request).responses.find(tenant_of(request), response_id)
    if found is None:
        raise _unknown(response_id)
    return found


def _unknown(response_id: str) -> NotFound:
    return NotFound(f"Response with id '{response_id[:64]}' not found.", code="response_not_found")


def _json(body: msgspec.Struct) -> Response:
    return Response(bodies.encode(body), media_type="application/json")
