"""OpenAI's fields about how long a prefix is kept, over HTTP, down to what the worker is asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from service.schemas.prompt_cache import (
    PromptCacheBreakpoint,
    PromptCacheOptions,
    longest_ttl,
    retention_of,
    seconds_of,
)
from service.schemas.responses import InputTextPart
from tests.gateway_kit import MODEL_NAME
from tests.http_kit import serving
from tests.session_kit import Talk, talking, user
from tests.tenant_kit import two_tenants, write


@pytest.fixture(scope="module")
def talk() -> Iterator[Talk]:
    with talking() as found:
        yield found


def marked(text: str, **breakpoint_fields: Any) -> dict[str, Any]:
    mark = {"mode": "explicit", **breakpoint_fields}
    return {"type": "text", "text": text, "prompt_cache_breakpoint": mark}


def kept_s(talk: Talk, path: str = "/v1/chat/completions", **fields: Any) -> float:
    """The retention that the worker was asked for."""
    given = {"messages": [user("Hi")]} if "chat" in path else {"input": "Hi"}
    response = talk.client.post(path, json={"model": MODEL_NAME, **given, **fields})
    assert response.status_code == 200, response.text
    return talk.requests[-1].retention_s


@pytest.mark.parametrize(("ttl", "seconds"), [("30m", 1800), ("1h", 3600), ("45s", 45)])
def test_a_ttl_in_seconds(ttl: str, seconds: float) -> None:
    assert seconds_of(ttl) == seconds


def test_the_longest_ttl_counts_by_its_time() -> None:
    breakpoints = [PromptCacheBreakpoint("explicit", "2h"), PromptCacheBreakpoint("explicit")]
    assert longest_ttl(PromptCacheOptions(ttl="90m"), breakpoints) == "2h"
    assert longest_ttl(PromptCacheOptions(), breakpoints[1:]) is None


def test_only_lifetimes_are_cut_to_what_a_tenant_may_have() -> None:
    assert retention_of(None, "30m", None, 600.0) == 600.0
    assert retention_of(None, None, "24h", 600.0) == 600.0
    assert retention_of(700.0, "30m", None, None) == 1800.0
    assert retention_of(None, None, "in_memory", 600.0) is None


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_lifetimes_are_retentions(talk: Talk, path: str) -> None:
    assert kept_s(talk, path) == 0
    assert kept_s(talk, path, prompt_cache_options={"ttl": "30m"}) == 1800
    assert kept_s(talk, path, prompt_cache_options={"mode": "explicit"}) == 0
    assert kept_s(talk, path, prompt_cache_retention="24h") == 86_400
    assert kept_s(talk, path, prompt_cache_retention="in_memory") == 0
    longer = {"retention": 7200, "prompt_cache_options": {"ttl": "30m"}}
    assert kept_s(talk, path, **longer) == 7200


def test_a_breakpoint_in_a_message_has_a_lifetime_too(talk: Talk) -> None:
    content = [marked("Be brief.", ttl="1h"), marked("Hi.")]
    messages = [{"role": "user", "content": content}]
    assert kept_s(talk, messages=messages, prompt_cache_options={"ttl": "30m"}) == 3600
    marked_ids = talk.prompts[-1]
    plain = [{"type": "text", "text": part["text"]} for part in content]
    kept_s(talk, messages=[{"role": "user", "content": plain}])
    assert talk.prompts[-1] == marked_ids


def test_a_breakpoint_in_an_item_has_a_lifetime_too(talk: Talk) -> None:
    part = {**marked("Hi.", ttl="1h"), "type": "input_text"}
    item = {"type": "message", "role": "user", "content": [part]}
    assert kept_s(talk, "/v1/responses", input=[item]) == 3600


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_cache_options": {"ttl": "soon"}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_options": {"mode": "never"}}, "prompt_cache_options.mode"),
        ({"prompt_cache_retention": "1y"}, "prompt_cache_retention"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_what_is_no_lifetime_is_refused_by_name(
    talk: Talk, path: str, fields: dict[str, Any], param: str
) -> None:
    given = {"messages": [user("Hi")]} if "chat" in path else {"input": "Hi"}
    response = talk.client.post(path, json={"model": MODEL_NAME, **given, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_a_tenant_gets_as_much_of_a_lifetime_as_it_may_have(tmp_path: Path) -> None:
    tenants = write(tmp_path, two_tenants("[tenants.acme.caps]\nmax_retention = 600\n"))
    asked = Talk()
    with (
        serving(asked.script, tenant_file=tenants) as served,
        served.client(headers={"Authorization": "Bearer hs-acme"}) as client,
    ):
        body = {"model": MODEL_NAME, "messages": [user("Hi")]}
        body["prompt_cache_options"] = {"ttl": "30m"}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        assert asked.requests[-1].retention_s == 600
        assert client.post("/v1/chat/completions", json={**body, "retention": 601}).is_error


def test_a_part_without_a_breakpoint_is_stored_as_it_came() -> None:
    assert msgspec.to_builtins(InputTextPart("Hi")) == {"type": "input_text", "text": "Hi"}
