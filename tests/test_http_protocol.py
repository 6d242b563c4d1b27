"""What comes before a request, on raw sockets: heads too large, too slow or none, and bodies that
trickle."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from service import security
from service.http_protocol import HeadstartProtocol, max_connections
from tests.gateway_kit import MODEL_NAME
from tests.http_kit import Served, serving

SLOW_S = 0.3  # stands for the limits on heads and bodies
LIMIT = 12  # connections


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeadstartProtocol, "head_seconds", SLOW_S)
        patch.setattr(HeadstartProtocol, "limit", LIMIT)
        patch.setattr(security, "_IDLE_SECONDS", SLOW_S)
        patch.setattr(security, "_BODY_SECONDS", 3 * SLOW_S)
        patch.setattr(security, "_BODY_PACE", 10**12)
        with serving() as served:
            yield served


def connected(served: Served) -> socket.socket:
    host, port = served.base_url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=5.0)


def rest_of(connection: socket.socket) -> bytes:
    """All that comes until the server ends the connection."""
    content = b""
    while piece := connection.recv(65_536):
        content += piece
    return content


def answer_to(served: Served, *pieces: bytes, pause_s: float = 0.0) -> tuple[int, Any]:
    """Status and error of what the server says before it ends the connection."""
    with connected(served) as connection:
        for piece in pieces:
            try:
                connection.sendall(piece)
            except OSError:  # it has had enough
                break
            time.sleep(pause_s)
        head, _, body = rest_of(connection).partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    assert b"application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]


def answered(connection: socket.socket) -> bool:
    """Whether the health is well."""
    content = b""
    while not content.endswith(b"}") and (piece := connection.recv(65_536)):
        content += piece
    return b" 200 OK\r\n" in content


HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    "nonsense", [b"\x16\x03\x01\x02\x00", b"HELLO\r\n\r\n", b"GET / HTTP/9\r\n"]
)
def test_what_is_no_http(served: Served, nonsense: bytes) -> None:
    status, error = answer_to(served, nonsense + b"\r\n\r\n")
    assert (status, error["code"]) == (400, "invalid_http")
    assert set(error) == {"message", "type", "param", "code"}


def test_a_head_without_an_end_is_refused_before_it_fills_memory(served: Served) -> None:
    status, error = answer_to(served, HEAD + b"X: " + b"x" * 200_000)
    assert (status, error["code"]) == (431, "headers_too_large")


@pytest.mark.parametrize(
    "headers",
    [b"X: " + b"x" * 33_000 + b"\r\n", b"".join(b"X-%d: 1\r\n" % n for n in range(100))],
)
def test_too_many_or_too_long_headers(served: Served, headers: bytes) -> None:
    status, error = answer_to(served, HEAD + b"Connection: close\r\n" + headers + b"\r\n")
    assert (status, error["code"]) == (431, "headers_too_large")


def test_heads_within_the_limits_pass(served: Served) -> None:
    with served.client() as client:
        headers = {f"X-{number}": "x" * 300 for number in range(80)}
        assert client.get("/health", headers=headers).status_code == 200


def test_a_head_that_trickles_is_given_up(served: Served) -> None:
    began = time.monotonic()
    status, error = answer_to(served, *(bytes([byte]) for byte in HEAD), pause_s=SLOW_S / 6)
    assert (status, error["code"]) == (408, "request_timeout")
    assert time.monotonic() - began < 4.0


def test_a_connection_that_says_nothing_is_closed(served: Served) -> None:
    with connected(served) as connection:
        assert rest_of(connection) == b""


def test_a_second_head_on_a_connection_has_its_time_too(served: Served) -> None:
    with connected(served) as connection:
        connection.sendall(HEAD + b"\r\n")
        assert answered(connection)
        time.sleep(1.5 * SLOW_S)  # idle between requests, which is allowed for longer
        connection.sendall(HEAD + b"\r\n")
        assert answered(connection)
        connection.sendall(HEAD)
        assert b" 408 " in rest_of(connection)


def post(length: int) -> bytes:
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % length
    )


BODY = json.dumps({"model": MODEL_NAME, "prompt": "x", "max_tokens": 1}).encode()


def test_a_body_that_stops_coming_is_given_up(served: Served) -> None:
    status, error = answer_to(served, post(len(BODY)), BODY[:-1])
    assert (status, error["code"]) == (408, "request_timeout")
    assert error["type"] == "invalid_request_error"


def test_a_body_that_trickles_on_and_on_is_given_up(served: Served) -> None:
    pieces = (b" " for _ in range(40))
    status, error = answer_to(served, post(1_000), *pieces, pause_s=SLOW_S / 5)
    assert (status, error["code"]) == (408, "request_timeout")


def test_a_body_in_pieces_is_read(served: Served) -> None:
    with connected(served) as connection:
        connection.sendall(post(len(BODY)) + BODY[:10])
        time.sleep(SLOW_S / 2)
        connection.sendall(BODY[10:])
        assert b"200 OK" in connection.recv(65_536)


def test_one_connection_too_many_is_told_so(served: Served) -> None:
    idle = []
    try:
        for _ in range(LIMIT):
            idle.append(connected(served))
            idle[-1].sendall(HEAD + b"\r\n")
            assert answered(idle[-1])
        status, error = answer_to(served)
        assert (status, error["type"]) == (503, "service_unavailable_error")
    finally:
        for connection in idle:
            connection.close()
    deadline = time.monotonic() + 5
    while True:
        with connected(served) as connection:
            connection.sendall(HEAD + b"\r\n")
            if answered(connection):
                break
        assert time.monotonic() < deadline


def test_the_limit_leaves_files_for_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"limit": 1024}
    monkeypatch.setattr("resource.getrlimit", lambda _: (limits["limit"], 4096))
    assert max_connections() == 896
    limits["limit"] = 10**6
    assert max_connections() == 8_192
    limits["limit"] = -1
    assert max_connections() == 8_192
    limits["limit"] = 64
    assert max_connections() == 1
