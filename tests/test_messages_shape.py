"""Which events build a message, and what of its prompt counts as newly cached."""

from __future__ import annotations

import json

import pytest

from service.errors import Overloaded
from service.schemas.message_bodies import CacheCreation
from service.shapes.base import AnswerIdentity
from service.shapes.messages import CachedPrefixes, MessagesShape
from tests.message_kit import answer_of, events_of_answer, whole_of_answer

IDENTITY = AnswerIdentity("msg-abc", 1_700_000_000, "tiny", "fp_1")
SAID = ["I ", "look.", '[look {"at":', '] "it"}', "[wait {}", "Done."]


def shape(prefixes: CachedPrefixes | None = None, max_tokens: int = 100) -> MessagesShape:
    return MessagesShape(IDENTITY, prefixes or CachedPrefixes(), max_tokens)


def test_texts_and_calls_are_blocks_in_their_order() -> None:
    body = whole_of_answer(answer_of(shape(), SAID))
    assert body["content"] == [
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "call_0", "name": "look", "input": {"at": "it"}},
        {"type": "tool_use", "id": "call_1", "name": "wait", "input": {}},
        {"type": "text", "text": "Done."},
    ]
    assert body["stop_reason"] == "tool_use"


def test_a_stream_opens_and_closes_each_block() -> None:
    start, ping, *blocks, end, stop = events_of_answer(answer_of(shape(), SAID))
    assert [start["type"], ping, stop] == [
        "message_start",
        {"type": "ping"},
        {"type": "message_stop"},
    ]
    assert [(event["type"], event["index"]) for event in blocks] == [
        ("content_block_start", 0),
        *[("content_block_delta", 0)] * 2,
        ("content_block_stop", 0),
        ("content_block_start", 1),
        *[("content_block_delta", 1)] * 2,
        ("content_block_stop", 1),
        ("content_block_start", 2),
        ("content_block_delta", 2),
        ("content_block_stop", 2),
        ("content_block_start", 3),
        ("content_block_delta", 3),
        ("content_block_stop", 3),
    ]
    assert blocks[4]["content_block"] == {
        "type": "tool_use",
        "id": "call_0",
        "name": "look",
        "input": {},
    }
    pieces = [event["delta"] for event in blocks if event.get("index") == 1 and "delta" in event]
    assert [piece["type"] for piece in pieces] == ["input_json_delta"] * 2
    assert json.loads("".join(piece["partial_json"] for piece in pieces)) == {"at": "it"}
    assert end["delta"]["stop_reason"] == "tool_use"


def test_a_call_that_was_cut_has_no_input() -> None:
    body = whole_of_answer(answer_of(shape(max_tokens=1), ['[look {"at":'], "length"))
    assert body["content"][0]["input"] == {}
    assert body["stop_reason"] == "max_tokens"


def test_a_failure_has_the_requests_id() -> None:
    (event,) = shape().failure(Overloaded("Too much."))
    assert event.name == "error"
    assert json.loads(event.data) == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "Too much."},
        "request_id": "abc",
    }


@pytest.mark.parametrize(
    ("hour", "minutes", "cached", "created"),
    [
        (0, 0, 0, (0, 0)),
        (0, 8, 0, (8, 0)),
        (0, 8, 5, (3, 0)),
        (0, 8, 9, (0, 0)),
        (6, 8, 0, (2, 6)),
        (6, 8, 4, (2, 2)),
        (6, 8, 7, (1, 0)),
        (6, 0, 2, (0, 4)),
        (8, 6, 0, (0, 8)),
    ],
)
def test_what_is_created(hour: int, minutes: int, cached: int, created: tuple[int, int]) -> None:
    assert CachedPrefixes(hour, minutes).creation(cached) == CacheCreation(*created)


def test_the_three_kinds_of_input_are_the_prompt() -> None:
    start = events_of_answer(answer_of(shape(CachedPrefixes(0, 7)), ["x"]))[0]
    usage = start["message"]["usage"]
    assert usage["cache_read_input_tokens"] == 4
    assert usage["cache_creation_input_tokens"] == 3
    assert usage["input_tokens"] == 3
