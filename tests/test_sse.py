"""The event stream as an ASGI response, with a client made of two functions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from service.errors import GatewayError, InvalidRequest
from service.sse import DONE, KEEPALIVE, EventStream, ServerEvent, frame


@dataclass
class Client:
    """Collects what is sent; leaves when told to."""

    sent: list[dict[str, Any]] = field(default_factory=list)
    has_left: asyncio.Event = field(default_factory=asyncio.Event)

    async def receive(self) -> dict[str, Any]:
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])


def failed(error: GatewayError) -> tuple[ServerEvent, ...]:
    return (ServerEvent(error.body()), DONE)


def run(test: Callable[[Client], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(test(Client()), 10.0)

    asyncio.run(main())


async def respond(stream: EventStream, client: Client) -> None:
    await stream({"type": "http", "path": "/v1/completions"}, client.receive, client.send)


def test_events_have_their_names_and_a_last_message_follows() -> None:
    async def events() -> AsyncGenerator[ServerEvent, None]:
        yield ServerEvent(b"{}")
        yield ServerEvent(b"[]", "named")

    async def test(client: Client) -> None:
        ends: list[int] = []
        await respond(
            EventStream(events(), failed, keepalive=9.0, on_end=lambda: ends.append(1)), client
        )
        assert client.status == 200
        assert client.body == b"data: {}\n\nevent: named\ndata: []\n\n"
        assert [message.get("more_body") for message in client.sent[1:]] == [True, True, False]
        assert ends == [1]

    run(test)


def test_a_refusal_before_any_event_has_its_own_status() -> None:
    async def events() -> AsyncGenerator[ServerEvent, None]:
        raise InvalidRequest("no", param="p")
        yield DONE

    async def test(client: Client) -> None:
        await respond(EventStream(events(), failed, keepalive=9.0), client)
        assert client.status == 400
        assert client.body == InvalidRequest("no", param="p").body()

    run(test)


def test_a_refusal_after_the_headers_is_an_event() -> None:
    async def events() -> AsyncGenerator[ServerEvent, None]:
        await asyncio.sleep(0.05)
        raise InvalidRequest("late")
        yield DONE

    async def test(client: Client) -> None:
        await respond(EventStream(events(), failed, keepalive=9.0, patience=0.01), client)
        assert client.status == 200
        assert client.body == b"".join(map(frame, failed(InvalidRequest("late"))))

    run(test)


def test_an_unexpected_failure_after_the_headers_says_nothing_of_itself() -> None:
    async def events() -> AsyncGenerator[ServerEvent, None]:
        yield ServerEvent(b"{}")
        raise RuntimeError("secret")

    async def test(client: Client) -> None:
        with pytest.raises(RuntimeError):
            await respond(EventStream(events(), failed, keepalive=9.0), client)
        assert b"Internal error." in client.body
        assert b"secret" not in client.body
        assert client.body.endswith(frame(DONE))
        assert client.sent[-1]["more_body"] is False

    run(test)


def test_comments_come_only_when_nothing_else_does() -> None:
    async def events() -> AsyncGenerator[ServerEvent, None]:
        await asyncio.sleep(0.13)
        for _ in range(10):
            yield ServerEvent(b"{}")
            await asyncio.sleep(0.01)

    async def test(client: Client) -> None:
        await respond(EventStream(events(), failed, keepalive=0.05), client)
        waiting, _, flowing = client.body.partition(frame(ServerEvent(b"{}")))
        assert waiting == KEEPALIVE * waiting.count(KEEPALIVE) != b""
        assert KEEPALIVE not in flowing

    run(test)


@pytest.mark.parametrize("num_events", [0, 2])
def test_a_client_that_leaves_closes_the_events(num_events: int) -> None:
    async def test(client: Client) -> None:
        closed = asyncio.Event()
        ends: list[int] = []

        async def events() -> AsyncGenerator[ServerEvent, None]:
            try:
                for _ in range(num_events):
                    yield ServerEvent(b"{}")
                await asyncio.sleep(60.0)
            finally:
                closed.set()

        stream = EventStream(events(), failed, keepalive=9.0, on_end=lambda: ends.append(1))
        responding = asyncio.create_task(respond(stream, client))
        await asyncio.sleep(0.02)
        client.has_left.set()
        await responding
        assert closed.is_set()
        assert ends == [1]

    run(test)
