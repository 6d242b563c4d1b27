"""Whatever a schema allows, no answer is a 5xx or other than described: by us, or by OpenAI.

Which operations there are is read off the documents; what is asked of them is schemathesis's, which
only the process that runs this file builds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase

from service.openapi.document import document
from tests.gateway_kit import MODEL_NAME
from tests.http_kit import Served, say, serving

OPENAI = Path(__file__).parent / "data" / "openai_openapi.json"
SECONDS = 10.0
OURS: Mapping[str, Any] = document()
THEIRS: Mapping[str, Any] = json.loads(OPENAI.read_text())
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


def described(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The description of each operation, by method and path."""
    return {
        f"{method.upper()} {path}": item
        for path, items in schema["paths"].items()
        for method, item in items.items()
        if method in ("get", "put", "post", "delete", "patch")
    }


def asked() -> list[tuple[str, str]]:
    """Any text is a good part of a path, so there is nothing bad to ask of some."""
    operations = described(OURS)
    bad = [
        label
        for label, item in operations.items()
        if "requestBody" in item or any(of["in"] == "query" for of in item.get("parameters", ()))
    ]
    return [(label, "POSITIVE") for label in operations] + [(label, "NEGATIVE") for label in bad]


@cache
def operations_of(is_ours: bool) -> dict[str, Any]:
    """What schemathesis finds in the document."""
    from schemathesis import openapi

    schema: Any = openapi.from_dict(dict(OURS if is_ours else THEIRS))
    found = [result.ok() for result in schema.get_all_operations()]
    return {operation.label: operation for operation in found}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(say("one two three")) as served:
        yield served


def test_the_operations_are_found() -> None:
    assert list(operations_of(is_ours=True)) == list(described(OURS))
    assert len(described(OURS)) == sum(map(len, OURS["paths"].values()))
    with_input = [label for label, item in operations_of(is_ours=True).items()
                  if item.body or item.query]  # fmt: skip
    assert [label for label, mode in asked() if mode == "NEGATIVE"] == with_input
    assert list(operations_of(is_ours=False)) == list(described(THEIRS))
    assert {"POST /chat/completions", "POST /completions", "POST /responses"} <= set(
        described(THEIRS)
    )


@pytest.mark.parametrize(("label", "mode"), asked())
def test_answers_are_as_we_describe_them(served: Served, label: str, mode: str) -> None:
    """Requests that the description allows, and others."""
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    operation = operations_of(is_ours=True)[label]

    @hypothesis.given(case=operation.as_strategy(GenerationMode[mode]))
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


@pytest.mark.parametrize("label", described(THEIRS))
def test_answers_are_as_openai_describes_them(served: Served, label: str) -> None:
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error

    operation = operations_of(is_ours=False)[label]

    @hypothesis.given(case=operation.as_strategy(GenerationMode.POSITIVE))
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
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
    )

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
    import jsonschema

    with served.client() as client:
        answer = client.post(f"/v1{path}", json={"model": MODEL_NAME, **body})
    assert answer.status_code == 200, answer.text
    where = {"$ref": f"#/components/schemas/{schema}", "components": THEIRS["components"]}
    jsonschema.Draft202012Validator(where).validate(answer.json())
