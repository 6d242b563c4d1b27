"""Tools and schemas through Anthropic's and OpenAI's newer API, with the clients of both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.gateway_kit import MODEL_NAME
from tests.session_kit import Talk, talking, user

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
WEATHER: dict[str, Any] = {"name": "weather", "description": "Rain?", "input_schema": SCHEMA}
FUNCTION: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "Rain?",
    "parameters": SCHEMA,
}
CALL = 'I look.\n<tool_call>{"name": "weather", "arguments": {"city": "Cork"}}</tool_call>'
SAME: dict[str, Any] = {"model": MODEL_NAME, "max_tokens": 200}


@pytest.fixture(scope="module")
def talk() -> Iterator[Talk]:
    with talking() as started:
        yield started


@pytest.fixture(scope="module")
def claude(talk: Talk) -> Iterator[anthropic.Anthropic]:
    url = talk.served.base_url
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def client(talk: Talk) -> Iterator[openai.OpenAI]:
    url = f"{talk.served.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


def test_a_call_and_its_result(talk: Talk, claude: anthropic.Anthropic) -> None:
    talk.answers = [CALL, "It rains."]
    asked: list[Any] = [user("Rain in Cork?")]
    fields = {**SAME, "tools": [WEATHER]}
    first = claude.messages.create(messages=asked, **fields)
    text, call = first.content
    assert (text.type, call.type, first.stop_reason) == ("text", "tool_use", "tool_use")
    assert text.type == "text"
    assert call.type == "tool_use"
    assert (text.text, call.name, call.input) == ("I look.", "weather", {"city": "Cork"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    asked += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = claude.messages.create(messages=asked, **fields)
    assert second.content[0].type == "text"
    assert second.content[0].text == "It rains."
    assert f"[{call.id}]rain" in talk.text_of(-1)
    counted = claude.messages.count_tokens(model=MODEL_NAME, messages=asked, tools=[WEATHER])
    assert counted.input_tokens == len(talk.prompts[-1])


def test_a_streamed_call(talk: Talk, claude: anthropic.Anthropic) -> None:
    talk.answers = [CALL]
    with claude.messages.stream(messages=[user("Rain?")], tools=[WEATHER], **SAME) as stream:
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["text", "tool_use"]
    assert message.content[1].type == "tool_use"
    assert message.content[1].input == {"city": "Cork"}


@pytest.mark.parametrize(
    ("choice", "is_forced"),
    [("auto", False), ("any", True), ("tool", True), ("none", False)],
)
def test_a_choice_of_tools(talk: Talk, choice: str, is_forced: bool) -> None:
    named = {"name": "weather"} if choice == "tool" else {}
    talk.answers = ['[{"name": "weather", "parameters": {"city": "Cork"}}]'] * is_forced
    body = {
        **SAME,
        "messages": [user("Rain?")],
        "tools": [WEATHER],
        "tool_choice": {"type": choice, "disable_parallel_tool_use": is_forced, **named},
    }
    assert talk.client.post("/v1/messages", json=body).status_code == 200
    assert (talk.requests[-1].sampling_params.grammar is not None) == is_forced
    talk.answers = []


def test_a_breakpoint_after_the_tools(talk: Talk) -> None:
    tool = {**WEATHER, "name": "wind", "cache_control": {"type": "ephemeral"}}
    body = {**SAME, "messages": [user("Wind?")], "tools": [tool]}
    usage = talk.client.post("/v1/messages", json=body).json()["usage"]
    assert usage["cache_creation_input_tokens"] > 20
    kinds = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert sum(usage[kind] for kind in kinds) == len(talk.prompts[-1])


def test_a_schema_for_a_message(talk: Talk) -> None:
    talk.answers = ['{"city": "Cork"}']
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    body = {**SAME, "messages": [user("Where?")], "output_config": config}
    assert talk.client.post("/v1/messages", json=body).status_code == 200
    grammar = talk.requests[-1].sampling_params.grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"


def test_functions_of_a_response(talk: Talk, client: openai.OpenAI) -> None:
    talk.answers = [CALL, "It rains."]
    fields: dict[str, Any] = {"model": MODEL_NAME, "tools": [FUNCTION]}
    first = client.responses.create(input="Rain in Cork?", **fields)
    assert [item.type for item in first.output] == ["message", "function_call"]
    call = first.output[1]
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Cork"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = client.responses.create(input=[result], previous_response_id=first.id, **fields)
    assert second.output_text == "It rains."
    assert f"[{call.call_id}]rain" in talk.text_of(-1)


def test_a_streamed_function(talk: Talk, client: openai.OpenAI) -> None:
    talk.answers = [CALL]
    with client.responses.stream(
        model=MODEL_NAME, input="Rain?", tools=[FUNCTION], store=False
    ) as stream:
        pieces = [
            event.delta
            for event in stream
            if event.type == "response.function_call_arguments.delta"
        ]
        final = stream.get_final_response()
    assert json.loads("".join(pieces)) == {"city": "Cork"}
    assert final.output[1].type == "function_call"


def test_a_schema_for_a_response(talk: Talk) -> None:
    talk.answers = ['{"city": "Cork"}']
    form = {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}
    body = {"model": MODEL_NAME, "input": "Where?", "text": {"format": form}}
    response = talk.client.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    assert talk.requests[-1].sampling_params.grammar is not None
