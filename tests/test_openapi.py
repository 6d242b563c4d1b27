"""The document is whole and true: every route, valid, and what the server answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import msgspec
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from service.app import create_app
from service.config import GatewayConfig
from service.openapi.document import document
from service.openapi.operation import Access, Answer, Body, Operation
from service.request_fields import REQUEST_FIELDS, Endpoint, FieldKind
from service.schemas.chat import ChatRequest
from service.workers.fake import FakeWorker
from service.workers.registry import WorkerRegistry
from tests.gateway_kit import MODEL_NAME, make_card
from tests.http_kit import Served, routes_of, serving

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"model": MODEL_NAME, "messages": MESSAGES, "max_tokens": 4}
MESSAGE = {"model": MODEL_NAME, "messages": MESSAGES, "max_tokens": 4}
RESPONSE = {"model": MODEL_NAME, "input": "Hi", "max_output_tokens": 4}
TEXT = {"model": MODEL_NAME, "prompt": "Once", "max_tokens": 4}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as served:
        yield served


@pytest.fixture(scope="module")
def described(served: Served) -> Any:
    with served.client() as client:
        return client.get("/openapi.json").json()


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with served.client() as client:
        yield client


def test_every_route_is_described_and_no_other() -> None:
    card = make_card()
    app = create_app(GatewayConfig(), WorkerRegistry([FakeWorker(card, lambda request: ())]))
    routes = {
        (method.lower(), route.path.replace(":path", ""))
        for route in routes_of(app.routes)
        for method in route.methods or ()
    }
    described = {(method, path) for path, item in document()["paths"].items() for method in item}
    assert described == routes


def test_the_document_is_openapi_and_is_served(described: Any) -> None:
    assert described == document()
    OpenAPIV31SpecValidator(described).validate()
    names = [item["operationId"] for path in described["paths"].values() for item in path.values()]
    assert sorted(names) == sorted(set(names))


def test_no_schema_is_left_over_and_none_is_missing(described: Any) -> None:
    text = msgspec.json.encode(described).decode()
    named = set(re.findall(r'"#/components/schemas/([^"]+)"', text))
    assert named == set(described["components"]["schemas"])


@pytest.mark.parametrize(
    ("path", "endpoint"),
    [("/v1/chat/completions", Endpoint.CHAT), ("/v1/completions", Endpoint.COMPLETIONS)],
)
def test_every_field_of_a_request_is_described(
    described: Any, path: str, endpoint: Endpoint
) -> None:
    body = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    rows = [row for row in REQUEST_FIELDS if endpoint in row.endpoints]
    assert set(body["properties"]) == {row.name for row in rows}
    for row in rows:
        schema = body["properties"][row.name]
        if row.kind is FieldKind.REFUSED:
            assert schema["enum"] == [*row.inert, None]
        elif row.kind is FieldKind.HARMLESS:
            assert set(schema) == {"description"}
    subject = "messages" if endpoint is Endpoint.CHAT else "prompt"
    assert sorted(body["required"]) == sorted(["model", subject])
    assert body["additionalProperties"] is False


def test_a_field_that_acts_and_is_parsed_by_nothing_is_found() -> None:
    rows = tuple(row for row in REQUEST_FIELDS if row.name == "prompt")
    broken = Operation(
        method="post", path="/x", summary="", body=Body((ChatRequest,), rows), answers={}
    )
    with pytest.raises(KeyError, match="prompt"):
        document([broken])


def test_what_is_always_written_is_required_and_the_rest_is_not() -> None:
    class Answered(msgspec.Struct):
        always: int = 1
        sometimes: int | msgspec.UnsetType = msgspec.UNSET

    class Asked(msgspec.Struct):
        needed: int
        other: int = 1

    operation = Operation(
        method="post", path="/x/{y}", summary="", access=Access.OPEN, body=Body.of(Asked),
        answers={200: Answer((Answered,))},
    )  # fmt: skip
    made = document([operation])
    assert made["components"]["schemas"]["Answered"]["required"] == ["always"]
    written = made["paths"]["/x/{y}"]["post"]
    body = written["requestBody"]["content"]["application/json"]["schema"]
    assert body["required"] == ["needed"]
    assert body["properties"]["other"]["anyOf"][-1] == {"type": "null"}
    assert [item["name"] for item in written["parameters"]] == ["y"]
    assert written["security"] == []


# ---------------------------------------------------------------- what the server says

SESSION_ACTION = {"action": "evict", "tenant": "default", "session_id": "s1"}
SESSION_ROUTES = [
    ("post", "/v1/sessions", {"session_id": "s1", "ttl": 60}, 201),
    ("get", "/v1/sessions", None, 200),
    ("get", "/v1/sessions?limit=1", None, 200),
    ("get", "/v1/sessions/s1", None, 200),
    ("post", "/v1/sessions/s1/prewarm", {"messages": MESSAGES}, 200),
    ("post", "/v1/sessions/s1/fork", {}, 201),
    ("post", "/dashboard/data/sessions", SESSION_ACTION, 200),
    ("get", "/dashboard/data/sessions", None, 200),
    ("delete", "/v1/sessions/s1", None, 200),
    ("delete", "/v1/tenants/me/data", None, 200),
]
RESPONSE_ROUTES = [
    ("get", "/v1/cache/explain/{}", None, 200),
    ("get", "/v1/responses/{}", None, 200),
    ("get", "/v1/responses/{}/input_items?limit=1", None, 200),
    ("post", "/v1/responses/{}/cancel", {}, 400),
    ("delete", "/v1/responses/{}", None, 200),
]
COMPARED = {"prompt_cache_options": {"comparison_response_id": "resp_0"}}
ANSWERED = [
    ("post", "/v1/chat/completions", CHAT, 200),
    ("post", "/v1/chat/completions", {**CHAT, "n": 2, "stop": "two"}, 200),
    ("post", "/v1/completions", TEXT, 200),
    ("get", "/v1/models", None, 200),
    ("get", f"/v1/models/{MODEL_NAME}", None, 200),
    ("post", "/v1/messages", MESSAGE, 200),
    ("post", "/v1/messages", {**MESSAGE, "temperature": 2}, 400),
    ("post", "/v1/messages/count_tokens", {"model": MODEL_NAME, "messages": MESSAGES}, 200),
    ("post", "/v1/responses", RESPONSE, 200),
    ("post", "/v1/responses/nothing/cancel", {}, 404),
    ("get", "/v1/responses/nothing", None, 404),
    ("post", "/tokenize", {"prompt": "Once", "return_token_strs": True}, 200),
    ("post", "/tokenize", {"messages": MESSAGES}, 200),
    ("post", "/detokenize", {"tokens": [40, 41]}, 200),
    ("post", "/v1/cache/prewarm", {"prompt": "Once upon"}, 200),
    ("post", "/reset_prefix_cache", {}, 200),
    ("get", "/health", None, 200),
    ("get", "/live", None, 200),
    ("get", "/version", None, 200),
    ("get", "/openapi.json", None, 200),
    ("get", "/metrics", None, 200),
    ("get", "/load", None, 200),
    ("post", "/v1/chat/completions", {**CHAT, "explain_cache": True}, 200),
    ("post", "/v1/completions", {**TEXT, "explain_cache": True}, 200),
    ("post", "/v1/messages", {**MESSAGE, "explain_cache": True, "diagnostics": {}}, 200),
    ("post", "/v1/messages", {**MESSAGE, "diagnostics": {"previous_message_id": "msg_0"}}, 200),
    ("post", "/v1/responses", {**RESPONSE, "explain_cache": True, **COMPARED}, 200),
    ("get", "/v1/cache/explain?limit=3", None, 200),
    ("get", "/v1/cache/explain?limit=0", None, 400),
    ("get", "/v1/cache/explain/nothing", None, 404),
    ("get", "/v1/cache/history", None, 200),
    ("get", "/v1/cache/history?limit=0", None, 400),
    ("get", "/dashboard/data", None, 200),
    ("get", "/dashboard/data/series?span=2h&after=1.5", None, 200),
    ("get", "/dashboard/data/series?span=3h", None, 400),
    ("get", "/dashboard/data/requests?limit=5", None, 200),
    ("get", "/dashboard/data/findings", None, 200),
    ("get", "/dashboard/data/sessions?search=a&offset=0&limit=5", None, 200),
    ("get", "/dashboard/data/sessions?limit=0", None, 400),
    ("post", "/dashboard/data/sessions", {**SESSION_ACTION, "session_id": "nothing"}, 404),
    ("get", "/", None, 200),
    ("get", "/dashboard/dashboard.css", None, 200),
    ("get", "/dashboard/nothing", None, 404),
    ("get", "/v1/models/nothing", None, 404),
    ("get", "/v1/sessions/nothing", None, 404),
    ("get", "/v1/sessions?limit=0", None, 400),
    ("post", "/v1/completions", {**TEXT, "temperature": -1}, 400),
    ("post", "/v1/chat/completions", {**CHAT, "model": "nothing"}, 404),
]


@pytest.mark.parametrize(("method", "path", "body", "status"), ANSWERED)
def test_answers_are_as_described(
    described: Any, http: httpx.Client, method: str, path: str, body: Any, status: int
) -> None:
    answer = http.request(method, path, json=body)
    assert answer.status_code == status, answer.text
    check(described, method, path, answer)


def test_the_life_of_a_session_is_as_described(described: Any, http: httpx.Client) -> None:
    for method, path, body, status in SESSION_ROUTES:
        answer = http.request(method, path, json=body)
        assert answer.status_code == status, answer.text
        check(described, method, path, answer)


def test_the_life_of_a_response_is_as_described(described: Any, http: httpx.Client) -> None:
    made = http.post("/v1/responses", json=RESPONSE).json()
    for method, path, body, status in RESPONSE_ROUTES:
        answer = http.request(method, path.format(made["id"]), json=body)
        assert answer.status_code == status, answer.text
        check(described, method, path, answer)


def test_models_in_the_form_of_anthropic_are_as_described(
    described: Any, http: httpx.Client
) -> None:
    for path in ("/v1/models", f"/v1/models/{MODEL_NAME}"):
        answer = http.get(path, headers={"anthropic-version": "2023-06-01"})
        assert "display_name" in answer.text
        check(described, "get", path, answer)


def test_every_operation_was_asked(described: Any) -> None:
    asked = {
        operation_of(described, method, path)["operationId"]
        for method, path, _, status in (*ANSWERED, *SESSION_ROUTES, *RESPONSE_ROUTES)
        if status < 300 or path.endswith("/cancel")
    }
    known = {item["operationId"] for path in described["paths"].values() for item in path.values()}
    assert known - asked == set()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}),
        ("/v1/completions", {**TEXT, "stream_options": {"include_usage": True}}),
        ("/v1/messages", MESSAGE),
        ("/v1/responses", RESPONSE),
    ],
)
def test_events_are_as_described(
    described: Any, http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    answer = http.post(path, json={**body, "stream": True})
    content = operation_of(described, "post", path)["responses"]["200"]["content"]
    schema = content["text/event-stream"]["x-event-data"]
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert len(events) > 4
    for event in events:
        validator(described, schema).validate(event)


def check(described: Any, method: str, path: str, answer: httpx.Response) -> None:
    """Status, media type, body and the names of all its fields."""
    content = operation_of(described, method, path)["responses"][str(answer.status_code)]["content"]
    media_type = answer.headers["content-type"].split(";")[0]
    media = content[media_type if media_type in content else "*/*"]
    schema = media.get("schema")
    if schema is not None:
        # Objects of any form say so themselves.
        is_closed = schema.get("type") != "object"
        whole = {**schema, "unevaluatedProperties": False} if is_closed else schema
        # Lines of JSON are of one form each.
        lines = answer.text.splitlines() if media_type.endswith("ndjson") else [answer.text]
        assert lines
        for line in lines:
            validator(described, whole).validate(json.loads(line))


def validator(described: Any, schema: Any) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({**schema, "components": described["components"]})


def operation_of(described: Any, method: str, path: str) -> Any:
    bare = path.split("?")[0]
    for template, item in described["paths"].items():
        if method in item and re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", template), bare):
            found = item[method]
            if "{" not in template or bare not in described["paths"]:
                return found
    raise AssertionError(f"{method} {path} is not described")
