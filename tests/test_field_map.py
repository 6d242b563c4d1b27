"""Which part of a request a place in its prompt belongs to."""

from __future__ import annotations

from typing import Any

import pytest

from service.diagnostics.field_map import FieldMap
from service.routes.chat import conversation_of
from service.schemas.chat import chat_request
from service.tokenizer import ModelTokenizer
from tests.diagnostics_kit import said, system, tool, user
from tests.gateway_kit import make_card, make_tokenizer

TRIMMING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if tools %}# Tools\n{% for t in tools %}{{ t | tojson(indent=2) }}\n\n"
    "{% endfor %}{% endif %}"
)


def mapped(
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    tokenizer: ModelTokenizer | None = None,
) -> tuple[str, FieldMap]:
    fields: dict[str, Any] = {"model": "m", "messages": messages}
    if tools:
        fields["tools"] = tools
    conversation = conversation_of(chat_request(fields), is_canonical=False)
    template = (tokenizer or make_tokenizer()).chat_template
    text = template.apply(conversation)
    return text, FieldMap(text, conversation, template)


def call(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    calls = [{"id": "c1", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def test_every_part_of_a_conversation() -> None:
    messages = [system("user"), user("assistant"), said("user"), user("assistant\n")]
    text, fields = mapped(messages)
    place = 0
    for number, message in enumerate(messages):
        place = text.index("\n" + message["content"], place) + 1
        path = f"messages[{number}].content"
        assert fields.path_at(place) == fields.path_at(place + 3) == path
        assert fields.path_at(place - 1) == "template"
        assert fields.start_of(path) == place
        place += len(message["content"])
        assert fields.path_at(place) == "template"
    assert fields.path_at(0) == fields.path_at(len(text)) == "template"
    assert fields.next_message(0) == 0
    assert fields.next_message(place) is None


def test_calls_and_their_results() -> None:
    result = {"role": "tool", "tool_call_id": "c1", "content": "12 degrees"}
    messages = [user("weather?"), call("look", '{"place": "Oslo"}'), result]
    text, fields = mapped(messages, [tool("look")])
    assert fields.path_at(text.index('look", "arg')) == "messages[1].tool_calls[0].function.name"
    assert fields.path_at(text.index("Oslo")) == "messages[1].tool_calls[0].function.arguments"
    assert fields.path_at(text.index("12 degrees")) == "messages[2].content"


def test_tools_as_lines_and_as_indented_objects() -> None:
    tools = [tool("first"), tool("second", 'with {braces} and "name": "first"'), tool("third")]
    trimming = ModelTokenizer.from_card(make_card(chat_template=TRIMMING))
    for tokenizer in (make_tokenizer(), trimming):
        text, fields = mapped([system(" told once \n"), user("hi")], tools, tokenizer)
        for number, name in enumerate(("first", "second", "third")):
            place = text.rindex(f'"name": "{name}"') if number else text.index('"name": "first"')
            for inside in (place, text.index("parameters", place), text.index("place", place)):
                assert fields.path_at(inside) == f"tools[{number}]"
        assert fields.path_at(text.index("told once")) == "messages[0].content"
        assert fields.path_at(text.index("hi<")) == "messages[1].content"


def test_a_text_that_is_not_what_the_template_writes_now() -> None:
    text, _ = mapped([system("one two"), user("three")])
    conversation = conversation_of(
        chat_request({"model": "m", "messages": [system("one two"), user("three")]}),
        is_canonical=False,
    )
    dated = text.replace("<s>", "<s>Today is another day.\n")
    fields = FieldMap(dated, conversation, make_tokenizer().chat_template)
    assert fields.path_at(dated.index("two")) == "messages[0].content"
    assert fields.path_at(dated.index("three")) == "messages[1].content"
    lost = FieldMap("something else", conversation, make_tokenizer().chat_template)
    assert lost.path_at(3) == "template"


@pytest.mark.parametrize("place", [0, 10_000])
def test_places_beyond_everything(place: int) -> None:
    assert mapped([user("hi")])[1].path_at(place) == "template"
