"""What an answer must match: the fields that say it, what is refused, and who learns of whom."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from model_worker.protocol import Grammar
from service.errors import InvalidRequest
from service.structured import checks
from service.structured.checks import GrammarChecks
from tests.gateway_kit import MODEL_NAME
from tests.session_kit import Talk, talking, user

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}


@pytest.fixture(scope="module")
def server() -> Iterator[Talk]:
    with talking() as talk:
        yield talk


@pytest.fixture
def talk(server: Talk) -> Talk:
    server.requests.clear()
    return server


def json_schema(schema: Any = SCHEMA, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, **fields}}


def post(talk: Talk, endpoint: str, **fields: Any) -> Any:
    if endpoint == "chat":
        return talk.chat([user("Hi")], None, **fields)
    body = {"model": MODEL_NAME, "prompt": ["Hi", "Ho"], "max_tokens": 4, **fields}
    return talk.client.post("/v1/completions", json=body)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ("json_schema", '{"type": "object"}')),
        ({"response_format": json_schema(strict=True)}, ("json_schema", json.dumps(SCHEMA))),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
         ("json_schema", '{"type": "object"}')),
        ({"structured_outputs": {"json": SCHEMA}}, ("json_schema", json.dumps(SCHEMA))),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}},
         ("json_schema", json.dumps(SCHEMA))),
        ({"structured_outputs": {"json_object": True}}, ("json_schema", '{"type": "object"}')),
        ({"structured_outputs": {"regex": "[a-z]+"}}, ("regex", "[a-z]+")),
        ({"structured_outputs": {"choice": ["yes", 'n"o', "yes"]}},
         ("lark", 'start: "yes" | "n\\"o"')),
        ({"structured_outputs": {"grammar": 'start: "x"'}}, ("lark", 'start: "x"')),
        ({"guided_json": SCHEMA}, ("json_schema", json.dumps(SCHEMA))),
        ({"guided_regex": "a|b"}, ("regex", "a|b")),
        ({"guided_choice": ["a"]}, ("lark", 'start: "a"')),
        ({"guided_grammar": 'start: "x"'}, ("lark", 'start: "x"')),
    ],
)  # fmt: skip
def test_the_worker_is_given_a_grammar(
    talk: Talk, endpoint: str, fields: dict[str, Any], grammar: tuple[Any, str] | None
) -> None:
    assert post(talk, endpoint, **fields).status_code == 200
    expected = None if grammar is None else Grammar(*grammar)
    assert {request.sampling_params.grammar for request in talk.requests} == {expected}


DEEP: Any = {"type": "object"}
for _ in range(70):
    DEEP = {"type": "object", "properties": {"a": DEEP}}


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "x"}}},
         "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
         "response_format.json_schema.name"),
        ({"response_format": json_schema(name="a b")}, "response_format.json_schema.name"),
        ({"response_format": json_schema(schema=[])}, "response_format.json_schema.schema"),
        ({"response_format": json_schema(schema=True)}, "response_format.json_schema.schema"),
        ({"response_format": json_schema(schema={"type": "hat"})},
         "response_format.json_schema.schema"),
        ({"response_format": json_schema(schema={"$ref": "#/no"})},
         "response_format.json_schema.schema"),
        ({"response_format": json_schema(schema={"not": {}})},
         "response_format.json_schema.schema"),
        ({"response_format": json_schema(schema=DEEP)}, "response_format.json_schema.schema"),
        ({"response_format": json_schema(schema={"enum": ["x" * 2**18]})},
         "response_format.json_schema.schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": 3}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a(b"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": "ab"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": "start: nope"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"whitespace_pattern": " "}},
         "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"response_format": json_schema(), "guided_regex": "a"}, "guided_regex"),
    ],
)  # fmt: skip
def test_what_cannot_be_matched_is_refused_by_name(
    talk: Talk, endpoint: str, fields: dict[str, Any], param: str
) -> None:
    response = post(talk, endpoint, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert talk.requests == []


# ---------------------------------------------------------------- checks


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


async def test_each_owner_has_a_grammar_looked_at_once(threads: ThreadPoolExecutor) -> None:
    """And nobody learns by the time it takes what another has asked for."""
    looked_at: list[str] = []

    def problem(grammar: Grammar) -> str | None:
        looked_at.append(grammar.text)
        return "it is bad." if grammar.text == "bad" else None

    known = GrammarChecks(threads, problem)
    for _ in range(2):
        for owner in (("t1", ""), ("t1", "salt"), ("t2", "")):
            await known.require(owner, Grammar("regex", "good"), "guided_regex")
            with pytest.raises(InvalidRequest) as failure:
                await known.require(owner, Grammar("regex", "bad"), "guided_regex")
            assert failure.value.message == "guided_regex: it is bad."
            assert failure.value.code == "invalid_grammar"
    assert sorted(looked_at) == ["bad"] * 3 + ["good"] * 3
    await known.require(("t1", ""), Grammar("lark", "good"), "x")
    assert len(looked_at) == 7  # another kind of the same text


async def test_what_is_remembered_is_bounded(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "MAX_GRAMMARS", 2)
    monkeypatch.setattr(checks, "MAX_OWNERS", 2)
    count = 0

    def problem(grammar: Grammar) -> str | None:
        nonlocal count
        count += 1
        return None

    known = GrammarChecks(threads, problem)
    for text in "abcba":
        await known.require(("t", ""), Grammar("regex", text), "x")
    assert count == 4  # b was still known, a was not
    for tenant in ("u", "v", "t"):
        await known.require((tenant, ""), Grammar("regex", "a"), "x")
    assert count == 7
    assert len(known._found) == 2
