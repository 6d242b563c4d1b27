"""Tenants over HTTP: who they are, what they may have, and that a change to them loses nothing."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from model_worker.protocol import TenantPolicy
from service.tenants import directory
from tests.gateway_kit import MODEL_NAME
from tests.http_kit import Served, serving
from tests.session_kit import wait_for
from tests.target import assert_error, cached_tokens
from tests.tenant_kit import bearer, hash_of, two_tenants, write

ACME, ACME_TWO, GLOBEX = bearer("hs-acme"), bearer("hs-acme-two"), bearer("hs-globex")
PROMPT = "Shelf holds jars of plum jam and one jar of honey. "
LIMITS = f"""
[[tenants.tight.keys]]
sha256 = "{hash_of("hs-tight")}"

[tenants.tight.limits]
requests_per_minute = 3

[[tenants.short.keys]]
sha256 = "{hash_of("hs-short")}"

[tenants.short.limits]
tokens_per_minute = 200
max_concurrent = 2

[tenants.short.caps]
device_cache = "1MiB"
max_priority = 2
max_retention = 60
max_sessions = 2
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tenants")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directory, "POLL_SECONDS", 0.01)
        path = write(folder, two_tenants(LIMITS))
        with serving(tenant_file=path, admin_keys=("root",)) as served:
            yield served


@pytest.fixture
def client(served: Served, folder: Path) -> Iterator[httpx.Client]:
    """Whatever a test does to the file, the next finds it as it was."""
    with served.client() as client:
        yield client
    write(folder, two_tenants(LIMITS))
    tenants = served.gateway.tenants
    wait_for(lambda: tenants._seen == tenants._stamp() and not tenants.problem)
    wait_for(lambda: tenants.find("hs-acme"))


def complete(client: httpx.Client, who: dict[str, str], **fields: Any) -> httpx.Response:
    headers = {**who, **fields.pop("headers", {})}
    body = {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": 1, **fields}
    return client.post("/v1/completions", json=body, headers=headers)


def cached(client: httpx.Client, who: dict[str, str], **fields: Any) -> int:
    """Beyond the token that every text begins with."""
    return max(0, cached_tokens(complete(client, who, **fields).json()) - 1)


def test_the_bodies_of_refusals(client: httpx.Client) -> None:
    for who in ({}, bearer("wrong"), bearer(hash_of("hs-acme"))):
        error = assert_error(complete(client, who), 401)
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    error = assert_error(client.post("/reset_prefix_cache", headers=ACME), 403)
    assert (error["type"], error["code"]) == ("permission_error", "admin_key_required")
    assert client.post("/reset_prefix_cache", headers=bearer("root")).status_code == 200


def test_keys_of_one_tenant_share_and_other_tenants_do_not(client: httpx.Client) -> None:
    prompt = f"one {PROMPT}"
    assert cached(client, ACME, prompt=prompt) == 0
    assert cached(client, ACME_TWO, prompt=prompt) > 0
    assert cached(client, GLOBEX, prompt=prompt) == 0
    assert cached(client, bearer("root"), prompt=prompt) == 0
    assert cached(client, GLOBEX, prompt=prompt) > 0


def test_metrics_are_the_operators_and_told_by_tenant(client: httpx.Client) -> None:
    assert complete(client, ACME).status_code == 200
    assert_error(client.get("/metrics"), 401)
    assert_error(client.get("/metrics", headers=ACME), 403)
    text = client.get("/metrics", headers=bearer("root")).text
    assert 'headstart_prefix_cache_queries_total{tenant="acme"}' in text
    assert (
        'headstart_request_errors_total{code="admin_key_required",type="permission_error"}' in text
    )


def test_a_forged_salt_leads_nowhere(client: httpx.Client) -> None:
    prompt = f"two {PROMPT}"
    assert cached(client, ACME, prompt=prompt) == 0
    for salt in ("4:acme", "acme", "0:", "6:globex4:acme"):
        assert cached(client, GLOBEX, prompt=prompt, cache_salt=salt) == 0
    assert cached(client, ACME, prompt=prompt, cache_salt="x") == 0
    assert cached(client, ACME_TWO, prompt=prompt, cache_salt="x") > 0


def test_the_worker_is_told_the_tenants_namespace(served: Served, client: httpx.Client) -> None:
    asked: list[Any] = []
    submit = served.worker.submit

    def note(request: Any) -> Any:
        asked.append(request)
        return submit(request)

    served.worker.submit = note  # type: ignore[method-assign]
    try:
        complete(client, ACME)
        complete(client, GLOBEX, cache_salt="x")
        complete(client, GLOBEX, headers={"X-Session-ID": "s"}, cache_salt="y")
        complete(client, GLOBEX, headers={"X-Session-ID": "s"})
    finally:
        served.worker.submit = submit  # type: ignore[method-assign]
    assert [request.tenant for request in asked] == ["acme", "globex", "globex", "globex"]
    assert [request.cache_salt for request in asked] == [
        "4:acme", "6:globexx", "6:globexy", "6:globexy",
    ]  # fmt: skip


def test_the_worker_is_told_weights_and_caps(
    served: Served, client: httpx.Client, folder: Path
) -> None:
    short = TenantPolicy(tenant="short", max_device_bytes=2**20)
    assert served.worker.tenant_policies == (short,)
    write(folder, two_tenants(LIMITS + "\n[tenants.globex.caps]\ndisk_cache = 0\n"))
    globex = TenantPolicy(tenant="globex", max_disk_bytes=0)
    wait_for(lambda: served.worker.tenant_policies == (globex, short))


def test_requests_per_minute(client: httpx.Client) -> None:
    who = bearer("hs-tight")
    answers = [complete(client, who) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200] * 3
    left = [answer.headers["x-ratelimit-remaining-requests"] for answer in answers]
    assert left == ["2", "1", "0"]
    assert answers[0].headers["x-ratelimit-limit-requests"] == "3"
    assert answers[0].headers["x-ratelimit-reset-requests"] == "20s"
    assert "x-ratelimit-limit-tokens" not in answers[0].headers
    refused = complete(client, who)
    error = assert_error(refused, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 20
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert complete(client, ACME).status_code == 200
    assert "x-ratelimit-limit-requests" not in complete(client, ACME).headers


def test_the_official_client_knows_a_rate_limit(served: Served) -> None:
    url = f"{served.base_url}/v1"

    def ask_until_refused(official: openai.OpenAI) -> None:
        for _ in range(4):
            official.completions.create(model=MODEL_NAME, prompt="x", max_tokens=1)

    with (
        openai.OpenAI(base_url=url, api_key="hs-tight", max_retries=0) as official,
        pytest.raises(openai.RateLimitError) as failure,
    ):
        ask_until_refused(official)
    assert "retry-after" in failure.value.response.headers


def test_tokens_per_minute_count_what_is_computed(client: httpx.Client) -> None:
    who = bearer("hs-short")
    first = complete(client, who, max_tokens=10)
    usage = first.json()["usage"]
    assert usage["total_tokens"] < 200
    after = complete(client, who, max_tokens=10)
    assert cached_tokens(after.json()) > 0
    spent = (
        usage["total_tokens"] + after.json()["usage"]["total_tokens"] - cached_tokens(after.json())
    )
    refused = complete(client, who, prompt=PROMPT * 4, max_tokens=10)
    error = assert_error(refused, 429)
    assert "200 tokens per minute" in error["message"]
    left = int(refused.headers["x-ratelimit-remaining-tokens"])
    assert 200 - spent <= left <= 200 - spent + 20  # and what a few seconds brought back
    streamed = complete(client, who, prompt=PROMPT * 4, max_tokens=10, stream=True)
    assert_error(streamed, 429)  # before any event


def test_a_tenant_has_so_many_requests_at_once(served: Served, folder: Path) -> None:
    text = two_tenants(LIMITS).replace("tokens_per_minute = 200\n", "")
    with (
        serving(tenant_file=write(folder, text), token_interval=0.02) as slow,
        slow.client() as client,
    ):
        body = {"model": MODEL_NAME, "prompt": "x", "max_tokens": 500, "stream": True}
        options = {"json": body, "headers": bearer("hs-short")}
        with client.stream("POST", "/v1/completions", **options) as response:
            lines = response.iter_lines()
            next(lines)
            assert complete(client, bearer("hs-short")).status_code == 200
            error = assert_error(complete(client, bearer("hs-short"), prompt=["a", "b"]), 429)
            assert error["code"] == "concurrency_limit"
            assert complete(client, ACME).status_code == 200
        wait_for(lambda: complete(client, bearer("hs-short"), prompt=["a", "b"]).is_success)
    write(folder, two_tenants(LIMITS))


def test_caps_are_refused_by_name(client: httpx.Client) -> None:
    who = bearer("hs-short")
    for fields in ({"priority": 3}, {"retention": 61}):
        (name,) = fields
        error = assert_error(complete(client, who, **fields), 400, param=name)
        assert error["code"] == "tenant_limit"
        assert_error(client.post("/v1/sessions", json=fields, headers=who), 400, param=name)
        assert complete(client, ACME, **fields).status_code == 200
    assert client.post("/v1/sessions", json={"priority": 2}, headers=who).status_code == 201


def test_a_tenant_keeps_so_many_sessions(client: httpx.Client) -> None:
    who = bearer("hs-short")
    for number in range(4):
        created = client.post("/v1/sessions", json={"session_id": f"n{number}"}, headers=who)
        assert created.status_code == 201
        assert client.post("/v1/sessions", json={"session_id": f"n{number}"}, headers=ACME)

    def names(of: dict[str, str]) -> set[str]:
        return {item["id"] for item in client.get("/v1/sessions", headers=of).json()["data"]}

    wait_for(lambda: names(who) == {"n2", "n3"})
    assert {"n0", "n1", "n2", "n3"} <= names(ACME)


def test_rotation_keeps_sessions_and_cache(
    served: Served, client: httpx.Client, folder: Path
) -> None:
    prompt = f"three {PROMPT}"
    session = {"X-Session-ID": "kept"}
    assert cached(client, ACME, prompt=prompt) == 0
    assert complete(client, {**ACME, **session}).status_code == 200
    rotated = two_tenants(LIMITS).replace(hash_of("hs-acme"), hash_of("hs-rotated"))
    write(folder, rotated)
    wait_for(lambda: served.gateway.tenants.find("hs-rotated"))
    assert complete(client, ACME).status_code == 401
    new = bearer("hs-rotated")
    assert cached(client, new, prompt=prompt) > 0
    assert client.get("/v1/sessions/kept", headers=new).status_code == 200
    assert client.get("/v1/sessions/kept", headers=GLOBEX).status_code == 404
    assert cached(client, ACME_TWO, prompt=prompt) > 0


def test_a_broken_file_is_told_and_changes_nothing(
    served: Served, client: httpx.Client, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="headstart")
    write(folder, two_tenants("\n[tenants.acme.limits]\nmax_concurent = 5\n"))
    wait_for(lambda: client.get("/health").json()["status"] == "degraded")
    body = client.get("/health").json()
    assert "tenant file" in body["reason"]
    assert str(folder) not in body["reason"]
    assert complete(client, ACME).status_code == 200
    write(folder, two_tenants(LIMITS))
    wait_for(lambda: client.get("/health").json() == {"status": "ok"})
    (error,) = {r.getMessage() for r in caplog.records if r.levelno == logging.ERROR}
    assert "tenants.acme.limits.max_concurent: unknown field" in error


def test_changes_under_load_lose_no_request(
    served: Served, client: httpx.Client, folder: Path
) -> None:
    """Eight threads ask while the file is written over and over, valid, broken and gone."""
    texts = [two_tenants(LIMITS), two_tenants(), "[tenants.acme", two_tenants(LIMITS + "# x\n")]
    is_over: list[bool] = []

    def ask(number: int) -> list[int]:
        who = (ACME, GLOBEX)[number % 2]
        statuses = []
        with served.client() as mine:
            while not is_over:
                response = complete(mine, who, stream=bool(number % 4), max_tokens=3)
                statuses.append(response.status_code)
                assert response.text.rstrip().endswith("[DONE]") or not number % 4
        return statuses

    seen: set[str] = set()
    with ThreadPoolExecutor(4) as threads:
        asking = [threads.submit(ask, number) for number in range(4)]
        try:
            for number in range(16):
                path = write(folder, texts[number % 4])
                if number % 8 == 7:
                    os.unlink(path)
                wait_for(lambda: served.gateway.tenants._seen == served.gateway.tenants._stamp())
                seen.add(served.gateway.tenants.problem[:11])
        finally:
            is_over.append(True)
    statuses = [status for future in asking for status in future.result()]
    assert len(statuses) > 4
    assert set(statuses) == {200}
    assert len(seen) >= 3  # it was well, no TOML, and not there


def test_no_key_is_in_a_log_or_a_file(
    served: Served, client: httpx.Client, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for who in (ACME, GLOBEX, bearer("root"), bearer("hs-wrong-key")):
        complete(client, who)
        client.get("/v1/models", headers={"X-Api-Key": who["Authorization"].split()[1]})
    write(folder, two_tenants(LIMITS + "\n"))
    wait_for(lambda: any("tenant file was read" in r.getMessage() for r in caplog.records))
    keys = ("hs-acme", "hs-globex", "hs-wrong-key", "Bearer")
    ours = [r for r in caplog.records if r.name.startswith(("headstart", "uvicorn"))]
    logged = "\n".join(str(vars(record)) for record in ours)
    assert "request ended" in logged
    assert not [key for key in keys if key in logged]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    assert not [key for key in keys for path in files if key.encode() in path.read_bytes()]
    assert "hs-acme" not in client.get("/metrics").text
