"""Server-sent events: their bytes, and the response that sends them.

Owns framing, keep-alive comments, and what happens when the client leaves or a failure comes
after the headers. Knows nothing of what the events say.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.errors import GatewayError, InternalError, error_response, note_error

__all__ = ["DONE", "KEEPALIVE", "EventStream", "ServerEvent", "client_gone", "frame"]

KEEPALIVE = b": keepalive\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


class ServerEvent(msgspec.Struct, frozen=True):
    """``data`` must hold no line break, which JSON never does; ``name`` is the event's type."""

    data: bytes
    name: str = ""


DONE = ServerEvent(b"[DONE]")  # what OpenAI's streams end with
Failure = Callable[[GatewayError], Sequence[ServerEvent]]


def frame(event: ServerEvent) -> bytes:
    head = f"event: {event.name}\n".encode() if event.name else b""
    return head + b"data: " + event.data + b"\n\n"


async def client_gone(receive: Receive) -> None:
    """Returns once the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """An ASGI response that sends the events of ``events``.

    The headers wait for the first event, for at most ``patience`` seconds: a request that is
    refused at once is answered with its own status. Later failures become the events that
    ``failure`` makes of them. ``keepalive`` seconds without an event bring a comment. A client that
    leaves cancels ``events``. ``on_end`` is called however it ends. ``headers`` gives, when they
    are sent, what stands beside its own.
    """

    def __init__(
        self,
        events: AsyncGenerator[ServerEvent, None],
        failure: Failure,
        *,
        keepalive: float,
        patience: float = 1.0,
        on_end: Callable[[], None] = lambda: None,
        headers: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        super().__init__(media_type="text/event-stream")
        self._further_headers = headers
        self._events = events
        self._failure = failure
        self._keepalive = keepalive
        self._patience = min(patience, keepalive)
        self._on_end = on_end
        self._is_started = False
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        producer = asyncio.create_task(self._produce(scope, receive, send))
        watcher = asyncio.create_task(client_gone(receive))
        ticker = asyncio.create_task(self._tick(send))
        try:
            await asyncio.wait({producer, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            tasks = (producer, watcher, ticker)
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            self._on_end()
        failure = results[0]
        if isinstance(failure, Exception):
            raise failure

    async def _produce(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with contextlib.aclosing(self._events) as events:
                async for event in events:
                    await self._send(send, frame(event))
        except GatewayError as error:
            if not self._is_started:
                self._is_started = True
                await error_response(error)(scope, receive, send)
                return
            await self._fail(scope, send, error)
            return
        except Exception:
            if self._is_started:  # else the answer is still free to be a plain 500
                await self._fail(scope, send, InternalError("Internal error."))
            raise
        await self._end(send, ())

    async def _fail(self, scope: Scope, send: Send, error: GatewayError) -> None:
        note_error(scope, error)
        await self._end(send, self._failure(error))

    async def _end(self, send: Send, events: Sequence[ServerEvent]) -> None:
        await self._send(send, b"".join(map(frame, events)), is_last=True)

    async def _tick(self, send: Send) -> None:
        await asyncio.sleep(self._patience)
        await self._start(send)
        while True:
            now = asyncio.get_running_loop().time()
            idle = now - self._last_sent
            if idle >= self._keepalive:
                await self._send(send, KEEPALIVE)
                idle = 0.0
            await asyncio.sleep(self._keepalive - idle)

    async def _start(self, send: Send) -> None:
        if not self._is_started:
            self._is_started = True
            self._last_sent = asyncio.get_running_loop().time()
            further = self._further_headers().items()
            headers = [(name.lower().encode(), text.encode()) for name, text in further]
            await send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [*_HEADERS, *headers],
                }
            )

    async def _send(self, send: Send, body: bytes, *, is_last: bool = False) -> None:
        if not self._is_started:
            await self._start(send)
        self._last_sent = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": body, "more_body": not is_last})
