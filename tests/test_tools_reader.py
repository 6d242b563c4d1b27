"""Calls out of text: whatever the pieces in which it comes, and whatever else the text is."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.answer_text import ScoredToken
from service.deltas import TextDelta, ToolCallDelta
from service.shapes.base import Choice
from service.tools.dialect import DIALECTS
from service.tools.reader import CallReader

NAMES = {"f", "get_weather"}
HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
LLAMA = '{"name": "f", "parameters": {"a": 1}}'
MISTRAL = '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]'
MISTRAL_NEW = '[TOOL_CALLS]f[ARGS]{"a": 1}'
F = ("f", '{"a": 1}')


def fold(dialect: str, pieces: Sequence[str]) -> Choice:
    reader, choice = CallReader(DIALECTS[dialect], NAMES), Choice()
    for piece in pieces:
        for delta in reader.push(piece, ()):
            choice.take(delta)
    for delta in reader.finish():
        choice.take(delta)
    return choice


def read(dialect: str, *pieces: str) -> tuple[str, list[tuple[str, str]]]:
    choice = fold(dialect, pieces)
    return choice.text, [(call.name, call.arguments) for call in choice.calls]


@pytest.mark.parametrize(
    ("dialect", "text", "content", "calls"),
    [
        ("hermes", HERMES, "", [F]),
        ("hermes", "Let me see.\n" + HERMES, "Let me see.", [F]),
        ("hermes", f"{HERMES}\n{HERMES}\n", "", [F, F]),
        ("hermes", f"{HERMES} So", " So", [F]),
        ("hermes", HERMES.removesuffix("\n</tool_call>"), "", [F]),
        ("hermes", HERMES.removesuffix("_call>"), "", [F]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [F]),
        ("hermes", '<tool_call>{"name": "f", "parameters": {"a": 1}}', "", [F]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', "", [F]),
        ("hermes", '<tool_call>[{"name":"f","arguments":{}}, {"name":"g","arguments":{}}]'
         "</tool_call>.", ".", [("f", "{}"), ("g", "{}")]),
        ("hermes", "plain <tool_cal", "plain <tool_cal", []),
        ("hermes", " \n", " \n", []),
        ("llama3-json", LLAMA, "", [F]),
        ("llama3-json", "<|python_tag|>" + LLAMA, "", [F]),
        ("llama3-json", f"{LLAMA}; {LLAMA}", "", [F, F]),
        ("llama3-json", f"\n{LLAMA}\n{LLAMA}", "", [F, F]),
        ("llama3-json", "So: " + LLAMA, "So: " + LLAMA, []),
        ("llama3-json", '{"name": "Ada", "parameters": {}}', '{"name": "Ada", "parameters": {}}',
         []),
        ("llama3-json", '<|python_tag|>{"name": "Ada", "parameters": {}}', "", [("Ada", "{}")]),
        ("llama3-json", '{"answer": 42}', '{"answer": 42}', []),
        ("llama3-json", '<|python_tag|>print("x")', '<|python_tag|>print("x")', []),
        ("mistral", MISTRAL, "", [F]),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}]', "",
         [F]),
        ("mistral", MISTRAL_NEW, "", [F]),
        ("mistral", f"Hm.{MISTRAL_NEW}{MISTRAL_NEW}", "Hm.", [F, F]),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": 1}', "", [F]),
        ("mistral", '[TOOL_CALLS]f{"a": 1}', "", [F]),
        ("mistral", "[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
        ("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    ],
)  # fmt: skip
def test_what_is_written_is_read(
    dialect: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert read(dialect, text) == (content, calls)
    assert read(dialect, *text) == (content, calls)  # character by character


@pytest.mark.parametrize(
    "inside",
    [
        "", "nonsense", "{}", "[]", '{"name": "f"}', '{"name": "", "arguments": {}}',
        '{"name": 1, "arguments": {}}', '{"name": "f", "arguments": 3}', '{"arguments": {}}',
        '{"name": "f", "name": "f", "arguments": {}}', '{"name": "f", "other": 1, "arguments": {}}',
        '{"name": "f", "arguments": "[]"}', '{"name": "f", "arguments": "{"}',
        '{"name": "\\ud83d", "arguments": {}}', "{'name': 'f', 'arguments': {}}",
        '{"name": "f", "argumen', '{"name": "f", "arguments": nul',
    ],
)  # fmt: skip
def test_what_is_no_call_stays_text(inside: str) -> None:
    for closing in ("", "</tool_call>"):
        text = f"a <tool_call>{inside}{closing} b"
        assert read("hermes", text) == (text, [])


def test_a_call_that_breaks_off_ends_there_and_the_rest_is_text() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1, b: 2}}</tool_call>'
    assert read("hermes", text) == ("b: 2}}</tool_call>", [("f", '{"a": 1, ')])
    assert read("hermes", text + HERMES)[1] == [("f", '{"a": 1, '), F]


def test_a_failed_call_does_not_hide_the_next() -> None:
    assert read("hermes", "<tool_call>no" + HERMES) == ("<tool_call>no", [F])
    assert read("hermes", "<tool_call><tool_call>" + HERMES[11:]) == ("<tool_call>", [F])
    text = '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"x": 1}]'
    assert read("mistral", text) == (', {"x": 1}]', [F])


def test_arguments_are_given_out_as_they_come() -> None:
    reader = CallReader(DIALECTS["hermes"], NAMES)
    pieces: list[Any] = [[*reader.push(char, ())] for char in HERMES]
    begun = HERMES.index('{"a"')
    assert all(not given for given in pieces[:begun])
    first, opening = pieces[begun]
    assert (first.index, first.name, first.arguments) == (0, "f", "")
    assert first.call_id.startswith("call_")
    assert len(first.call_id) == 29
    assert opening == ToolCallDelta(0, "{")
    assert [given[0].arguments for given in pieces[begun + 1 : begun + 8]] == list('"a": 1}')
    assert reader.finish() == []


def test_text_waits_only_for_what_may_be_a_call() -> None:
    reader = CallReader(DIALECTS["hermes"], NAMES)
    given = [reader.push(piece, ()) for piece in ("Hello", " wor", "ld\n", "<to", "ast>", "<tool")]
    assert [[delta.text for delta in deltas] for deltas in given] == [
        ["Hello"], [" wor"], ["ld"], [], ["\n<toast>"], [],
    ]  # fmt: skip
    assert [delta.text for delta in reader.finish()] == ["<tool"]


def test_ids_are_those_that_templates_take() -> None:
    (call,) = fold("mistral", [MISTRAL]).calls
    assert len(call.call_id) == 9
    assert call.call_id.isalnum()


def test_scores_go_with_their_text() -> None:
    """Those of a call's tokens belong to no content."""
    reader = CallReader(DIALECTS["hermes"], NAMES)
    pieces = [
        "Oh",
        " \n",
        "<tool_call>",
        '{"name": "f", ',
        '"arguments": {}}',
        "</tool_call>",
        " X",
    ]
    deltas, at = [], 0
    for number, piece in enumerate(pieces):
        score = ScoredToken(number, -1.0, (), at, at := at + len(piece))
        deltas += reader.push(piece, (score,))
    deltas += reader.finish()
    texts = [delta for delta in deltas if isinstance(delta, TextDelta)]
    assert [(d.text, [s.token_id for s in d.scores]) for d in texts] == [("Oh", [0]), (" X", [6])]


def test_a_plain_answer_keeps_all_scores() -> None:
    reader = CallReader(DIALECTS["hermes"], NAMES)
    scores = [ScoredToken(0, -1.0, (), 0, 0), ScoredToken(1, -1.0, (), 0, 2)]
    deltas = [*reader.push("", (scores[0],)), *reader.push("é\n", (scores[1],)), *reader.finish()]
    taken = [score for delta in deltas if isinstance(delta, TextDelta) for score in delta.scores]
    assert taken == scores


# ---------------------------------------------------------------- properties

PARTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", ";", "[", "]"),
        *('{"name": "f"', '"name"', '"arguments"', '"parameters"', ': {"a": [1, "x"]}', "}", "{"),
        *(
            HERMES,
            LLAMA,
            MISTRAL,
            MISTRAL_NEW,
            "\n",
            " ",
            ",",
            ":",
            '"',
            "\\",
            "f",
            "é",
            "text",
            "1",
        ),
        *("-", ".5", "e", "true", "nul", '"\\u00', "<tool", "<"),
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
CALLS = st.lists(
    st.tuples(
        st.sampled_from(sorted(NAMES)), st.dictionaries(st.text(max_size=5), JSON, max_size=3)
    ),
    min_size=1,
    max_size=3,
)  # fmt: skip


def cut(text: str, cuts: list[int]) -> list[str]:
    marks = sorted({0, len(text), *(at % (len(text) + 1) for at in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(marks)]


@given(
    st.sampled_from(sorted(DIALECTS)), st.lists(PARTS, max_size=12), st.lists(st.integers(0, 500))
)
@settings(max_examples=120, deadline=None)
def test_any_cutting_gives_the_same_fold(dialect: str, parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    whole = read(dialect, text)
    assert read(dialect, *cut(text, cuts)) == whole
    assert read(dialect, *text) == whole
    for _, arguments in whole[1][:-1]:
        assert arguments.startswith("{")


@given(st.lists(PARTS, max_size=10))
@settings(max_examples=60, deadline=None)
def test_text_without_calls_is_unchanged(parts: list[str]) -> None:
    text = "".join(parts)
    content, calls = read("hermes", text)
    if not calls:
        assert content == text


@given(
    st.sampled_from(["", "text", "a <b> {c}"]), CALLS, st.booleans(), st.lists(st.integers(0, 500))
)
@settings(max_examples=30, deadline=None)
def test_random_calls_are_read_exactly(
    before: str, calls: list[tuple[str, dict[str, Any]]], is_ascii: bool, cuts: list[int]
) -> None:
    written = [(name, json.dumps(arguments, ensure_ascii=is_ascii)) for name, arguments in calls]
    objects = [f'{{"name": "{name}", "arguments": {text}}}' for name, text in written]
    forms = {
        "hermes": before + "\n".join(f"<tool_call>{item}</tool_call>" for item in objects),
        "llama3-json": "; ".join(objects),
        "mistral": f"{before}[TOOL_CALLS][{', '.join(objects)}]",
    }
    for dialect, text in forms.items():
        content = "" if dialect == "llama3-json" else before
        assert read(dialect, *cut(text, cuts)) == (content, written)
    named = before + "".join(f"[TOOL_CALLS]{name}[ARGS]{text}" for name, text in written)
    assert read("mistral", *cut(named, cuts)) == (before, written)
