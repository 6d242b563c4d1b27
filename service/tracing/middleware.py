"""The layer that opens a span for each request of the API and ends it with its answer.

Owns which requests have one and what of their headers is read: trace context, nothing else. Paths
are left out, since they may name a session; a route's pattern stands for them. Knows nothing of how
spans are made.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.tracing.spans import ClosedWith, RequestSpans

__all__ = ["TracingMiddleware"]

_TRACEPARENT, _TRACESTATE = b"traceparent", b"tracestate"


class TracingMiddleware:
    """Stands inside of what gives requests their ids."""

    def __init__(self, app: ASGIApp, spans: RequestSpans) -> None:
        self._app = app
        self._spans = spans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _is_traced(scope):
            await self._app(scope, receive, send)
            return
        request_id: str = scope["headstart_request_id"]
        self._spans.open(request_id, scope["method"], _trace_context(scope))
        status = 0
        error = ""

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noting)
        except BaseException as failure:
            error = type(failure).__name__  # its own words may quote a prompt
            raise
        finally:
            route = getattr(scope.get("route"), "path", "")
            self._spans.end(request_id, ClosedWith(route, status, error))


def _is_traced(scope: Scope) -> bool:
    """What is asked of the API; not what watches the server or reads from it."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    path: str = scope["path"]
    return path.startswith("/v1/")


def _trace_context(scope: Scope) -> dict[str, list[str]]:
    """The two headers of https://www.w3.org/TR/trace-context/. Two parents are none."""
    found: dict[bytes, list[str]] = {_TRACEPARENT: [], _TRACESTATE: []}
    for name, value in scope["headers"]:
        if name in found:
            found[name].append(value.decode("latin-1"))
    if len(found[_TRACEPARENT]) != 1:
        return {}
    return {name.decode(): values for name, values in found.items() if values}
