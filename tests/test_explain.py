"""Why did it miss? Asked of a real gateway: in the answer, afterwards, by tenants, by operators."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from service.schemas.cache_explanation import CacheExplanation
from tests import tenant_kit
from tests.docs_kit import curl_commands, example, run_curl
from tests.gateway_kit import make_card
from tests.http_kit import events_of
from tests.message_kit import named_events
from tests.session_kit import Talk, talking, user
from tests.tenant_kit import bearer, two_tenants

ACME, GLOBEX, ADMIN = bearer("hs-acme"), bearer("hs-globex"), bearer("hs-admin")
RULES = "You are a clerk of the town library and answer in short and plain sentences."


def told_at(minute: int) -> list[dict[str, Any]]:
    return [{"role": "system", "content": f"It is 12:{minute:02}. {RULES}"}, user("hello there")]


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talk]:
    file = tenant_kit.write(tmp_path_factory.mktemp("tenants"), two_tenants())
    with talking(tenant_file=file, admin_keys=("hs-admin",)) as found:
        yield found


@pytest.fixture
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talk]:
    file = tenant_kit.write(tmp_path_factory.mktemp("tenants"), two_tenants())
    options: dict[str, Any] = {"tenant_file": file, "admin_keys": ("hs-admin",)}
    with talking(show_prompt_text=True, **options) as found:
        yield found


def explained(talk: Talk, headers: dict[str, str], limit: int = 5) -> dict[str, Any]:
    response = talk.client.get("/v1/cache/explain", params={"limit": limit}, headers=headers)
    assert response.status_code == 200
    assert response.headers["cache-control"] == "no-store"
    body: dict[str, Any] = response.json()
    return body


def test_in_the_answer_where_it_is_asked_for(talk: Talk) -> None:
    first = talk.chat(told_at(3), None, headers=ACME, explain_cache=True)
    assert first.json()["cache_explanation"]["reason"] == "cold"
    second = talk.chat(told_at(4), None, headers=ACME | {"X-Headstart-Explain": "true"})
    told = second.json()["cache_explanation"]
    assert (told["reason"], told["kind"], told["field"]) == (
        "diverged",
        "clock",
        "messages[0].content",
    )
    assert told["matched_tokens"] == told["first_divergent_token"]
    assert told["compared_with"] == first.json()["id"].removeprefix("chatcmpl-")
    assert (told["texts"]["earlier"][:1], told["texts"]["now"][:1]) == ("3", "4")
    token, lost = told["first_divergent_token"], told["tokens_lost"]
    assert second.headers["X-Headstart-Cache-Reason"] == (
        f"diverged; kind=clock; field=messages[0].content; token={token}; lost={lost}"
    )
    third = talk.chat(told_at(4), None, headers=ACME)
    assert "cache_explanation" not in third.json()
    assert "X-Headstart-Cache-Reason" not in third.headers


def test_in_the_last_event_of_a_stream(talk: Talk) -> None:
    streamed = talk.chat(told_at(5), None, headers=ACME, explain_cache=True, stream=True)
    *before, last, done = events_of(streamed)
    assert (last["choices"], last["cache_explanation"]["kind"], done) == ([], "clock", "[DONE]")
    assert all("cache_explanation" not in event for event in before)
    body = {"model": "tiny", "prompt": "a text to be gone on with now"}
    body |= {"stream": True, "explain_cache": True}
    streamed = talk.client.post("/v1/completions", json=body, headers=ACME)
    assert events_of(streamed)[-2]["cache_explanation"]["reason"] == "cold"
    body = {"model": "tiny", "max_tokens": 5, "stream": True, "explain_cache": True}
    body |= {"system": f"It is 12:06. {RULES}", "messages": [user("hello there")]}
    streamed = talk.client.post("/v1/messages", json=body, headers=ACME)
    name, stop = named_events(streamed)[-1]
    assert (name, stop["cache_explanation"]["field"]) == ("message_stop", "system")
    body = {"model": "tiny", "input": "hello there", "stream": True, "explain_cache": True}
    body["instructions"] = f"It is 12:07. {RULES}"
    streamed = talk.client.post("/v1/responses", json=body, headers=ACME)
    name, completed = named_events(streamed)[-1]
    told = completed["response"]["cache_explanation"]
    assert (name, told["field"], told["kind"]) == ("response.completed", "instructions", "clock")


def test_afterwards_by_id_and_for_its_tenant_alone(talk: Talk) -> None:
    answer = talk.chat(told_at(8), None, headers=ACME)
    for name in (answer.json()["id"], answer.headers["X-Request-Id"]):
        found = talk.client.get(f"/v1/cache/explain/{name}", headers=ACME).json()
        assert (found["tenant"], found["outcome"]) == ("acme", "stop")
        assert found["explanation"]["kind"] == "clock"
        assert found["explanation"]["texts"] is not None
        assert found["timeline"]["ttft"] > 0
    path = f"/v1/cache/explain/{name}"
    assert talk.client.get(path, headers=GLOBEX).status_code == 404
    assert talk.client.get("/v1/cache/explain/unheard-of", headers=ACME).status_code == 404
    assert talk.client.get(path).status_code == 401
    for_operator = talk.client.get(path, headers=ADMIN).json()["explanation"]
    assert (for_operator["kind"], for_operator["texts"]) == ("clock", None)


def test_no_reason_tells_of_other_tenants(talk: Talk) -> None:
    messages = [
        {"role": "system", "content": "A secret of acme's, long enough for a block or two."}
    ]
    messages.append(user("hello"))
    talk.chat(messages, None, headers=ACME)
    other = talk.chat(messages, None, headers=GLOBEX, explain_cache=True).json()
    told = other["cache_explanation"]
    assert (told["reason"], told["compared_with"], told["tokens_lost"]) == ("cold", None, 0)
    mine = explained(talk, GLOBEX, 100)
    assert {each["tenant"] for each in mine["data"]} == {"globex"}
    assert mine["breakers"] == []
    (latest, *_) = explained(talk, ADMIN)["data"]
    assert (latest["tenant"], latest["explanation"]["reason"]) == ("globex", "tenant_differs")
    assert latest["explanation"]["texts"] is None


def test_what_breaks_prefixes_is_added_up(talk: Talk) -> None:
    for minute in range(10, 14):
        talk.chat(told_at(minute), None, headers=ACME)
    found = explained(talk, ACME)
    assert len(found["data"]) == 5
    breaker = found["breakers"][0]
    assert (breaker["kind"], breaker["field"]) == ("clock", "messages[0].content")
    assert breaker["requests"] >= 4
    assert breaker["example"] == found["data"][0]["id"]
    assert breaker["suggestion"].endswith(f"+{breaker['tokens_per_request']} tokens per request")
    reasons = talk.served.call(talk.served.gateway.diagnostics.recent, 4, "acme")
    assert [record.reason for record in reasons] == ["diverged"] * 4


def test_what_is_deleted_is_shown_by_no_other_request(talk: Talk) -> None:
    talk.chat(told_at(20), "deleted", headers=ACME)
    answer = talk.chat(told_at(21), None, headers=ACME, explain_cache=True)
    assert "0" in answer.json()["cache_explanation"]["texts"]["earlier"]
    assert talk.client.delete("/v1/sessions/deleted", headers=ACME).status_code == 200
    path = f"/v1/cache/explain/{answer.json()['id']}"
    told = talk.client.get(path, headers=ACME).json()["explanation"]
    assert (told["kind"], told["texts"]) == ("clock", None)


def test_a_limit_that_is_none(talk: Talk) -> None:
    for limit in ("0", "1001", "x", "-1"):
        response = talk.client.get(f"/v1/cache/explain?limit={limit}", headers=ACME)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "limit")


def test_an_operator_may_be_shown_texts(shown: Talk) -> None:
    shown.chat(told_at(1), None, headers=ACME)
    shown.chat(told_at(2), None, headers=ACME)
    latest = explained(shown, ADMIN)["data"][0]["explanation"]
    assert latest["texts"]["now"].startswith("2")


def test_nothing_is_explained_where_nothing_is_kept() -> None:
    with talking(no_request_history=True) as talk:
        talk.chat(told_at(1), None)
        answer = talk.chat(told_at(2), None, explain_cache=True).json()
        assert "cache_explanation" not in answer
        (latest, *_) = explained(talk, {})["data"]
        assert latest["explanation"] is None
        assert latest["prompt_tokens"] == answer["usage"]["prompt_tokens"]


# ------------------------------------------------------------ other APIs' words


def message(talk: Talk, previous: str | None, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "max_tokens": 5, "messages": [user("hello there")], **fields}
    body["diagnostics"] = {"previous_message_id": previous}
    answer = talk.client.post("/v1/messages", json=body, headers=ACME)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def test_anthropics_diagnostics(talk: Talk) -> None:
    tool = {"name": "look", "input_schema": {"type": "object"}}
    fields: dict[str, Any] = {"system": RULES, "tools": [tool]}
    first = message(talk, None, **fields)
    assert first["diagnostics"] is None
    longer = [user("hello there"), {"role": "assistant", "content": "fine"}, user("and now?")]
    assert message(talk, first["id"], **fields, messages=longer)["diagnostics"] is None
    for changed, kind in (
        ({"system": "Other rules."}, "system_changed"),
        ({"tools": [tool | {"name": "see"}]}, "tools_changed"),
        ({"messages": [user("good day")]}, "messages_changed"),
    ):
        told = message(talk, first["id"], **(fields | changed))["diagnostics"]["cache_miss_reason"]
        assert told["type"] == kind
        assert 0 < told["cache_missed_input_tokens"] < first["usage"]["input_tokens"]
    salted = message(talk, first["id"], **fields, cache_salt="x")["diagnostics"]
    assert salted == {"cache_miss_reason": {"type": "unavailable"}}
    unknown = message(talk, "msg_unheard_of", **fields)["diagnostics"]
    assert unknown == {"cache_miss_reason": {"type": "previous_message_not_found"}}
    body = {"model": "tiny", "max_tokens": 5, "messages": [user("hello there")]}
    assert "diagnostics" not in talk.client.post("/v1/messages", json=body, headers=ACME).json()


def test_openais_diagnostics(talk: Talk) -> None:
    def respond(previous: str | None, headers: dict[str, str] = ACME, **fields: Any) -> Any:
        body = {"model": "tiny", "input": "hello there", "instructions": RULES, **fields}
        if previous is not None:
            body["prompt_cache_options"] = {"comparison_response_id": previous}
        answer = talk.client.post("/v1/responses", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    first = respond(None)
    assert "prompt_cache_diagnostics" not in first
    again = respond(first["id"])["prompt_cache_diagnostics"]
    assert again == {"type": "cache_hit"}
    changed = respond(first["id"], instructions="Other rules.")["prompt_cache_diagnostics"]
    assert (changed["type"], changed["reason"]) == ("cache_miss", "input_changed")
    num_tokens = changed["cache_missed_tokens"] + changed["comparison_reusable_tokens"]
    assert num_tokens == first["usage"]["input_tokens"]
    others = respond(first["id"], GLOBEX)["prompt_cache_diagnostics"]
    assert others == {"type": "comparison_response_not_found"}
    body = {"model": "tiny", "messages": [user("hi")]}
    body["prompt_cache_options"] = {"comparison_response_id": first["id"]}
    assert talk.client.post("/v1/chat/completions", json=body, headers=ACME).status_code == 400


# ------------------------------------------------------------ the page


def test_the_examples_of_the_page() -> None:
    with talking(card=make_card(names=("demo",))) as talk:
        (command,) = curl_commands(example("diagnostics.md", "sh"))
        later = [word.replace("12:03:11", "12:04:11") for word in command]
        assert run_curl(command, talk.served.base_url).status_code == 200
        response = run_curl(later, talk.served.base_url)
        told = response.json()["cache_explanation"]
        shown = json.loads(example("diagnostics.md", "json"))
        for name in ("request_id", "compared_with"):
            assert len(told[name]) == len(shown[name]) == 32
            told[name] = shown[name]
        assert told == shown
        header = CacheExplanation(**shown | {"evicted": None, "texts": None}).header
        assert response.headers["X-Headstart-Cache-Reason"] == header
        page = " ".join(example_page().split())
        assert f"`X-Headstart-Cache-Reason: {header}`" in page
        (listed,) = curl_commands(
            example_page().split("has one, by its answer")[1].split("```sh\n")[1].split("```")[0]
        )
        found = run_curl(listed, talk.served.base_url).json()
        assert len(found["data"]) == 2
        breaker = json.loads(example("diagnostics.md", "json", "What breaks prefixes"))
        assert found["breakers"][0].keys() == breaker.keys()


def example_page() -> str:
    from tests.docs_kit import _DOCS

    return (_DOCS / "diagnostics.md").read_text()
