"""OpenAI's own client against /v1/responses, over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

from tests.gateway_kit import MODEL_NAME
from tests.session_kit import Talk, talking


@pytest.fixture(scope="module")
def talk() -> Iterator[Talk]:
    with talking() as started:
        yield started


@pytest.fixture(scope="module")
def client(talk: Talk) -> Iterator[openai.OpenAI]:
    url = f"{talk.served.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=20.0) as made:
        yield made


def test_a_chain_of_responses(talk: Talk, client: openai.OpenAI) -> None:
    talk.answers = ["Lisbon.", "The Tagus."]
    first = client.responses.create(
        model=MODEL_NAME, instructions="Be brief.", input="Name a city.", max_output_tokens=30
    )
    assert first.output_text == "Lisbon."
    assert first.usage is not None
    assert first.usage.input_tokens == len(talk.prompts[-1])
    second = client.responses.create(
        model=MODEL_NAME,
        instructions="Be brief.",
        input=[{"role": "user", "content": "And its river?"}],
        previous_response_id=first.id,
        max_output_tokens=30,
    )
    assert second.output_text == "The Tagus."
    assert second.usage is not None
    num_served = len(talk.prompts[-2]) + len("Lisbon.") + 1
    assert second.usage.input_tokens_details.cached_tokens == num_served
    assert client.responses.retrieve(second.id) == second
    (item,) = client.responses.input_items.list(second.id)
    assert item.type == "message"
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


def test_output_goes_back_as_input(talk: Talk, client: openai.OpenAI) -> None:
    talk.answers = ["One.", "Two."]
    first = client.responses.create(model=MODEL_NAME, input="Count.", store=False)
    client.responses.create(
        model=MODEL_NAME,
        store=False,
        input=[
            {"role": "user", "content": "Count."},
            *first.output,  # type: ignore[list-item]  # as the client's documentation has it
            {"role": "user", "content": "Go on."},
        ],
    )
    assert "<|im_start|>assistant\nOne.<|im_end|>\n" in talk.text_of(-1)


def test_a_stream(talk: Talk, client: openai.OpenAI) -> None:
    talk.answers = ["Hello there."]
    with client.responses.stream(model=MODEL_NAME, input="Hi") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert final.output_text == "Hello there."


def test_the_asynchronous_client(talk: Talk) -> None:
    talk.answers = ["One", "Two"]

    async def run() -> tuple[str, str]:
        url = f"{talk.served.base_url}/v1"
        async with openai.AsyncOpenAI(
            base_url=url, api_key="none", max_retries=0, timeout=20.0
        ) as client:
            first = await client.responses.create(model=MODEL_NAME, input="Hi")
            pieces = [
                event.delta
                async for event in await client.responses.create(
                    model=MODEL_NAME, input="Hi", stream=True, previous_response_id=first.id
                )
                if event.type == "response.output_text.delta"
            ]
            return first.output_text, "".join(pieces)

    assert asyncio.run(run()) == ("One", "Two")


def test_errors_are_typed(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL_NAME, input="Hi", background=True)
    assert refused.value.param == "background"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="other", input="Hi")
    with pytest.raises(openai.BadRequestError) as missing:
        client.responses.create(model=MODEL_NAME, input="Hi", previous_response_id="resp_0")
    assert missing.value.code == "previous_response_not_found"
