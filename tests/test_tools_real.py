"""Forced calls and schemas, from a model whose weights are random, over HTTP and with the official
client: what comes out is valid because nothing else can."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from openai import pydantic_function_tool
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import BaseModel

from tests.target import Target, cached_tokens, text_of

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Rain?"}]


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Cork", "Lund"]
    days: Literal[1, 2, 3]
    is_long: bool


class Report(BaseModel):
    weathers: list[Weather]
    mood: Literal["sunny", "grey"] | None


@pytest.fixture(scope="module")
def target(tiny_target: Target) -> Target:
    return tiny_target


TOOL: ChatCompletionToolParam = pydantic_function_tool(Weather, name="get_weather")
CLOCK: ChatCompletionToolParam = {"type": "function", "function": {"name": "clock"}}
TIGHT = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(3))
def test_a_named_function_is_called_as_its_parameters_say(target: Target, seed: int) -> None:
    answer = target.openai.chat.completions.parse(
        model=target.model, messages=QUESTION, tools=[TOOL], seed=seed, temperature=1.5,
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
    )  # fmt: skip
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Weather)


def test_a_forced_call_is_streamed_to_the_same_arguments(target: Target) -> None:
    asked: dict[str, Any] = {
        "model": target.model, "messages": QUESTION, "tools": [TOOL], "temperature": 0,
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
    }  # fmt: skip
    whole = target.openai.chat.completions.create(**asked).choices[0].message
    with target.openai.chat.completions.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0].message
    assert kinds.count("tool_calls.function.arguments.delta") >= 2
    assert kinds.count("tool_calls.function.arguments.done") == 1
    assert final.tool_calls
    assert whole.tool_calls
    assert final.tool_calls[0].function.arguments == whole.tool_calls[0].function.arguments
    assert isinstance(final.tool_calls[0].function.parsed_arguments, Weather)
    assert not final.content


def test_a_call_must_come_where_one_is_required(target: Target) -> None:
    for seed in range(3):
        answer = target.chat(
            tools=[TOOL, CLOCK], tool_choice="required", parallel_tool_calls=False,
            max_tokens=200, temperature=1, seed=seed,
        ).json()  # fmt: skip
        message = answer["choices"][0]["message"]
        assert message["content"] is None
        assert len(message["tool_calls"]) == 1


def test_a_served_call_comes_back_and_its_whole_turn_is_cached(target: Target) -> None:
    asked = {
        "tools": [{"type": "function", "function": {"name": "act", "parameters": TIGHT}}],
        "tool_choice": {"type": "function", "function": {"name": "act"}},
        "max_tokens": 200, "session_id": "calls-come-back",
    }  # fmt: skip
    question = {"role": "user", "content": "Act, please."}
    first = target.chat(messages=[question], **asked).json()
    message = first["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert sorted(json.loads(call["function"]["arguments"])) == ["a", "b"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
    second = target.chat(messages=[question, message, result], **asked).json()
    assert second["history"] == "exact"
    assert cached_tokens(second) >= first["usage"]["total_tokens"] - 1


def test_the_official_client_parses_what_it_asked_for(target: Target) -> None:
    for seed in range(3):
        answer = target.openai.chat.completions.parse(
            model=target.model, messages=QUESTION, response_format=Report, seed=seed,
            max_tokens=600, temperature=0.5, stop=None,
        )  # fmt: skip
        choice = answer.choices[0]
        if choice.finish_reason == "stop":  # a list may go on up to max_tokens
            assert isinstance(choice.message.parsed, Report)


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, ["yes", "no"]),
        ({"guided_regex": "[ab]{3}"}, [a + b + c for a in "ab" for b in "ab" for c in "ab"]),
        ({"guided_grammar": 'start: "x" "y"'}, ["xy"]),
    ],
)
def test_only_what_matches_is_said(
    target: Target, fields: dict[str, Any], allowed: list[str]
) -> None:
    for ask in (target.chat, target.complete):
        body = ask(max_tokens=20, temperature=1, **fields).json()
        assert text_of(body) in allowed
        assert body["choices"][0]["finish_reason"] == "stop"


def test_a_schema_holds_in_both_endpoints_and_in_each_choice(target: Target) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "t", "schema": TIGHT}}
    for ask in (target.chat, target.complete):
        body = ask(
            max_tokens=100, n=3, temperature=1, seed=1, response_format=response_format
        ).json()
        for choice in body["choices"]:
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            given = json.loads(text)
            assert sorted(given) == ["a", "b"]
            assert given["a"] in ("x", "y")


def test_a_strict_function_leaves_text_free(target: Target) -> None:
    """A random model says nothing that is a call; what is bounded is UTF-8 at least."""
    body = target.chat(tools=[TOOL], max_tokens=20, ignore_eos=True).json()
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]
    assert len(text_of(body)) > 10
    assert "\ufffd" not in text_of(body).rstrip("\ufffd")  # the last character may be cut
