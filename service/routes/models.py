"""GET /v1/models and /v1/models/{id}, in the form of the API that is spoken."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from service.errors import Unavailable, speaks_anthropic
from service.gateway import gateway_of
from service.schemas import bodies
from service.schemas.message_bodies import ModelInfo, ModelPage
from service.served_model import ServedModel

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    gateway = gateway_of(request)
    if gateway.served is None:
        raise Unavailable(f"Not ready: {gateway.unready_reason}.", code="not_ready", retry_after=5)
    model = gateway.served
    if speaks_anthropic(request.scope):
        infos = tuple(_info(model, name) for name in model.names)
        return _json(ModelPage(infos, infos[0].id, infos[-1].id))
    return _json(bodies.ModelList(tuple(_entry(model, name) for name in model.names)))


@router.get("/v1/models/{model_id:path}")
async def retrieve_model(request: Request, model_id: str) -> Response:
    model = gateway_of(request).model(model_id)
    if speaks_anthropic(request.scope):
        return _json(_info(model, model_id))
    return _json(_entry(model, model_id))


def _entry(model: ServedModel, name: str) -> bodies.ModelEntry:
    return bodies.ModelEntry(name, model.created, model.card.max_model_len)


def _info(model: ServedModel, name: str) -> ModelInfo:
    created_at = datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return ModelInfo(name, name, created_at, model.card.max_model_len)


def _json(body: msgspec.Struct) -> Response:
    return Response(bodies.encode(body), media_type="application/json")
