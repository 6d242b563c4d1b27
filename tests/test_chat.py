"""The terminal chat's figures: what the server says of a turn is what is printed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from service.chat import ChatClient, ChatError, TurnStats
from service.config import ChatConfig

CHAT = ChatConfig(url="http://here", model="m")


def answering(*events: dict[str, Any]) -> ChatClient:
    """A client of a server that streams these."""
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=text))
    return ChatClient(CHAT, httpx.Client(transport=transport))


def said(text: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}}]}


def test_a_turn_has_the_usage_of_its_stream() -> None:
    details = {
        "cached_tokens": 30,
        "cached_tokens_by_tier": {"device": 5, "host": 20, "disk": 5},
    }
    usage = {"prompt_tokens": 40, "completion_tokens": 2, "prompt_tokens_details": details}
    client = answering(said("Hel"), said("lo"), {"choices": [], "usage": usage})
    assert "".join(client.answer("m", [])) == "Hello"
    stats = client.stats
    assert stats is not None
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_output_tokens) == (
        40,
        30,
        2,
    )
    assert (stats.num_host_tokens, stats.num_disk_tokens) == (20, 5)
    assert stats.ttft_s is not None
    assert 0 < stats.ttft_s <= stats.total_s


def test_a_server_that_tells_no_tiers_is_fine() -> None:
    usage = {"prompt_tokens": 4, "completion_tokens": 1}
    client = answering(said("x"), {"choices": [], "usage": usage})
    assert list(client.answer("m", [])) == ["x"]
    assert client.stats is not None
    assert client.stats.line().startswith("0 of 4 prompt tokens cached · first token after ")


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({}, "30 of 40 prompt tokens cached"),
        (
            {"num_host_tokens": 20, "num_disk_tokens": 5, "ttft_s": 0.25, "num_output_tokens": 11},
            "30 of 40 prompt tokens cached (20 from host memory, 5 from disk) · first token after "
            "0.25 s · 5.7 tokens/s",
        ),
        ({"num_disk_tokens": 30}, "30 of 40 prompt tokens cached (30 from disk)"),
    ],
)
def test_the_line_of_a_turn(fields: dict[str, Any], line: str) -> None:
    known = {
        "num_prompt_tokens": 40,
        "num_cached_tokens": 30,
        "num_output_tokens": 1,
        "ttft_s": None,
        "total_s": 2.0,
    }
    assert TurnStats(**(known | fields)).line() == line


def test_an_error_within_the_stream_is_told() -> None:
    client = answering(said("x"), {"error": {"message": "The worker was lost."}})
    with pytest.raises(ChatError, match=r"^The worker was lost"):
        list(client.answer("m", []))
    assert client.stats is None
