"""The composition root of the gateway: configuration and workers in, an ASGI app out.

Owns how the parts are put together, and the order of the layers around the routes. All state is
made here; there is none at module level.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from service.config import ConfigError, GatewayConfig
from service.errors import GatewayError, InvalidRequest, error_from_status, error_response
from service.gateway import Gateway
from service.http_protocol import HeadstartProtocol
from service.metadata import make_metadata_store
from service.request_context import RequestContextMiddleware
from service.routes import (
    admin,
    cache,
    chat,
    completions,
    dashboard,
    explain,
    health,
    history,
    messages,
    metrics,
    models,
    openapi,
    responses,
    sessions,
    tokenize,
)
from service.security import MAX_HEAD_BYTES, SecurityMiddleware
from service.workers.registry import WorkerRegistry

if TYPE_CHECKING:
    from service.tracing.spans import RequestSpans

__all__ = ["create_app", "gateway_in", "uvicorn_config"]

KEEPALIVE_SECONDS = 15.0
_LAST_SPANS_S = 3.0  # for those of the last requests to reach their collector
# /dashboard/data stands before /dashboard/{name}.
_ROUTES = (
    *(chat, completions, messages, responses, models, tokenize, sessions, cache, explain, history),
    *(health, openapi, metrics, admin, dashboard),
)


def create_app(
    config: GatewayConfig, registry: WorkerRegistry, *, keepalive: float = KEEPALIVE_SECONDS
) -> FastAPI:
    """``registry`` is started and closed with the app. ``keepalive`` is in seconds. Raises
    ConfigError for a configuration that cannot be used.

    The app's own documentation pages are off: they would load scripts from elsewhere.
    """
    gateway = Gateway(config, registry, make_metadata_store(config), keepalive=keepalive)
    spans = _make_spans(config)
    if spans is not None:
        gateway.diagnostics.add_listener(spans.ended)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await gateway.start()
        try:
            yield
        finally:
            await gateway.stop()
            if spans is not None:
                await asyncio.to_thread(spans.close, _LAST_SPANS_S)

    app = FastAPI(
        title="Headstart",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        # Its own spans would carry paths, which may name sessions, and its records the words of
        # exceptions, which may quote a prompt: ours are all, whatever the environment says.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
        lifespan=lifespan,
        middleware=[
            Middleware(RequestContextMiddleware, on_error=gateway.metrics.count_error),
            *_tracing(spans),
            Middleware(
                SecurityMiddleware,
                config=config,
                tenants=gateway.tenants,
                rates=gateway.gate.rates,
            ),
        ],
        exception_handlers={
            GatewayError: _on_gateway_error,
            HTTPException: _on_http_exception,
            RequestValidationError: _on_validation_error,
        },
        redirect_slashes=False,
    )
    app.state.gateway = gateway
    for routes in _ROUTES:
        app.include_router(routes.router)
    return app


def gateway_in(app: FastAPI) -> Gateway:
    """The gateway of an app made by :func:`create_app`, for draining it."""
    gateway = app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway


def uvicorn_config(app: FastAPI, config: GatewayConfig) -> uvicorn.Config:
    """How the app is to be served: no access log, since a path may carry what a client typed."""
    return uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        access_log=False,
        log_config=None,
        log_level=config.log_level,
        server_header=False,
        http=HeadstartProtocol,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        ws="none",
        lifespan="on",
        timeout_keep_alive=75,
    )


def _make_spans(config: GatewayConfig) -> RequestSpans | None:
    """None, and nothing of OpenTelemetry loaded, where none are asked for."""
    if config.otlp_endpoint is None:
        return None
    try:
        from service.tracing.export import exported_spans
    except ImportError:
        raise ConfigError(
            "--otlp-endpoint needs OpenTelemetry, which is not installed here: "
            "pip install 'headstart[otel]'"
        ) from None
    return exported_spans(config.otlp_endpoint)


def _tracing(spans: RequestSpans | None) -> tuple[Middleware, ...]:
    if spans is None:
        return ()
    from service.tracing.middleware import TracingMiddleware

    return (Middleware(TracingMiddleware, spans=spans),)


async def _on_gateway_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    return error_response(error)


async def _on_http_exception(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = error_response(error_from_status(error.status_code, error.detail))
    response.headers.update(error.headers or {})
    return response


async def _on_validation_error(_: Request, error: Exception) -> Response:
    return error_response(InvalidRequest("The request is not valid."))
