"""Conversations to prompts: what is handed to the template, and what is refused by name."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from service.chat_template import ChatTemplate
from service.conversation import Conversation
from service.errors import InvalidRequest
from service.routes.chat import conversation_of
from service.schemas.chat import UserMessage, parse_chat_request
from tests import models
from tests.gateway_kit import MODEL_NAME, make_card, make_tokenizer
from tests.http_kit import serving

STRICT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{{ '[' + message['role'] + ']' + message['content'] }}{% endfor %}"
)
FIRST_SYSTEM_ONLY_TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% endif %}"
    "{% for message in messages if message['role'] != 'system' %}"
    "{{ message['content'] }}{% endfor %}"
)
DEVELOPER_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'developer' %}{{ '<dev>' + message['content'] }}"
    "{% else %}{{ '<' + message['role'] + '>' + message['content'] }}{% endif %}{% endfor %}"
)
TEXT_ARGUMENTS_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ call['function']['name'] + ':' + call['function']['arguments'] }}"
    "{% endfor %}{% endfor %}"
)
FERRY = {"name": "ferry_status", "arguments": '{"route": "inishbeg"}'}


def rendered(
    messages: list[dict[str, Any]], template: str = models.TOOL_CHAT_TEMPLATE, **fields: Any
) -> str:
    body = json.dumps({"model": MODEL_NAME, "messages": messages, **fields}).encode()
    chat = make_tokenizer(template).chat_template
    return chat.apply(conversation_of(parse_chat_request(body), is_canonical=False))


def ferry_conversation(**assistant: Any) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {**FERRY}}
    return [
        {"role": "user", "content": "Is the ferry to Inishbeg running?"},
        {"role": "assistant", "tool_calls": [call], **assistant},
        {"role": "tool", "tool_call_id": "c1", "content": "cancelled, swell 4 m"},
        {"role": "user", "content": "So?"},
    ]


def refused(messages: list[dict[str, Any]], template: str) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as failure:
        rendered(messages, template)
    return failure.value


def test_a_plain_conversation_is_the_templates_own_text() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert rendered(messages) == (
        "<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("assistant", [{"content": None}, {}, {"content": ""}])
def test_a_tool_call_turn_without_content(assistant: dict[str, Any]) -> None:
    text = rendered(ferry_conversation(**assistant))
    assert text == rendered(ferry_conversation(content=""))
    assert '"ferry_status"' in text
    assert '"route": "inishbeg"' in text
    assert "[c1]cancelled, swell 4 m" in text


def test_tool_calls_that_the_template_drops_are_refused() -> None:
    error = refused(ferry_conversation(), models.CHAT_TEMPLATE)
    assert error.param == "messages[1].tool_calls[0].function.name"


def test_tool_results_alone_are_expressible_where_the_role_is_written_out() -> None:
    messages = [{"role": "tool", "tool_call_id": "c1", "content": "4 m"}]
    assert "4 m" in rendered(messages, models.CHAT_TEMPLATE)


def test_arguments_are_text_where_the_template_wants_text() -> None:
    text = rendered(ferry_conversation(), TEXT_ARGUMENTS_TEMPLATE)
    assert 'ferry_status:{"route": "inishbeg"}' in text


def test_arguments_stand_as_they_were_written_where_the_template_lets_them() -> None:
    kept = TEXT_ARGUMENTS_TEMPLATE.replace(
        "call['function']['arguments']",
        "(call.function.arguments if call.function.arguments is string "
        "else call.function.arguments | tojson)",
    )
    messages = ferry_conversation()
    messages[1]["tool_calls"][0]["function"]["arguments"] = '{"route":"inishbeg" }'
    assert 'ferry_status:{"route":"inishbeg" }' in rendered(messages, kept)
    assert '"arguments": {"route": "inishbeg"}' in rendered(messages)


def test_tools_are_shown_or_refused() -> None:
    tools = [{"type": "function", "function": {"name": "ferry_status", "strict": True}}]
    messages = [{"role": "user", "content": "Hi"}]
    assert "ferry_status" in rendered(messages, tools=tools)
    assert "strict" not in rendered(messages, tools=tools)
    with pytest.raises(InvalidRequest, match="knows no tools") as failure:
        rendered(messages, models.CHAT_TEMPLATE, tools=tools)
    assert failure.value.param == "tools"


def test_system_messages_keep_their_place() -> None:
    messages = [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "system", "content": "From now on answer in French."},
        {"role": "user", "content": "Colour of grass?"},
    ]
    text = rendered(messages)
    assert text.index("Hello.") < text.index("French") < text.index("grass")
    # Keeping the place keeps the prefix of the first turn.
    first = rendered(messages[:2]).removesuffix("<|im_start|>assistant\n")
    assert text.startswith(first)


def test_a_template_that_raises_is_400_with_its_own_words() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "system", "content": "French."}]
    error = refused(messages, STRICT_TEMPLATE)
    assert error.status == 400
    assert "System message must be at the beginning" in error.message


def test_a_message_that_the_template_drops_is_refused() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "system", "content": "French."}]
    assert refused(messages, FIRST_SYSTEM_ONLY_TEMPLATE).param == "messages[1].content"


def test_the_developer_is_the_system_where_the_template_knows_no_developer() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert "<|im_start|>system\nBe brief." in rendered(messages)
    assert rendered(messages, DEVELOPER_TEMPLATE) == "<dev>Be brief.<user>Hi"


PREFILL = [{"role": "user", "content": "Colour?"}, {"role": "assistant", "content": "It is "}]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"continue_final_message": True},
        {"continue_final_message": True, "add_generation_prompt": False},
    ],
)
def test_a_last_assistant_message_is_gone_on_with(fields: dict[str, Any]) -> None:
    text = rendered(PREFILL, **fields)
    assert text.endswith("<|im_start|>assistant\nIt is ")


def test_parts_of_a_prefill_are_not_lost() -> None:
    parts = [{"type": "text", "text": "It"}, {"type": "text", "text": "is "}]
    messages = [PREFILL[0], {"role": "assistant", "content": parts}]
    assert rendered(messages).endswith("<|im_start|>assistant\nIt\nis ")


@pytest.mark.parametrize(
    "fields", [{"continue_final_message": False}, {"add_generation_prompt": True}]
)
def test_a_new_turn_after_an_assistant_message_where_asked_for(fields: dict[str, Any]) -> None:
    text = rendered(PREFILL, **fields)
    assert text.endswith("It is <|im_end|>\n<|im_start|>assistant\n")


def test_no_turn_is_opened_where_none_is_wanted() -> None:
    text = rendered(PREFILL[:1], add_generation_prompt=False)
    assert text.endswith("Colour?<|im_end|>\n")


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        (PREFILL, {"continue_final_message": True, "add_generation_prompt": True}),
        (PREFILL[:1], {"continue_final_message": True}),
        ([PREFILL[0], {"role": "assistant", "content": " "}], {"continue_final_message": True}),
    ],
)
def test_what_cannot_be_continued(messages: list[dict[str, Any]], fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as failure:
        rendered(messages, **fields)
    assert failure.value.param == "continue_final_message"


VARIABLE_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if enable_thinking %}<think>{% endif %}"
)


def test_variables_reach_the_template_that_knows_them() -> None:
    messages = [{"role": "user", "content": "x"}]
    on = rendered(messages, VARIABLE_TEMPLATE, chat_template_kwargs={"enable_thinking": True})
    assert (on, rendered(messages, VARIABLE_TEMPLATE)) == ("x<think>", "x")


@pytest.mark.parametrize("name", ["thinking", "messages", "chat_template", "tokenize"])
def test_variables_that_the_template_does_not_know_are_refused(name: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(InvalidRequest, match=name):
        rendered(messages, VARIABLE_TEMPLATE, chat_template_kwargs={name: True})


def test_a_model_without_a_template() -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]}).encode()
    messages = parse_chat_request(body).messages
    with pytest.raises(InvalidRequest, match="no chat template"):
        make_tokenizer(None).chat_template.apply(Conversation(messages))


@pytest.mark.parametrize("arguments", ["", "{}"])
def test_empty_arguments(arguments: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    assert '"arguments": {}' in rendered([{"role": "assistant", "tool_calls": [call]}])


@pytest.mark.parametrize("arguments", ["nope", "[1]", '"x"', "{"])
def test_arguments_that_are_no_object(arguments: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    error = refused([{"role": "assistant", "tool_calls": [call]}], models.TOOL_CHAT_TEMPLATE)
    assert error.param == "messages[0].tool_calls[0].function.arguments"


def test_arguments_nested_too_deeply_for_the_template() -> None:
    def render(_: list[dict[str, Any]], __: Conversation) -> str:
        raise RecursionError

    with pytest.raises(InvalidRequest, match="nested too deeply"):
        ChatTemplate(render, "a template").apply(Conversation([UserMessage("x")]))


def test_the_next_turn_begins_with_the_whole_of_this_turns_prompt() -> None:
    """Over HTTP: null, absent and empty content count alike, and the next turn hits it all."""
    with serving(card=make_card()) as served, served.client() as client:

        def usage(messages: list[dict[str, Any]]) -> dict[str, Any]:
            body = {"model": MODEL_NAME, "messages": messages, "max_tokens": 1}
            response = client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            found: dict[str, Any] = response.json()["usage"]
            return found

        counts = {
            usage(ferry_conversation(**assistant))["prompt_tokens"]
            for assistant in ({"content": None}, {}, {"content": ""})
        }
        assert len(counts) == 1
        longer = [
            *ferry_conversation(content=None),
            {"role": "assistant", "content": "No."},
            {"role": "user", "content": "Thanks."},
        ]
        cached = usage(longer)["prompt_tokens_details"]["cached_tokens"]
        assert cached >= counts.pop()


def test_the_proof_takes_time_in_the_length_of_the_conversation_alone() -> None:
    def render(messages: list[dict[str, Any]], _: Conversation) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)

    messages = [UserMessage("a")] * 40_000
    started = time.perf_counter()
    assert ChatTemplate(render, "a template").apply(Conversation(messages)) == "<user>a" * 40_000
    assert time.perf_counter() - started < 5  # a search from the start for each takes 20 s
