"""Keys as digests, and bodies read no further than their limit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.datastructures import Headers
from starlette.requests import Request

from service.config import is_loopback
from service.errors import AuthenticationFailed, BodyTooLarge, InvalidRequest, PermissionDenied
from service.security import KeyRing, read_body
from service.sessions.identity import DEFAULT_TENANT


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


def test_an_empty_ring_lets_everyone_in() -> None:
    KeyRing.of((), ()).check(Headers({}), needs_admin=True)


def test_admin_keys_open_everything_and_api_keys_do_not() -> None:
    ring = KeyRing.of(["user"], ["admin"])
    ring.check(Headers({"x-api-key": "admin"}), needs_admin=False)
    ring.check(Headers({"authorization": "Bearer admin"}), needs_admin=True)
    ring.check(Headers({"authorization": "Bearer  user "}), needs_admin=False)
    with pytest.raises(PermissionDenied):
        ring.check(Headers({"x-api-key": "user"}), needs_admin=True)
    with pytest.raises(AuthenticationFailed):
        ring.check(Headers({}), needs_admin=False)


def test_keys_are_not_kept_as_they_are() -> None:
    assert b"sk-secret" not in b"".join(KeyRing.of(["sk-secret"], []).api)


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


def test_an_empty_body() -> None:
    with pytest.raises(InvalidRequest):
        read([], 4)


def test_a_false_announcement_is_not_trusted() -> None:
    with pytest.raises(BodyTooLarge):
        read([b"abcde"], 4, content_length="1")


def test_each_key_is_a_tenant_of_its_own() -> None:
    ring = KeyRing.of(["one", "two"], ["admin"])
    keys = ("one", "two", "admin")
    tenants = [ring.check(Headers({"x-api-key": key}), needs_admin=False) for key in keys]
    assert len({*tenants, DEFAULT_TENANT}) == 4
    assert ring.check(Headers({"authorization": "Bearer one"}), needs_admin=False) == tenants[0]
    assert all("one" not in tenant and len(tenant) == 32 for tenant in tenants)
    assert KeyRing.of((), ()).check(Headers({}), needs_admin=False) == DEFAULT_TENANT
