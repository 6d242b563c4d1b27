"""Tools over HTTP, before a worker that says what it is told to: what it is asked, and what of its
text becomes calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests import http_kit, models
from tests.gateway_kit import make_card
from tests.session_kit import Talk, talking, user

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather.", "parameters": SCHEMA},
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Cork"}}</tool_call>'
NAMED = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture(scope="module")
def server() -> Iterator[Talk]:
    with talking() as talk:
        yield talk


@pytest.fixture
def talk(server: Talk) -> Talk:
    server.answers.clear()
    server.requests.clear()
    return server


def ask(talk: Talk, answer: str = "fine", **fields: Any) -> dict[str, Any]:
    talk.answers.append(answer)
    response = talk.chat([user("Rain?")], None, **{"tools": [WEATHER, CLOCK], **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()["choices"][0]
    return body


def refused(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["param"]


def test_a_call_comes_out_of_the_text(talk: Talk) -> None:
    choice = ask(talk, f"Let me look.\n{CALL}")
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "Let me look."
    (call,) = message["tool_calls"]
    assert call["type"] == "function"
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Cork"}'}
    assert talk.requests[0].sampling_params.grammar is None
    text = talk.text_of(0)
    assert '"name": "get_weather", "description": "Weather.", "parameters"' in text
    assert '"name": "clock", "parameters": {"type": "object", "properties": {}}' in text


def test_an_answer_without_a_call_is_text(talk: Talk) -> None:
    choice = ask(talk, "No <tool_call>, no.")
    assert choice["message"]["content"] == "No <tool_call>, no."
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


def test_calls_are_streamed_as_they_come(talk: Talk) -> None:
    talk.answers.append(CALL + "\n" + CALL)
    response = talk.chat([user("Rain?")], None, tools=[WEATHER], stream=True)
    *chunks, done = http_kit.events_of(response)
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert all(not delta.get("content") for delta in deltas)
    parts = [call for delta in deltas for call in delta.get("tool_calls", ())]
    for index in (0, 1):
        mine = [part for part in parts if part["index"] == index]
        assert mine[0]["function"] == {"name": "get_weather", "arguments": ""}
        assert mine[0]["id"].startswith("call_")
        assert all("id" not in part for part in mine[1:])
        pieces = [part["function"]["arguments"] for part in mine]
        assert "".join(pieces) == '{"city": "Cork"}'
        assert len(pieces) > 10  # a token each
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_choice_none_reads_no_call_and_keeps_the_prompt(talk: Talk) -> None:
    choice = ask(talk, CALL, tool_choice="none")
    assert choice["message"]["content"] == CALL
    assert choice["finish_reason"] == "stop"
    ask(talk)
    assert talk.prompts[0] == talk.prompts[1]


@pytest.mark.parametrize(
    ("fields", "holds", "lacks"),
    [
        ({"tool_choice": "required"}, ["start: calls", "get_weather", "clock", ")*"], ["TEXT"]),
        ({"tool_choice": NAMED}, ["start: calls", "clock"], ["get_weather", ")*", "TEXT"]),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ["start: calls"], [")*"]),
        ({"parallel_tool_calls": False}, ["TEXT", "get_weather", "clock"], [")* text"]),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto",
                                                                       "tools": [NAMED]}}},
            ["TEXT", "clock", ")* text"], ["get_weather"],
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required",
                                                                       "tools": [NAMED]}}},
            ["start: calls", "clock"], ["get_weather", "TEXT"],
        ),
        ({"response_format": {"type": "json_object"}}, ["calls | answer", "clock"], ["TEXT"]),
    ],
)  # fmt: skip
def test_what_must_be_is_a_grammar(
    talk: Talk, fields: dict[str, Any], holds: list[str], lacks: list[str]
) -> None:
    ask(talk, **fields)
    grammar = talk.requests[0].sampling_params.grammar
    assert grammar is not None
    assert grammar.kind == "lark"
    assert [part for part in holds if part not in grammar.text] == []
    assert [part for part in lacks if part in grammar.text] == []


def test_a_strict_function_bounds_calls_beside_text(talk: Talk) -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    ask(talk, tools=[strict, CLOCK])
    ask(talk, tools=[WEATHER, CLOCK])
    first, second = (request.sampling_params.grammar for request in talk.requests)
    assert first is not None
    assert '"city"' in first.text
    assert second is None
    assert talk.prompts[0] == talk.prompts[1]  # being strict is about calls, not about the prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": []}, "tool_choice"),
        ({"tools": "x"}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "web", "function": {"name": "clock"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "x" * 65}}]},
         "tools[0].function.name"),
        ({"tools": [CLOCK, CLOCK]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
         "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {
            "type": "string"}}}]}, "tools[0].function.parameters.type"),
        ({"tools": [{"type": "function", "function": {"name": "f", "size": 1}}]},
         "tools[0].function.size"),
        ({"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(129)]},
         "tools"),
        ({"tool_choice": "all"}, "tool_choice"),
        ({"tool_choice": 3}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nope"}}},
         "tool_choice.function.name"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto",
                                                                    "tools": []}}},
         "tool_choice.allowed_tools.tools"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "clock", "strict": True,
          "parameters": {"type": "object", "not": {}}}}]}, "tools[0].function.parameters"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(talk: Talk, fields: dict[str, Any], param: str) -> None:
    asked = {"tools": [CLOCK], "tool_choice": NAMED, **fields}
    assert refused(talk.chat([user("x")], None, **asked)) == (400, param)
    assert talk.requests == []


def test_what_a_loose_function_cannot_be_held_to_is_left_out(talk: Talk) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tool = {"type": "function", "function": {"name": "clock", "parameters": parameters}}
    ask(talk, tools=[tool], tool_choice=NAMED)
    assert talk.requests[0].sampling_params.grammar is not None


def test_a_large_schema_is_refused(talk: Talk) -> None:
    names = {f"a{number}": {} for number in range(50_001)}
    parameters = {"type": "object", "properties": names}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert refused(talk.chat([user("x")], None, tools=[tool])) == (400, "tools")


def test_a_deep_schema_is_refused(talk: Talk) -> None:
    nested: dict[str, Any] = {"type": "object"}
    for _ in range(70):
        nested = {"type": "object", "properties": {"a": nested}}
    tool = {"type": "function", "function": {"name": "f", "parameters": nested}}
    response = talk.chat([user("x")], None, tools=[tool])
    assert refused(response) == (400, "tools[0].function.parameters")


def test_a_template_that_knows_no_tools_says_so() -> None:
    with talking(card=make_card(chat_template=models.CHAT_TEMPLATE)) as talk:
        for choice in ("none", "auto"):
            response = talk.chat([user("x")], None, tools=[CLOCK], tool_choice=choice)
            assert refused(response) == (400, "tools")
            assert "knows no tools" in response.json()["error"]["message"]
        assert talk.chat([user("x")], None, tools=[]).status_code == 200
        assert talk.chat([user("x")], None, tool_choice="auto").status_code == 200


def test_without_a_parser_tools_are_only_shown() -> None:
    with talking(tool_call_parser="none") as talk:
        assert refused(talk.chat([user("x")], None, tools=[CLOCK])) == (400, "tools")
        choice = ask(talk, CALL, tool_choice="none")
        assert choice["message"]["content"] == CALL


def shuffled(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: shuffled(value[name]) for name in reversed(value)}
    return [shuffled(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("is_canonical", [False, True])
def test_canonical_tools_hit_whatever_the_order_of_their_names(is_canonical: bool) -> None:
    with talking(canonical_tools=is_canonical) as talk:
        for tools in ([WEATHER, CLOCK], shuffled([WEATHER, CLOCK]), [CLOCK, WEATHER]):
            response = talk.chat([user("Rain?")], None, tools=tools)
            assert response.status_code == 200
        first, second, third = talk.prompts
        assert (first == second) is is_canonical
        assert first != third  # their own order may mean something
        usage = talk.chat([user("Rain?")], None, tools=shuffled([WEATHER, CLOCK])).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == len(second) - 1
        body = {"messages": [user("Rain?")], "tools": shuffled([WEATHER, CLOCK])}
        assert talk.client.post("/tokenize", json=body).json()["tokens"] == second


def test_a_served_call_comes_back_as_history_and_hits(talk: Talk) -> None:
    """What the template writes of it is what was generated, so the session goes on exactly."""
    talk.answers.append(CALL)
    question = user("Is it raining?")
    first = talk.chat([question], "rainy", tools=[WEATHER])
    message = first.json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "wet"}
    second = talk.chat([question, message, result], "rainy", tools=[WEATHER])
    assert second.json()["history"] == "exact"
    cached = second.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == first.json()["usage"]["total_tokens"]


def test_other_spacing_than_the_templates_costs_the_turn_alone(talk: Talk) -> None:
    talk.answers.append(CALL.replace(": ", ":"))
    question = user("Is it raining now?")
    first = talk.chat([question], "windy", tools=[WEATHER])
    message = first.json()["choices"][0]["message"]
    second = talk.chat([question, message, user("So?")], "windy", tools=[WEATHER])
    assert second.json()["history"] == "retokenized"
    usage = first.json()["usage"]
    cached = second.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert usage["prompt_tokens"] <= cached < usage["total_tokens"]


def test_prompts_with_tools_can_be_prewarmed(talk: Talk) -> None:
    messages = [user("Will it rain on Sunday?")]
    body = {"messages": messages, "tools": [WEATHER]}
    assert talk.client.post("/v1/cache/prewarm", json=body).status_code == 200
    usage = talk.chat(messages, None, tools=[WEATHER]).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    wrong = talk.client.post("/v1/cache/prewarm", json={"prompt": "x", "tools": [WEATHER]})
    assert refused(wrong) == (400, "tools")


def test_n_choices_call_each_for_itself(talk: Talk) -> None:
    talk.answers += [CALL, "no", CALL]
    response = talk.chat([user("Rain?")], None, tools=[WEATHER], n=3)
    reasons = [choice["finish_reason"] for choice in response.json()["choices"]]
    assert sorted(reasons) == ["stop", "tool_calls", "tool_calls"]


def test_a_call_cut_by_length_is_begun_and_not_complete(talk: Talk) -> None:
    choice = ask(talk, CALL, max_tokens=60)
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert CALL.find('{"city') + len(call["function"]["arguments"]) == 60
    with pytest.raises(json.JSONDecodeError):
        json.loads(call["function"]["arguments"])
