"""Anthropic's own client against the gateway, over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import anthropic
import pytest

from tests.gateway_kit import MODEL_NAME
from tests.session_kit import Talk, talking

KEY = "sk-test"


@pytest.fixture(scope="module")
def talk() -> Iterator[Talk]:
    with talking(api_keys=(KEY,)) as started:
        yield started


@pytest.fixture(scope="module")
def client(talk: Talk) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=talk.served.base_url, api_key=KEY, max_retries=0, timeout=20.0
    ) as made:
        yield made


def ask(text: str) -> list[anthropic.types.MessageParam]:
    return [{"role": "user", "content": text}]


def test_a_message(talk: Talk, client: anthropic.Anthropic) -> None:
    talk.answers = ["Lisbon."]
    message = client.messages.create(
        model=MODEL_NAME,
        max_tokens=30,
        system=[
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        ],
        messages=ask("Name a city."),
        metadata={"user_id": "u1"},
    )
    (block,) = message.content
    assert block.type == "text"
    assert block.text == "Lisbon."
    assert message.stop_reason == "end_turn"
    usage = message.usage
    assert usage.cache_read_input_tokens is not None
    assert usage.cache_creation_input_tokens is not None
    total = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    assert total == len(talk.prompts[-1])
    assert message._request_id == message.id.removeprefix("msg_")
    counted = client.messages.count_tokens(
        model=MODEL_NAME, system="Be brief.", messages=ask("Name a city.")
    )
    assert counted.input_tokens == total


def test_an_answer_goes_back_as_it_came(talk: Talk, client: anthropic.Anthropic) -> None:
    talk.answers = ["One.", "Two."]
    session = {"X-Session-ID": "client"}
    first = client.messages.create(
        model=MODEL_NAME, max_tokens=30, messages=ask("Count."), extra_headers=session
    )
    messages: list[anthropic.types.MessageParam] = [
        *ask("Count."),
        {"role": "assistant", "content": first.content},
        *ask("Go on."),
    ]
    response = client.messages.with_raw_response.create(
        model=MODEL_NAME, max_tokens=30, messages=messages, extra_headers=session
    )
    assert response.headers["x-session-history"] == "exact"


def test_a_stream(talk: Talk, client: anthropic.Anthropic) -> None:
    talk.answers = ["Hello there."]
    with client.messages.stream(
        model=MODEL_NAME, max_tokens=30, messages=ask("Hi"), stop_sequences=["there"]
    ) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == "Hello "
    assert message.content[0].type == "text"
    assert message.content[0].text == text
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "there")
    assert message.usage.output_tokens > 0


def test_the_asynchronous_client(talk: Talk) -> None:
    talk.answers = ["One", "Two"]

    async def run() -> tuple[str, list[str]]:
        async with anthropic.AsyncAnthropic(
            base_url=talk.served.base_url, api_key=KEY, max_retries=0, timeout=20.0
        ) as client:
            message = await client.messages.create(
                model=MODEL_NAME, max_tokens=30, messages=ask("Hi")
            )
            assert message.content[0].type == "text"
            events = [
                event.type
                async for event in await client.messages.create(
                    model=MODEL_NAME, max_tokens=30, messages=ask("Hi"), stream=True
                )
            ]
            return message.content[0].text, events

    text, events = asyncio.run(run())
    assert text == "One"
    assert events[0] == "message_start"
    assert events[-2:] == ["message_delta", "message_stop"]


def test_models(client: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list()] == [MODEL_NAME]
    assert client.models.retrieve(MODEL_NAME).type == "model"
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("other")


def test_errors_are_typed(talk: Talk, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature") as refused:
        client.messages.create(
            model=MODEL_NAME, max_tokens=30, messages=ask("Hi"), extra_body={"temperature": 2}
        )
    assert refused.value.request_id
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=30, messages=ask("Hi"))
    wrong = client.with_options(api_key="wrong")
    with pytest.raises(anthropic.AuthenticationError):
        wrong.messages.create(model=MODEL_NAME, max_tokens=30, messages=ask("Hi"))
