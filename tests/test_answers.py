"""Events to bodies: the whole answer is the fold of the chunks, whatever the order of choices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.answer_text import ScoredToken, TextEvent
from service.answers import Answer, ChoiceSource
from service.deltas import Delta, PlainReader, TextDelta, ToolCallDelta
from service.errors import InvalidRequest
from service.shapes.base import AnswerIdentity
from service.shapes.chat import ChatShape
from service.shapes.completion import CompletionShape
from service.stream_usage import StreamUsage
from service.vocabulary import Vocabulary
from tests.gateway_kit import make_tokenizer

IDENTITY = AnswerIdentity("cmpl-1", 1_700_000_000, "tiny", "fp_1")


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return make_tokenizer().vocabulary


async def choice(pieces: list[str], cached: int = 0) -> AsyncGenerator[TextEvent, None]:
    for index, piece in enumerate(pieces):
        await asyncio.sleep(0)
        yield TextEvent(piece, index + 1, cached)
    yield TextEvent("", len(pieces), cached, "length")


def whole(answer: Answer) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(asyncio.run(answer.whole()))
    return body


def chunks(answer: Answer) -> list[dict[str, Any]]:
    async def collect() -> list[bytes]:
        return [event.data async for event in answer.events()]

    *given_out, done = asyncio.run(collect())
    assert done == b"[DONE]"
    return [json.loads(chunk) for chunk in given_out]


def plain(events: AsyncGenerator[TextEvent, None], prompt: int = 0, prefix: str = "") -> Any:
    return ChoiceSource(events, PlainReader(), prompt, prefix)


@given(st.lists(st.lists(st.text(max_size=3), max_size=4), min_size=1, max_size=4))
@settings(max_examples=50, deadline=None)
def test_chunks_fold_to_the_whole(texts: list[list[str]]) -> None:
    vocabulary = make_tokenizer().vocabulary

    def answer() -> Answer:
        shape = CompletionShape(IDENTITY, vocabulary, StreamUsage.LAST)
        sources = [plain(choice(text), at, f"{at}:") for at, text in enumerate(texts)]
        return Answer(shape, sources, [3] * len(texts))

    body = whole(answer())
    *given_out, last = chunks(answer())
    for index, text in enumerate(texts):
        mine = [part for chunk in given_out for part in chunk["choices"] if part["index"] == index]
        joined = "".join(part["text"] for part in mine)
        assert joined == body["choices"][index]["text"] == f"{index}:" + "".join(text)
        assert [part["finish_reason"] for part in mine].count("length") == 1
        assert mine[-1]["finish_reason"] == "length"
    assert last["choices"] == []
    assert last["usage"] == body["usage"]
    assert body["usage"]["prompt_tokens"] == 3 * len(texts)


def test_a_chat_opens_with_the_role(vocabulary: Vocabulary) -> None:
    answer = Answer(ChatShape(IDENTITY, vocabulary), [plain(choice(["hi"]))], [1])
    first, second, last = chunks(answer)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert second["choices"][0]["delta"] == {"content": "hi"}
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "length"
    assert all("usage" not in chunk for chunk in (first, second, last))


def test_cached_tokens_are_the_sum_over_prompts(vocabulary: Vocabulary) -> None:
    sources = [plain(choice(["a"], 16), 0), plain(choice(["b"], 0), 1)]
    answer = Answer(CompletionShape(IDENTITY, vocabulary), sources, [20, 20])
    assert answer.num_cached_tokens is None
    assert whole(answer)["usage"] == {
        "prompt_tokens": 40,
        "completion_tokens": 2,
        "total_tokens": 42,
        "prompt_tokens_details": {
            "cached_tokens": 16,
            "cached_tokens_by_tier": {"device": 16, "host": 0, "disk": 0},
        },
    }
    assert answer.num_cached_tokens == 16


def test_a_prompt_with_several_choices_counts_once(vocabulary: Vocabulary) -> None:
    """And its cached tokens are those of the first: the others find what that one computed."""
    cached = [0, 19, 19, 7, 19]
    prompts = [0, 0, 0, 1, 1]
    sources = [plain(choice(["a"], n), at) for n, at in zip(cached, prompts, strict=True)]
    answer = Answer(ChatShape(IDENTITY, vocabulary), sources, [20, 30])
    body = whole(answer)
    assert [item["index"] for item in body["choices"]] == [0, 1, 2, 3, 4]
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (50, 5)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 7


class UpperAsCalls:
    """Reads capital letters as calls of tools of that name, with the argument {}."""

    def __init__(self) -> None:
        self._num_calls = 0

    def push(self, text: str, scores: tuple[ScoredToken, ...]) -> Sequence[Delta]:
        deltas: list[Delta] = []
        for char in text:
            if not char.isupper():
                deltas.append(TextDelta(char))
                continue
            deltas.append(ToolCallDelta(self._num_calls, "", f"call_{char}", char))
            deltas.append(ToolCallDelta(self._num_calls, "{}"))
            self._num_calls += 1
        return deltas

    def finish(self) -> Sequence[Delta]:
        return (TextDelta("."),)


async def stopping(*pieces: str) -> AsyncGenerator[TextEvent, None]:
    yield TextEvent("", 0, 5)  # admitted
    for index, piece in enumerate(pieces):
        yield TextEvent(piece, index + 1, 5)
    yield TextEvent("", len(pieces), 5, "stop")


def test_calls_are_streamed_in_pieces_and_end_the_answer(vocabulary: Vocabulary) -> None:
    def answer(*pieces: str) -> Answer:
        source = ChoiceSource(stopping(*pieces), UpperAsCalls())
        return Answer(ChatShape(IDENTITY, vocabulary), [source], [9])

    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(answer("aB", "C"))]
    assert deltas[:2] == [{"role": "assistant", "content": ""}, {"content": "a"}]
    begun = {"index": 0, "function": {"name": "B", "arguments": ""}}
    assert deltas[2] == {"tool_calls": [begun | {"id": "call_B", "type": "function"}]}
    assert deltas[3] == {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}
    assert deltas[4]["tool_calls"][0]["index"] == 1
    assert deltas[-2:] == [{"content": "."}, {}]
    body = whole(answer("aB", "C"))["choices"][0]
    assert body["finish_reason"] == "tool_calls"
    assert body["message"]["content"] == "a."
    assert [call["function"] for call in body["message"]["tool_calls"]] == [
        {"name": "B", "arguments": "{}"},
        {"name": "C", "arguments": "{}"},
    ]
    assert whole(answer("a"))["choices"][0]["finish_reason"] == "stop"


def test_an_admission_opens_the_stream_before_any_text(vocabulary: Vocabulary) -> None:
    async def first_event() -> tuple[bytes, int | None]:
        answer = Answer(ChatShape(IDENTITY, vocabulary), [plain(stopping("a"))], [9])
        events = answer.events()
        event = await anext(events)
        await events.aclose()
        return event.data, answer.num_cached_tokens

    data, num_cached = asyncio.run(first_event())
    assert json.loads(data)["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert num_cached == 5


def test_the_failure_of_one_choice_closes_the_others(vocabulary: Vocabulary) -> None:
    closed: list[int] = []

    async def failing() -> AsyncGenerator[TextEvent, None]:
        yield TextEvent("a", 1, 0)
        raise InvalidRequest("no")

    async def endless() -> AsyncGenerator[TextEvent, None]:
        try:
            while True:
                await asyncio.sleep(0)
                yield TextEvent("b", 1, 0)
        finally:
            closed.append(1)

    async def run() -> None:
        shape = CompletionShape(IDENTITY, vocabulary)
        sources = [plain(events) for events in (endless(), failing(), endless())]
        await Answer(shape, sources, [1]).whole()

    with pytest.raises(InvalidRequest):
        asyncio.run(run())
    assert closed == [1, 1]
