"""Whatever a schema allows, no answer is a 5xx or other than described: by us, or by OpenAI."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from service.openapi.document import document
from tests.gateway_kit import MODEL_NAME
from tests.http_kit import Served, say, serving

OPENAI = Path(__file__).parent / "data" / "openai_openapi.json"
SECONDS = 10.0
OURS = schemathesis.openapi.from_dict(document())
THEIRS = schemathesis.openapi.from_dict(json.loads(OPENAI.read_text()))
POSITIVE = schemathesis.GenerationMode.POSITIVE
NEGATIVE = schemathesis.GenerationMode.NEGATIVE
MESSAGES = [{"role": "user", "content": "Hi"}]


def settings(max_examples: int) -> hypothesis.settings:
    """The same examples each time."""
    return hypothesis.settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def operations(schema: Any) -> dict[str, Any]:
    found = [result.ok() for result in schema.get_all_operations()]
    return {operation.label: operation for operation in found}


def asked() -> list[tuple[str, Any]]:
    """Any text is a good part of a path, so there is nothing bad to ask of some."""
    bad = [label for label, item in OUR_OPERATIONS.items() if item.body or item.query]
    return [(label, POSITIVE) for label in OUR_OPERATIONS] + [(label, NEGATIVE) for label in bad]


OUR_OPERATIONS = operations(OURS)
THEIR_OPERATIONS = operations(THEIRS)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(say("one two three")) as served:
        yield served


def test_the_operations_are_found() -> None:
    assert len(OUR_OPERATIONS) == sum(map(len, document()["paths"].values()))
    assert {"POST /chat/completions", "POST /completions", "POST /responses"} <= set(
        THEIR_OPERATIONS
    )


@pytest.mark.parametrize(("label", "mode"), asked())
def test_answers_are_as_we_describe_them(served: Served, label: str, mode: Any) -> None:
    """Requests that the description allows, and others."""
    operation = OUR_OPERATIONS[label]

    @hypothesis.given(case=operation.as_strategy(mode))
    @settings(4 if operation.body else 2)
    def ask(case: Any) -> None:
        name_the_model(case)
        case.call_and_validate(
            base_url=served.base_url,
            timeout=SECONDS,
            checks=[
                not_a_server_error,
                status_code_conformance,
                content_type_conformance,
                response_schema_conformance,
            ],
        )

    ask()


@pytest.mark.parametrize("label", THEIR_OPERATIONS)
def test_answers_are_as_openai_describes_them(served: Served, label: str) -> None:
    operation = THEIR_OPERATIONS[label]

    @hypothesis.given(case=operation.as_strategy(POSITIVE))
    @settings(4)
    def ask(case: Any) -> None:
        name_the_model(case)
        case.call_and_validate(
            base_url=f"{served.base_url}/v1",
            timeout=SECONDS,
            checks=[not_a_server_error, form_of_success],
        )

    ask()


def form_of_success(context: Any, response: Any, case: Any) -> bool | None:
    """Of errors, the description has the inner object where the API answers with the outer."""
    if response.status_code >= 300:
        return None
    content_type_conformance(context, response, case)
    return response_schema_conformance(context, response, case)


def name_the_model(case: Any) -> None:
    """Most requests would end with a model that is not known."""
    if isinstance(case.body, dict) and "model" in case.body:
        case.body["model"] = MODEL_NAME


@pytest.mark.parametrize(
    ("path", "body", "schema"),
    [
        (
            "/chat/completions",
            {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2},
            "CreateChatCompletionResponse",
        ),
        ("/completions", {"prompt": "Hi"}, "CreateCompletionResponse"),
        ("/responses", {"input": "Hi"}, "Response"),
    ],
)
def test_an_answer_has_openais_form(served: Served, path: str, body: Any, schema: str) -> None:
    described = json.loads(OPENAI.read_text())
    with served.client() as client:
        answer = client.post(f"/v1{path}", json={"model": MODEL_NAME, **body})
    assert answer.status_code == 200, answer.text
    where = {"$ref": f"#/components/schemas/{schema}", "components": described["components"]}
    jsonschema.Draft202012Validator(where).validate(answer.json())
