"""Where keys stand, and bodies read no further and no longer than their limits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.datastructures import Headers
from starlette.requests import Request

from service.config import is_loopback
from service.errors import BodyTooLarge, InvalidRequest, RequestTimeout
from service.security import key_of, read_body


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("localhost", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.5", False),
        ("localhost.example", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"x-api-key": "one"}, "one"),
        ({"authorization": "Bearer one"}, "one"),
        ({"authorization": "bearer  one "}, "one"),
        ({"authorization": "Bearer one", "x-api-key": "two"}, "one"),
        ({"authorization": "Basic one", "x-api-key": "two"}, "two"),
        ({"authorization": "Bearer"}, ""),
        ({"authorization": "one"}, ""),
        ({}, ""),
    ],
)
def test_where_a_key_stands(headers: dict[str, str], key: str) -> None:
    assert key_of(Headers(headers)) == key


def read(chunks: list[bytes], limit: int, **headers: str) -> bytes:
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks
    ]
    messages.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> Any:
        return messages.pop(0)

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    request = Request({"type": "http", "method": "POST", "headers": raw}, receive)
    return asyncio.run(read_body(request, limit))


def test_a_body_of_exactly_the_limit() -> None:
    assert read([b"ab", b"cd"], 4) == b"abcd"


def test_a_larger_body_is_refused_announced_or_not() -> None:
    with pytest.raises(BodyTooLarge, match="limit of 4 bytes"):
        read([b"ab", b"cde"], 4)
    with pytest.raises(BodyTooLarge):
        read([b"abcde"], 4, content_length="5")


def test_a_larger_body_that_never_comes_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.security._DRAIN_SECONDS", 0.05)

    async def receive() -> Any:
        await asyncio.sleep(60)

    raw = [(b"content-length", b"5")]
    request = Request({"type": "http", "method": "POST", "headers": raw}, receive)
    with pytest.raises(BodyTooLarge):
        asyncio.run(asyncio.wait_for(read_body(request, 4), 5))


@pytest.mark.parametrize("limit", ["_IDLE_SECONDS", "_BODY_SECONDS"])
def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(f"service.security.{limit}", 0.05)
    monkeypatch.setattr("service.security._BODY_PACE", 10**9)

    async def receive() -> Any:
        await asyncio.sleep(0.02)
        if limit == "_IDLE_SECONDS":
            await asyncio.sleep(60)
        return {"type": "http.request", "body": b"x", "more_body": True}

    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    with pytest.raises(RequestTimeout) as failure:
        asyncio.run(asyncio.wait_for(read_body(request, 10_000), 5))
    assert failure.value.headers() == {"Connection": "close"}


def test_an_empty_body() -> None:
    with pytest.raises(InvalidRequest):
        read([], 4)


def test_a_false_announcement_is_not_trusted() -> None:
    with pytest.raises(BodyTooLarge):
        read([b"abcde"], 4, content_length="1")
