"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from service.errors import Unavailable
from service.gateway import gateway_of
from service.schemas import bodies
from service.served_model import ServedModel

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    gateway = gateway_of(request)
    if gateway.served is None:
        raise Unavailable(f"Not ready: {gateway.unready_reason}.", code="not_ready", retry_after=5)
    model = gateway.served
    entries = tuple(_entry(model, name) for name in model.names)
    return _json(bodies.encode(bodies.ModelList(entries)))


@router.get("/v1/models/{model_id:path}")
async def retrieve_model(request: Request, model_id: str) -> Response:
    return _json(bodies.encode(_entry(gateway_of(request).model(model_id), model_id)))


def _entry(model: ServedModel, name: str) -> bodies.ModelEntry:
    return bodies.ModelEntry(name, model.created, model.card.max_model_len)


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
