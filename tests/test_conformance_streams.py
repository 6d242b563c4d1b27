"""Streamed answers: their chunks, their usage and their end. See tests/test_conformance.py."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.http_kit import events_of
from tests.target import Target, assert_error, streamed, text_of


def test_the_chunks_of_a_stream(target: Target) -> None:
    plain = target.chat(max_tokens=20).json()
    response = target.chat(max_tokens=20, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response)
    assert events[-1] == "[DONE]"
    chunks = events[:-1]
    assert len({(chunk["id"], chunk["model"], chunk["created"]) for chunk in chunks}) == 1
    first, *rest = (chunk["choices"][0]["delta"] for chunk in chunks)
    assert first["role"] == "assistant"
    assert not first.get("content")
    assert all("role" not in delta for delta in rest)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[-1] == plain["choices"][0]["finish_reason"]
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    assert streamed(events) == text_of(plain)


def test_a_stream_of_two_prompts(target: Target) -> None:
    events = events_of(target.complete(["Once upon", "Once upon"], stream=True))
    assert streamed(events, 0) == streamed(events, 1) != ""
    finishes = [
        choice["index"]
        for event in events[:-1]
        for choice in event["choices"]
        if choice["finish_reason"] is not None
    ]
    assert sorted(finishes) == [0, 1]


@pytest.mark.parametrize("path", ["chat", "complete"])
def test_usage_in_a_stream(target: Target, path: str) -> None:
    ask = getattr(target, path)
    events = events_of(ask(stream=True, stream_options={"include_usage": True}))
    *chunks, last = events[:-1]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
    assert last["usage"]["completion_tokens"] == ask().json()["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    "options",
    [None, {}, {"include_usage": False}, {"continuous_usage_stats": True},
     {"include_usage": False, "continuous_usage_stats": True}],
)  # fmt: skip
def test_no_usage_in_a_stream_unless_asked_for(target: Target, options: Any) -> None:
    events = events_of(target.chat(stream=True, stream_options=options))
    assert all("usage" not in chunk for chunk in events[:-1])


def test_continuous_usage(target: Target) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = events_of(target.chat(stream=True, stream_options=options, max_tokens=12))
    counts = [chunk["usage"]["completion_tokens"] for chunk in events[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == target.chat(max_tokens=12).json()["usage"]["completion_tokens"]


@pytest.mark.parametrize("options", [{}, {"include_usage": None}, {"include_usage": True}])
def test_stream_options_without_stream_are_refused(target: Target, options: Any) -> None:
    assert_error(target.chat(stream_options=options), 400, param="stream_options")
    assert_error(target.chat(stream=False, stream_options=options), 400, param="stream_options")


def test_cached_tokens_in_a_stream(target: Target) -> None:
    content = f"{time.time_ns()} " + "Shelf holds jars of plum jam. " * 12
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    cold = events_of(target.chat(content, **fields))[-2]["usage"]
    warm = events_of(target.chat(content, **fields))[-2]["usage"]
    assert cold["prompt_tokens_details"]["cached_tokens"] < 0.5 * cold["prompt_tokens"]
    assert 0 < warm["prompt_tokens_details"]["cached_tokens"] < warm["prompt_tokens"]


def test_a_stream_to_the_end_of_the_context(target: Target) -> None:
    length = min(target.max_model_len, 4096)
    prompt = [50] * (length - 5)
    if length != target.max_model_len:
        pytest.skip("the context is too long to fill here")
    for stream in (False, True):
        response = target.complete(prompt, stream=stream, max_tokens=50, ignore_eos=True)
        assert response.status_code == 200
        last = events_of(response)[-2] if stream else response.json()
        assert last["choices"][0]["finish_reason"] == "length"


def test_the_official_client_streams(target: Target) -> None:
    stream = target.openai.chat.completions.create(
        model=target.model,
        messages=[{"role": "user", "content": "Count to twenty."}],
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == text_of(target.chat().json())
    assert chunks[-1].usage is not None
