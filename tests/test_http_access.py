"""Who may ask what, over real HTTP: keys, Host, Origin."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.gateway_kit import MODEL_NAME
from tests.http_kit import Served, serving
from tests.session_kit import wait_for

KEYS = {"api_keys": ("sk-user", "sk-other"), "admin_keys": ("sk-admin",)}
BODY = {"model": MODEL_NAME, "prompt": "x", "max_tokens": 1}


@pytest.fixture(scope="module")
def guarded() -> Iterator[Served]:
    with serving(**KEYS) as served:
        yield served


@pytest.fixture(scope="module")
def client(guarded: Served) -> Iterator[httpx.Client]:
    with guarded.client() as client:
        yield client


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer"},
        {"Authorization": "Basic sk-user"},
        {"Authorization": "sk-user"},
        {"X-Api-Key": "sk-use"},
        {"X-Api-Key": ""},
    ],
)
def test_no_or_a_wrong_key(client: httpx.Client, headers: dict[str, str]) -> None:
    for response in (
        client.get("/v1/models", headers=headers),
        client.post("/v1/completions", json=BODY, headers=headers),
    ):
        assert response.status_code == 401
        assert response.json()["error"]["type"] == "authentication_error"
        assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer sk-user"},
        {"Authorization": "bearer sk-other"},
        {"X-Api-Key": "sk-user"},
        {"Authorization": "Bearer sk-admin"},
    ],
)
def test_a_right_key(client: httpx.Client, headers: dict[str, str]) -> None:
    assert client.post("/v1/completions", json=BODY, headers=headers).status_code == 200


def test_the_official_client_and_its_errors(guarded: Served) -> None:
    url = f"{guarded.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key="sk-user", max_retries=0) as right:
        assert right.completions.create(**BODY).choices
    with (
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as wrong,
        pytest.raises(openai.AuthenticationError),
    ):
        wrong.completions.create(**BODY)


@pytest.mark.parametrize(
    "path", ["/health", "/live", "/version", "/openapi.json", "/", "/dashboard/dashboard.css"]
)
def test_open_paths(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code == 200


def test_metrics_are_open_on_loopback(client: httpx.Client) -> None:
    assert client.get("/metrics").status_code == 200


def test_operator_routes_need_an_admin_key(client: httpx.Client) -> None:
    user, admin = {"X-Api-Key": "sk-user"}, {"X-Api-Key": "sk-admin"}
    assert client.post("/reset_prefix_cache").status_code == 401
    assert client.post("/reset_prefix_cache", headers=user).status_code == 403
    assert client.post("/reset_prefix_cache", headers=admin).status_code == 200
    for path in (
        "/dashboard/data",
        "/dashboard/data/series",
        "/dashboard/data/anything",
        "/v1/cache/history",
    ):
        assert client.get(path).status_code == 401
        assert client.get(path, headers=user).status_code == 403
    action = {"action": "delete", "tenant": "default", "session_id": "s"}
    assert client.post("/dashboard/data/sessions", json=action).status_code == 401
    assert client.post("/dashboard/data/sessions", json=action, headers=user).status_code == 403
    assert client.get("/dashboard/data", headers=admin).json()["ready"] is True
    assert client.get("/v1/cache/history", headers=admin).status_code == 200


def test_with_api_keys_alone_operator_routes_stay_closed() -> None:
    with serving(api_keys=("sk-user",)) as served, served.client() as client:
        headers = {"X-Api-Key": "sk-user"}
        assert client.post("/reset_prefix_cache", headers=headers).status_code == 403


def test_a_server_reachable_from_elsewhere_guards_its_metrics() -> None:
    with serving(host="0.0.0.0", **KEYS) as served, served.client() as client:
        assert client.get("/metrics").status_code == 401
        assert client.get("/metrics", headers={"X-Api-Key": "sk-user"}).status_code == 200
        assert client.get("/health", headers={"Host": "anything.example"}).status_code == 200


def test_keys_and_prompts_are_never_logged(
    guarded: Served, client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="headstart")
    client.post(
        "/v1/completions?q=marker-query",
        json={**BODY, "prompt": "marker-prompt"},
        headers={"X-Api-Key": "sk-user"},
    )
    client.get("/v1/models", headers={"X-Api-Key": "marker-key"})
    ours = [record for record in caplog.records if record.name.startswith("headstart")]
    assert any(record.getMessage() == "request ended" for record in ours)
    assert not any("marker" in str(record.__dict__) for record in ours)
    assert not any("sk-user" in str(record.__dict__) for record in ours)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1:9", 200),
        ("[::1]:8000", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example:80", 403),
        ("[::2]", 403),
    ],
)
def test_only_local_names_on_loopback(client: httpx.Client, host: str, status: int) -> None:
    assert client.get("/health", headers={"Host": host}).status_code == status


def test_allowed_hosts_extend_the_local_names() -> None:
    with serving(allowed_hosts=("chat.example",)) as served, served.client() as client:
        assert client.get("/health", headers={"Host": "chat.example:8000"}).status_code == 200
        assert client.get("/health", headers={"Host": "other.example"}).status_code == 403


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:8000", 200),
        ("https://localhost:8000", 200),
        ("http://localhost:9000", 403),
        ("http://evil.example", 403),
        ("null", 403),
        ("", 403),
    ],
)
def test_other_origins_are_refused(client: httpx.Client, origin: str, status: int) -> None:
    headers = {"Host": "localhost:8000", "Origin": origin}
    response = client.get("/health", headers=headers)
    assert response.status_code == status
    assert "access-control-allow-origin" not in response.headers


def test_no_preflight_is_answered(client: httpx.Client) -> None:
    headers = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    response = client.options("/v1/completions", headers=headers)
    assert response.status_code == 403
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_every_answer_has_an_id_of_its_own(client: httpx.Client) -> None:
    ids = {client.get(path).headers["x-request-id"] for path in ("/health", "/nope", "/v1/models")}
    assert len(ids) == 3
    assert all(len(request_id) == 32 for request_id in ids)


@pytest.mark.parametrize("given", ["trace-1", "x" * 128, "a/b:c@d{e}~!"])
def test_a_clients_own_id_comes_back(
    client: httpx.Client, given: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="headstart")
    headers = {"X-Request-Id": given, "X-Api-Key": "sk-user"}
    responses = [client.post("/v1/completions", json=BODY, headers=headers) for _ in range(2)]
    assert [response.headers.get_list("x-request-id") for response in responses] == [[given]] * 2
    ids = {response.json()["id"] for response in responses}
    assert len(ids) == 2  # its requests are told apart whatever it calls them
    named = [r.headstart_fields for r in caplog.records if r.getMessage() == "request named"]
    assert [fields["client_id"] for fields in named] == [given] * 2
    assert {fields["request_id"] for fields in named} == {found.split("-")[1] for found in ids}


@pytest.mark.parametrize("given", [b"", b"x" * 129, b"two words", b"caf\xc3\xa9", b"a\tb"])
def test_an_id_that_is_none_is_replaced(client: httpx.Client, given: bytes) -> None:
    response = client.get("/health", headers={b"X-Request-Id": given})
    assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])


def test_the_load_is_what_is_in_flight() -> None:
    with serving(token_interval=0.02) as served, served.client() as client:
        assert client.get("/load").json() == {"server_load": 0}
        body = {**BODY, "max_tokens": 500, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            assert client.get("/load").json() == {"server_load": 1}
        wait_for(lambda: client.get("/load").json() == {"server_load": 0})


def test_paths_and_methods_that_do_not_exist(client: httpx.Client) -> None:
    headers = {"X-Api-Key": "sk-user"}
    for method, path, status in (
        ("GET", "/v1/nope", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/docs", 404),
        ("GET", "/redoc", 404),
        ("GET", "/dashboard/..%2Fapp.py", 404),
        ("GET", "/dashboard/%2e%2e/app.py", 404),
    ):
        response = client.request(method, path, headers=headers)
        assert response.status_code == status, path
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_prompts_are_logged_where_the_operator_asks_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="headstart")
    with serving(log_prompts=True) as served, served.client() as client:
        messages = [{"role": "user", "content": "marker-prompt"}]
        for fields in ({"prompt": ["marker-one", "marker-two"]}, {"messages": messages}):
            path = "chat/completions" if "messages" in fields else "completions"
            body = {"model": MODEL_NAME, "max_tokens": 1, **fields}
            assert client.post(f"/v1/{path}", json=body).status_code == 200
    texts = [r.headstart_fields["text"] for r in caplog.records if r.getMessage() == "prompt"]
    assert [text.count("marker-") for text in texts] == [1, 1, 1]
    assert "marker-prompt" in texts[2]
