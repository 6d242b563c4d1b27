"""Which pages may use the server from a browser, and over HTTP what browsers are told."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from service.cors import CorsPolicy
from tests.gateway_kit import MODEL_NAME
from tests.http_kit import Served, serving

BODY = {"model": MODEL_NAME, "prompt": "x", "max_tokens": 1}
APP = "https://app.example"
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


@pytest.mark.parametrize(
    ("origin", "is_allowed"),
    [
        ("http://localhost", True),
        ("http://localhost:3000", True),
        ("https://LOCALHOST:3000", True),
        ("http://127.0.0.1:8080", True),
        ("http://[::1]:8080", True),
        ("http://localhost.evil.com", False),
        ("http://localhost.evil.com:3000", False),
        ("http://evil.com/localhost", False),
        ("http://evil.com?localhost", False),
        ("http://localhost@evil.com", False),
        ("http://127.0.0.1.evil.com", False),
        ("http://127.0.0.2", False),
        ("http://notlocalhost", False),
        ("http://localhost:3000\nx", False),
        ("file://localhost", False),
        ("null", False),
        ("", False),
    ],
)
def test_localhost_is_this_machine_and_nothing_that_looks_like_it(
    origin: str, is_allowed: bool
) -> None:
    assert CorsPolicy(["localhost"]).allows(origin) is is_allowed


def test_origins_are_whole_origins() -> None:
    policy = CorsPolicy([APP, "http://other.example:8080"])
    for origin in (APP, "HTTPS://APP.EXAMPLE", "http://other.example:8080"):
        assert policy.allows(origin)
    for origin in (
        "http://app.example",
        "https://app.example:444",
        "https://app.example.evil.com",
        "https://sub.app.example",
        "http://other.example",
        "http://localhost",
        "null",
    ):
        assert not policy.allows(origin)
    assert not CorsPolicy([]).allows(APP)
    assert CorsPolicy(["*"]).allows("null")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(cors_origins=(APP, "localhost"), api_keys=("sk-user",)) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[httpx.Client]:
    with served.client() as client:
        yield client


@pytest.mark.parametrize("origin", [APP, "http://localhost:5173", "http://[::1]:1"])
def test_a_preflight_needs_no_key_and_says_what_may_be_sent(
    client: httpx.Client, origin: str
) -> None:
    response = client.options("/v1/completions", headers={**PREFLIGHT, "Origin": origin})
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == origin
    assert "POST" in response.headers["access-control-allow-methods"]
    allowed = response.headers["access-control-allow-headers"]
    assert allowed == PREFLIGHT["Access-Control-Request-Headers"]
    assert "Origin" in response.headers["vary"]
    assert "access-control-allow-credentials" not in response.headers


def test_a_preflight_that_asks_for_no_headers_is_told_which_there_are(client: httpx.Client) -> None:
    headers = {"Origin": APP, "Access-Control-Request-Method": "POST"}
    allowed = client.options("/v1/models", headers=headers).headers["access-control-allow-headers"]
    assert "Authorization" in allowed


@pytest.mark.parametrize("origin", ["http://localhost.evil.com", "https://evil.example", "null"])
def test_another_origin_learns_nothing(client: httpx.Client, origin: str) -> None:
    key = {"Authorization": "Bearer sk-user"}
    for response in (
        client.options("/v1/completions", headers={**PREFLIGHT, "Origin": origin}),
        client.post("/v1/completions", json=BODY, headers={**key, "Origin": origin}),
    ):
        assert response.status_code == 403
        assert response.json()["error"]["code"] == "origin_not_allowed"
        assert not [name for name in response.headers if name.startswith("access-control")]


def test_an_allowed_page_reads_answers_and_errors(client: httpx.Client) -> None:
    key = {"Authorization": "Bearer sk-user"}
    for headers, body, status in (
        (key, BODY, 200),
        (key, {**BODY, "stream": True}, 200),
        (key, {**BODY, "max_tokens": -1}, 400),
        ({}, BODY, 401),
    ):
        response = client.post("/v1/completions", json=body, headers={**headers, "Origin": APP})
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == APP
        exposed = response.headers["access-control-expose-headers"].lower().split(", ")
        # Whatever else a browser would hide of what the answer says in its head.
        own = {name for name in response.headers if name.startswith(("x-", "request-id"))}
        assert {"x-request-id"} <= own <= {*exposed, "x-accel-buffering", "x-content-type-options"}


def test_no_origin_no_headers(client: httpx.Client) -> None:
    assert "access-control-allow-origin" not in client.get("/health").headers
    options = client.options("/v1/models", headers={"X-Api-Key": "sk-user"})
    assert options.status_code == 405


def test_a_foreign_host_is_refused_whatever_the_origin(client: httpx.Client) -> None:
    headers = {**PREFLIGHT, "Origin": APP, "Host": "evil.example"}
    assert client.options("/v1/completions", headers=headers).status_code == 403


def test_any_origin_is_told_as_a_star() -> None:
    with serving(cors_origins=("*",), api_keys=("k",)) as served, served.client() as client:
        response = client.get("/v1/models", headers={"Origin": "null", "X-Api-Key": "k"})
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "*"
