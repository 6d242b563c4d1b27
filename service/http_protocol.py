"""The HTTP protocol of one connection: uvicorn's own, with bounds on what comes before a request.

Owns the number of connections, the time for a request's head, and the error body of what is no
request at all, which no route ever sees. Everything after the head is the app's.
"""

from __future__ import annotations

import asyncio
import http
import resource
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from service.errors import (
    GatewayError,
    HeadersTooLarge,
    InvalidRequest,
    RequestTimeout,
    Unavailable,
)

__all__ = ["HEAD_SECONDS", "HeadstartProtocol", "max_connections"]

HEAD_SECONDS = 30.0  # from the first byte of a head, or the opening of a connection, to its end
_LINGER_SECONDS = 1.0
_MAX_CONNECTIONS = 8_192
_FILES_KEPT_BACK = 128  # of the process's limit of open files: links, logs, blocks on disk


def max_connections() -> int:
    """At once, so that there is always a file descriptor left to say no with."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return max(1, min(_MAX_CONNECTIONS, limit - _FILES_KEPT_BACK))


class HeadstartProtocol(H11Protocol):
    """``head_seconds`` and ``limit`` are the process's unless a test makes another class of it."""

    head_seconds = HEAD_SECONDS
    limit = max_connections()

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._head_timer: asyncio.TimerHandle | None = None
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limit:
            self._refuse(Unavailable("Too many connections.", retry_after=1))
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused or self.transport.is_closing():
            return
        super().data_received(data)
        if self._is_within_request:
            self._stop_waiting()
        elif self._head_timer is None and not (self._is_refused or self.transport.is_closing()):
            self._await_head()

    def send_400_response(self, msg: str) -> None:
        """Called by the base class for what is not HTTP, while it handles h11's exception."""
        error = sys.exception()
        if getattr(error, "error_status_hint", 400) == 431:
            self._refuse(HeadersTooLarge("The head of the request is too large."))
        else:
            self._refuse(InvalidRequest("This is not a valid HTTP request.", code="invalid_http"))

    @property
    def _is_within_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_seconds, self._on_late_head)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_late_head(self) -> None:
        self._head_timer = None
        if self._is_within_request or self.transport.is_closing():
            return
        if self.conn.trailing_data[0]:
            self._refuse(RequestTimeout("The head of the request did not come in time."))
        else:  # opened ahead of its use, and not used: nobody waits for an answer
            self.transport.close()

    def _refuse(self, error: GatewayError) -> None:
        """Answer without a request, if that is still possible, and end the connection: for the
        answer to be seen, a moment later, as long as the client may still be sending."""
        self._is_refused = True
        self._stop_waiting()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = error.body()
            headers = {
                **error.headers(),
                "Connection": "close",
                "Content-Type": "application/json",
                "Content-Length": str(len(body)),
            }
            response = h11.Response(
                status_code=error.status,
                headers=list(headers.items()),
                reason=http.HTTPStatus(error.status).phrase.encode(),
            )
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            self.transport.write_eof()
        self.loop.call_later(_LINGER_SECONDS, self.transport.close)
