"""Clients that people build with, over real HTTP: each chats, streams, calls tools and reads
structured answers. Those of OpenAI and Anthropic themselves are in the tests of their APIs.

Each is imported by what uses it: all the processes that tests run in collect this file, which took
a tenth of their start, and one of them runs it.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydantic
import pytest

from tests.gateway_kit import MODEL_NAME
from tests.session_kit import Talk, talking

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI
    from pydantic_ai import Agent

# How these libraries end the connections that they keep is not ours to hold.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Cork"}}</tool_call>'
CITY = '{"name": "Cork", "people": 224000}'
TEXT = "The sky is clear."


class City(pydantic.BaseModel):
    name: str
    people: int


def weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


@pytest.fixture(scope="module")
def server() -> Iterator[Talk]:
    with talking() as talk:
        yield talk
    with warnings.catch_warnings():  # those that are still open would be told of in other tests
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def talk(server: Talk) -> Talk:
    server.answers.clear()
    server.requests.clear()
    return server


# ---------------------------------------------------------------- langchain-openai


@pytest.fixture
def langchain(talk: Talk) -> ChatOpenAI:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model=MODEL_NAME,
        base_url=f"{talk.served.base_url}/v1",
        api_key=pydantic.SecretStr("none"),
        temperature=0,
        max_retries=0,
        stream_usage=True,
    )


def test_langchain_chats_and_counts(talk: Talk, langchain: ChatOpenAI) -> None:
    talk.answers.append(TEXT)
    said = langchain.invoke([("system", "Be brief."), ("user", "Sky?")])
    assert said.text == TEXT
    usage = said.usage_metadata
    assert usage is not None
    assert usage["output_tokens"] == len(TEXT) + 1
    assert usage["input_token_details"]["cache_read"] >= 0
    assert talk.requests[0].sampling_params.temperature == 0


def test_langchain_streams(talk: Talk, langchain: ChatOpenAI) -> None:
    talk.answers.append(TEXT)
    chunks = list(langchain.stream("Sky?"))
    assert len(chunks) > 3
    assert "".join(chunk.text for chunk in chunks) == TEXT
    assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) > 0


@pytest.mark.parametrize("streams", [False, True])
def test_langchain_calls_a_tool_and_says_what_came_of_it(
    talk: Talk, langchain: ChatOpenAI, streams: bool
) -> None:
    from langchain_core.tools import tool

    talk.answers += [CALL, TEXT]
    able = langchain.bind_tools([tool(weather)])
    asked: Any = None
    if streams:
        for chunk in able.stream("Rain?"):
            asked = chunk if asked is None else asked + chunk
    else:
        asked = able.invoke("Rain?")
    (call,) = asked.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Cork"})
    said = able.invoke([("user", "Rain?"), asked, tool(weather).invoke(call)])
    assert said.text == TEXT
    assert "rain in Cork" in talk.text_of(1)


def test_langchain_reads_a_structured_answer(talk: Talk, langchain: ChatOpenAI) -> None:
    talk.answers.append(CITY)
    found = langchain.with_structured_output(City, method="json_schema").invoke("A city?")
    assert found == City(name="Cork", people=224000)
    grammar = talk.requests[0].sampling_params.grammar
    assert grammar is not None
    assert "people" in grammar.text


# ---------------------------------------------------------------- pydantic-ai


@pytest.fixture
async def agent(talk: Talk) -> AsyncIterator[Callable[..., Agent[None, Any]]]:
    import httpx2
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async with httpx2.AsyncClient(timeout=20.0) as client:
        provider = OpenAIProvider(
            base_url=f"{talk.served.base_url}/v1", api_key="none", http_client=client
        )
        model = OpenAIChatModel(MODEL_NAME, provider=provider)
        yield lambda **options: Agent(model, **options)


MakeAgent = Callable[..., "Agent[None, Any]"]


async def test_pydantic_ai_chats_and_streams(talk: Talk, agent: MakeAgent) -> None:
    talk.answers += [TEXT, TEXT]
    asked = agent(instructions="Be brief.")
    result = await asked.run("Sky?")
    assert result.output == TEXT
    async with asked.run_stream("Again?", message_history=result.all_messages()) as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
    assert "".join(pieces) == TEXT
    assert TEXT in talk.text_of(1)


async def test_pydantic_ai_calls_a_tool(talk: Talk, agent: MakeAgent) -> None:
    talk.answers += [CALL, TEXT]
    asked = agent()
    cities = []

    @asked.tool_plain(name="weather")
    def of(city: str) -> str:
        cities.append(city)
        return f"rain in {city}"

    assert (await asked.run("Rain?")).output == TEXT
    assert cities == ["Cork"]
    assert "rain in Cork" in talk.text_of(1)


async def test_pydantic_ai_reads_a_structured_answer(talk: Talk, agent: MakeAgent) -> None:
    from pydantic_ai.output import NativeOutput

    talk.answers.append(CITY)
    found = await agent(output_type=NativeOutput(City)).run("A city?")
    assert found.output == City(name="Cork", people=224000)


# ---------------------------------------------------------------- llm


@pytest.fixture
def chat_model(talk: Talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from llm.default_plugins import openai_models as llm_openai

    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    model = llm_openai.Chat(
        model_id=MODEL_NAME,
        model_name=MODEL_NAME,
        api_base=f"{talk.served.base_url}/v1",
        supports_tools=True,
        supports_schema=True,
    )
    model.key = "none"
    return model


@pytest.mark.parametrize("streams", [False, True])
def test_llm_talks_on(talk: Talk, chat_model: Any, streams: bool) -> None:
    talk.answers += [TEXT, "Yes."]
    conversation = chat_model.conversation()
    assert conversation.prompt("Sky?", stream=streams).text() == TEXT
    assert conversation.prompt("Sure?", stream=streams).text() == "Yes."
    assert TEXT in talk.text_of(1)


def test_llm_calls_a_tool(talk: Talk, chat_model: Any) -> None:
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"rain in {city}"

    talk.answers += [CALL, TEXT]
    assert chat_model.chain("Rain?", tools=[weather]).text().endswith(TEXT)
    assert "rain in Cork" in talk.text_of(1)


def test_llm_reads_a_structured_answer(talk: Talk, chat_model: Any) -> None:
    talk.answers.append(CITY)
    answered = chat_model.prompt("A city?", schema=City)
    assert City.model_validate_json(answered.text()) == City(name="Cork", people=224000)
