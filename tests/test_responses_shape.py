"""Which events build a response with calls and with scores."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest

from service.answer_text import ScoredToken, TextEvent
from service.answers import Answer, ChoiceSource
from service.deltas import PlainReader
from service.errors import InternalError, Overloaded
from service.schemas.responses import ResponsesRequest
from service.shapes.base import AnswerIdentity
from service.shapes.responses import ResponsesShape
from tests.gateway_kit import byte_ids_of, make_tokenizer
from tests.message_kit import answer_of, events_of_answer, whole_of_answer

IDENTITY = AnswerIdentity("resp-abc", 1_700_000_000, "tiny", "fp_1")
SAID = ["I ", "look.", '[look {"at":', '] "it"}', "[wait {}", "Done."]


def shape(**fields: Any) -> ResponsesShape:
    asked = msgspec.convert({"model": "tiny", "input": "Hi", **fields}, ResponsesRequest)
    return ResponsesShape(IDENTITY, asked, make_tokenizer().vocabulary, is_stored=True)


def without_times(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if not name.endswith("_at")}


def test_texts_and_calls_are_items_in_their_order() -> None:
    body = whole_of_answer(answer_of(shape(), SAID))
    assert [(item["type"], item["id"], item["status"]) for item in body["output"]] == [
        ("message", "msg_abc_0", "completed"),
        ("function_call", "fc_abc_1", "completed"),
        ("function_call", "fc_abc_2", "completed"),
        ("message", "msg_abc_3", "completed"),
    ]
    assert body["output"][0]["content"][0]["text"] == "I look."
    assert body["output"][1]["call_id"] == "call_0"
    assert body["output"][1]["name"] == "look"
    assert json.loads(body["output"][1]["arguments"]) == {"at": "it"}
    assert body["output"][3]["content"][0]["text"] == "Done."


def test_a_stream_adds_and_ends_each_item() -> None:
    whole = whole_of_answer(answer_of(shape(), SAID))
    events = events_of_answer(answer_of(shape(), SAID))
    said = [
        (event["type"].removeprefix("response."), event.get("output_index")) for event in events
    ]
    text = ("output_text.delta", "output_text.done", "content_part.done")
    calls = ("function_call_arguments.delta", "function_call_arguments.done")
    assert said == [
        *(("created", None), ("in_progress", None)),
        *(("output_item.added", 0), ("content_part.added", 0)),
        *((name, 0) for name in (text[0], *text, "output_item.done")),
        ("output_item.added", 1),
        *((name, 1) for name in (calls[0], *calls, "output_item.done")),
        ("output_item.added", 2),
        *((name, 2) for name in (*calls, "output_item.done")),
        *(("output_item.added", 3), ("content_part.added", 3)),
        *((name, 3) for name in (*text, "output_item.done")),
        ("completed", None),
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    ended = [event["item"] for event in events if event["type"].endswith("output_item.done")]
    assert ended == whole["output"]
    assert without_times(events[-1]["response"]) == without_times(whole)
    added = next(event["item"] for event in events if event.get("output_index") == 1)
    assert (added["arguments"], added["status"]) == ("", "in_progress")


def test_a_call_that_is_cut_is_incomplete() -> None:
    (item,) = whole_of_answer(answer_of(shape(), ['[look {"at":'], "length"))["output"]
    assert (item["status"], item["arguments"]) == ("incomplete", '{"at":')
    *_, done, last = events_of_answer(answer_of(shape(), ['[look {"at":'], "length"))
    assert done["item"] == item
    assert last["type"] == "response.incomplete"


def test_the_scores_of_a_text() -> None:
    first, second = byte_ids_of("ab")
    scores = [
        ScoredToken(first, -0.5, ((first, -0.5), (second, -1.5)), 0, 1),
        ScoredToken(second, -0.25, ((second, -0.25), (first, -2.0)), 1, 2),
    ]

    async def said() -> AsyncGenerator[TextEvent, None]:
        yield TextEvent("a", 1, 0, scores=(scores[0],))
        yield TextEvent("b", 2, 0, "stop", scores=(scores[1],))

    def answer(**fields: Any) -> Answer:
        return Answer(shape(**fields), [ChoiceSource(said(), PlainReader())], [3])

    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = whole_of_answer(answer(**asked))["output"][0]["content"][0]["logprobs"]
    assert [(item["token"], item["logprob"]) for item in whole] == [("a", -0.5), ("b", -0.25)]
    assert [item["token"] for item in whole[0]["top_logprobs"]] == ["a", "b"]
    events = events_of_answer(answer(**asked))
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [event["logprobs"] for event in deltas] == [whole[:1], whole[1:]]
    done = next(event for event in events if event["type"] == "response.output_text.done")
    assert done["logprobs"] == whole
    plain = whole_of_answer(answer())["output"][0]["content"][0]
    assert plain["logprobs"] == []


@pytest.mark.parametrize(
    ("error", "code"),
    [(InternalError("It broke."), "server_error"), (Overloaded("Full."), "rate_limit_exceeded")],
)
def test_a_failure_is_an_error_and_a_failed_response(error: InternalError, code: str) -> None:
    made = shape()
    events = [json.loads(event.data) for event in made.failure(error)]
    assert [event["type"] for event in events] == ["error", "response.failed"]
    assert [event["sequence_number"] for event in events] == [0, 1]
    assert events[0]["message"] == error.message
    body = events[1]["response"]
    assert body["error"] == {"code": code, "message": error.message}
    assert (body["status"], body["store"]) == ("failed", False)


def test_what_is_done_before_the_end_can_change_it() -> None:
    made = shape()

    async def unstore(*_: object) -> None:
        made.is_stored = False

    async def said() -> AsyncGenerator[TextEvent, None]:
        yield TextEvent("a", 1, 0, "stop")

    answer = Answer(made, [ChoiceSource(said(), PlainReader())], [3], unstore)
    body = json.loads(asyncio.run(answer.whole()))
    assert body["store"] is False
