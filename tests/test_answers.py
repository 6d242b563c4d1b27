"""Events to bodies: the whole answer is the fold of the chunks, whatever the order of choices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.answers import Answer, AnswerIdentity, ChatShape, CompletionShape
from service.errors import InvalidRequest
from service.generation import TextEvent

IDENTITY = AnswerIdentity("cmpl-1", 1_700_000_000, "tiny", "fp_1")


async def choice(pieces: list[str], cached: int = 0) -> AsyncGenerator[TextEvent, None]:
    for index, piece in enumerate(pieces):
        await asyncio.sleep(0)
        yield TextEvent(piece, index + 1, cached)
    yield TextEvent("", len(pieces), cached, "length")


def whole(answer: Answer) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(asyncio.run(answer.whole()))
    return body


def chunks(answer: Answer, **options: bool) -> list[dict[str, Any]]:
    async def collect() -> list[bytes]:
        return [chunk async for chunk in answer.chunks(**options)]

    return [json.loads(chunk) for chunk in asyncio.run(collect())]


@given(st.lists(st.lists(st.text(max_size=3), max_size=4), min_size=1, max_size=4))
@settings(max_examples=50, deadline=None)
def test_chunks_fold_to_the_whole(texts: list[list[str]]) -> None:
    def answer() -> Answer:
        prefixes = [f"{index}:" for index in range(len(texts))]
        shape = CompletionShape(IDENTITY, is_usage_null=True)
        return Answer(shape, [choice(text) for text in texts], [3] * len(texts), prefixes)

    body = whole(answer())
    *given_out, last = chunks(answer(), has_usage=True)
    for index, text in enumerate(texts):
        mine = [part for chunk in given_out for part in chunk["choices"] if part["index"] == index]
        joined = "".join(part["text"] for part in mine)
        assert joined == body["choices"][index]["text"] == f"{index}:" + "".join(text)
        assert [part["finish_reason"] for part in mine].count("length") == 1
        assert mine[-1]["finish_reason"] == "length"
    assert last["choices"] == []
    assert last["usage"] == body["usage"]
    assert body["usage"]["prompt_tokens"] == 3 * len(texts)


def test_a_chat_opens_with_the_role() -> None:
    first, second, last = chunks(Answer(ChatShape(IDENTITY), [choice(["hi"])], [1]))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert second["choices"][0]["delta"] == {"content": "hi"}
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "length"
    assert all("usage" not in chunk for chunk in (first, second, last))


def test_cached_tokens_are_the_sum_over_prompts() -> None:
    answer = Answer(CompletionShape(IDENTITY), [choice(["a"], 16), choice(["b"], 0)], [20, 20])
    assert whole(answer)["usage"] == {
        "prompt_tokens": 40,
        "completion_tokens": 2,
        "total_tokens": 42,
        "prompt_tokens_details": {"cached_tokens": 16},
    }


def test_the_failure_of_one_choice_closes_the_others() -> None:
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
        await Answer(CompletionShape(IDENTITY), [endless(), failing(), endless()], [1] * 3).whole()

    with pytest.raises(InvalidRequest):
        asyncio.run(run())
    assert closed == [1, 1]
