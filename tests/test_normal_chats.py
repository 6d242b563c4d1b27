"""A hundred ordinary chats, of people and of agents with tools: nothing of them breaks a prefix."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from service.diagnostics.breakers import find_breakers
from service.diagnostics.explanation import Kind, Reason
from tests.diagnostics_kit import Asker, lines, said, system, user

ROOT = Path(__file__).resolve().parent.parent
QUESTIONS = ROOT / "tests" / "data" / "mt_bench_question.jsonl"
AGENTS = ROOT / "benchmarks" / "data" / "replay_tau_airline_sessions.jsonl.gz"
NUM_AGENT_CHATS = 30
POLICY_CHARS = 1000  # of six thousand: what is the same for all costs time and finds nothing
RESULT_CHARS = 400

Messages = list[dict[str, Any]]


def agent_chats() -> Iterator[Messages]:
    with gzip.open(AGENTS, "rt") as file:
        for row, _ in zip(file, range(NUM_AGENT_CHATS), strict=False):
            messages: Messages = json.loads(row)["messages"][:7]
            for message in messages:
                size = POLICY_CHARS if message["role"] == "system" else RESULT_CHARS
                message["content"] = (message.get("content") or "")[:size]
            yield messages


def people_chats() -> Iterator[Messages]:
    """Two questions and their answers; those of every other chat behind one system prompt."""
    for number, row in enumerate(QUESTIONS.read_text().splitlines()[:70]):
        first, second = json.loads(row)["turns"]
        head = [system("You are a helpful assistant. " + lines(1, 3))] if number % 2 else []
        answers = lines(1000 + number, 3), lines(2000 + number, 3)
        yield [*head, user(first), said(answers[0]), user(second), said(answers[1])]


def turns_of(chat: Messages) -> Iterator[tuple[Messages, str]]:
    """What is asked each time, and what is answered."""
    for index, message in enumerate(chat):
        if message["role"] == "assistant":
            yield chat[:index], message.get("content") or ""


def play(asker: Asker, chats: Sequence[Messages], *, has_sessions: bool) -> None:
    """The first turns of all of them, then the second ones: as many people chat at once."""
    under_way = [(f"s{number}", turns_of(chat)) for number, chat in enumerate(chats)]
    while under_way:
        for session, turns in tuple(under_way):
            turn = next(turns, None)
            if turn is None:
                under_way.remove((session, turns))
                continue
            asker.ask(turn[0], answer=turn[1], session=session if has_sessions else "")


@pytest.mark.parametrize("has_sessions", [True, False], ids=["sessions", "no sessions"])
def test_a_hundred_chats_break_no_prefix(has_sessions: bool) -> None:
    asker = Asker()
    chats = [*agent_chats(), *people_chats()]
    assert len(chats) == 100
    play(asker, chats, has_sessions=has_sessions)
    told = [asker.analyst.explanations[trace.number] for trace in asker.traces]
    assert len(told) > 200
    assert {each.reason for each in told} <= {Reason.HIT, Reason.COLD}
    assert sum(each.reason is Reason.HIT for each in told) > len(told) / 2
    assert find_breakers(zip(asker.traces, told, strict=True)) == []


def test_a_timestamp_in_the_same_chats_is_found() -> None:
    asker = Asker()
    for number, chat in enumerate(list(people_chats())[1:20:2]):
        chat[0] = system(f"It is 12:{number:02}.\n" + chat[0]["content"])
        asker.ask(chat[:2])
    told = [asker.analyst.explanations[trace.number] for trace in asker.traces]
    (found,) = find_breakers(zip(asker.traces, told, strict=True))
    assert (found.kind, found.field, found.num_requests) == (Kind.CLOCK, "messages[0].content", 9)
    assert found.num_lost_tokens == sum(each.num_lost_tokens for each in told) > 900
    assert found.share == 0.9
    assert found.suggestion == (
        "move the date or time in messages[0].content behind the static part, or into the last "
        f"message: +{found.tokens_per_request:,} tokens per request"
    )
