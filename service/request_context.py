"""The outermost layer around every request: its id, and the promise that no exception leaks.

Owns the X-Request-Id header and what an unexpected exception becomes. Knows nothing of routes.

An id that the client sends comes back in the answer and stands in the log beside our own. Ours is
what names a request everywhere else, so that two clients with one id never meet.
"""

from __future__ import annotations

import logging
import re
import traceback
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from model_worker.protocol import log_event
from service.errors import (
    GatewayError,
    InternalError,
    error_response,
    noted_error,
    speaks_anthropic,
)

__all__ = ["RequestContextMiddleware", "request_id_of"]

_log = logging.getLogger("headstart.requests")
_PROBES = frozenset({"/health"})  # its 503 is the answer that was asked for, every few seconds
_SANE_ID = re.compile(r"[\x21-\x7e]{1,128}")


def request_id_of(request: Request) -> str:
    """32 hexadecimal digits; also in the answer's X-Request-Id, unless the client sent an id."""
    request_id: str = request.scope["headstart_request_id"]
    return request_id


class RequestContextMiddleware:
    """``on_error`` is told of each error that a request is answered with."""

    def __init__(self, app: ASGIApp, on_error: Callable[[GatewayError], None]) -> None:
        self._app = app
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope["headstart_request_id"] = uuid.uuid4().hex
        given_id = _given_id(scope)
        if given_id:
            log_event(
                _log, logging.INFO, "request named", request_id=request_id, client_id=given_id
            )
        is_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                headers = MutableHeaders(scope=message)
                headers.append("X-Request-Id", given_id or request_id)
                if speaks_anthropic(scope):
                    headers.append("request-id", request_id)
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            event = "request ended: the client left while it was sending"
            log_event(_log, logging.INFO, event, request_id=request_id)
        except Exception as error:
            _log_failure(request_id, error)
            if not is_started:
                message = f"Internal error; its id is {request_id}."
                await error_response(InternalError(message))(scope, receive, send_with_id)
        finally:
            error_told = noted_error(scope)
            if error_told is not None and scope["path"] not in _PROBES:
                self._on_error(error_told)
                _log_error(request_id, scope, error_told)


def _given_id(scope: Scope) -> str:
    """The client's own id; empty if it sent none, or none that a header and a log can carry."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _SANE_ID.fullmatch(given) else ""


def _log_error(request_id: str, scope: Scope, error: GatewayError) -> None:
    """Without its message and field, which may have been the client's words; nor its path, unless
    it is a route's."""
    route = scope.get("route")
    log_event(
        _log,
        logging.INFO if error.status < 500 else logging.WARNING,
        "request refused" if error.status < 500 else "request failed",
        request_id=request_id,
        route=getattr(route, "path", None),
        status=error.status,
        type=error.type,
        code=error.code,
    )


def _log_failure(request_id: str, error: Exception) -> None:
    """Where it happened, without the exception's own words: they may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    places = " < ".join(f"{frame.filename}:{frame.lineno}" for frame in reversed(frames[-6:]))
    log_event(
        _log,
        logging.ERROR,
        "an exception was not foreseen",
        request_id=request_id,
        exception=type(error).__name__,
        places=places,
    )
