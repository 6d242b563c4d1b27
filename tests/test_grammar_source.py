"""The check of a grammar that needs no tokenizer, as a gateway makes it."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from llguidance import LLMatcher, LLTokenizer

from model_worker.grammar_source import grammar_source
from model_worker.protocol import Grammar, grammar_problem
from model_worker.sampling_params import MAX_GRAMMAR_CHARS
from tests.schema_kit import random_schema


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", "{}"),
        ("json_schema", '{"type": "object", "title": "T", "description": "d", "x-own": 1}'),
        ("regex", "a+|b"),
        ("lark", 'start: "a" other\nother: /[0-9]+/'),
    ],
)
def test_what_can_be_followed_has_no_problem(kind: str, text: str) -> None:
    assert grammar_problem(Grammar(kind, text)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(30))
def test_random_schemas_have_none_either(seed: int) -> None:
    assert grammar_problem(Grammar("json_schema", json.dumps(random_schema(seed)))) is None


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("json_schema", "nothing", "expected ident"),
        ("json_schema", "true", "object schema"),
        ("json_schema", '{"type": "wrong"}', "Invalid type: wrong"),
        ("json_schema", '{"uniqueItems": true, "type": "array"}', "uniqueItems"),
        ("json_schema", '{"$ref": "http://example.com/schema"}', "not present"),
        ("regex", "a(b", "unclosed group"),
        ("lark", "start: other", "unknown name"),
    ],
)
def test_what_is_wrong_is_one_line(kind: str, text: str, problem: str) -> None:
    told = grammar_problem(Grammar(kind, text))  # type: ignore[arg-type]
    assert told is not None
    assert problem in told
    assert "\n" not in told


def test_a_schema_cannot_loosen_the_options() -> None:
    lenient = {"x-guidance": {"lenient": True, "whitespace_pattern": ".*"}, "not": {}}
    assert grammar_problem(Grammar("json_schema", json.dumps(lenient))) is not None
    source = grammar_source(Grammar("json_schema", json.dumps({**lenient, "not": None})))
    assert '".*"' not in source


def test_the_costliest_text_is_checked_in_bounded_time() -> None:
    nested = '{"type":"array","items":' * 3000 + "{}" + "}" * 3000
    wide = json.dumps({"enum": ["x" * 40 + str(n) for n in range(5000)]})
    for grammar in (
        Grammar("json_schema", nested),
        Grammar("json_schema", wide),
        Grammar("regex", "(a|b)" * (MAX_GRAMMAR_CHARS // 5)),
        Grammar("regex", "((a{1,99}){1,99}){1,99}"),
    ):
        started = time.process_time()
        grammar_problem(grammar)
        assert time.process_time() - started < 3.0


def test_the_check_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from model_worker.protocol import Grammar, grammar_problem\n"
        "assert grammar_problem(Grammar('regex', 'a(')) is not None"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("kind", "text", "is_allowed"),
    [
        ("time", "23:59:59Z", True),
        ("time", "23:59:60Z", False),
        ("time", "24:00:00Z", False),
        ("date", "2023-02-28", True),
        ("date", "2023-02-29", False),
        ("date", "2023-04-31", False),
        ("date-time", "2024-12-31T00:00:00.25+01:30", True),
        ("date-time", "2024-12-31T00:00:60Z", False),
    ],
)
def test_formats_of_time_are_what_every_validator_takes(
    kind: str, text: str, is_allowed: bool
) -> None:
    schema = {"type": "object", "properties": {"format": {"type": "string", "format": kind}}}
    grammar = Grammar("json_schema", json.dumps({**schema, "required": ["format"]}))
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, grammar_source(grammar))
    token_ids = tokenizer.tokenize_str(json.dumps({"format": text}).replace(" ", ""))
    assert matcher.try_consume_tokens(token_ids) == len(token_ids) or not is_allowed
    assert (matcher.is_accepting() and not matcher.is_error()) == is_allowed
