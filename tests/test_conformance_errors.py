"""Bad input and limits: what is refused, by which name, and that the server lives on. See
tests/test_conformance.py."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.target import Target, assert_error, text_of, wait_until_idle


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ("hello", "messages"),
        ([], "messages"),
        ([123], "messages[0]"),
        ([{}], "messages[0].role"),
        ([{"role": 5, "content": "x"}], "messages[0].role"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
        ),
        ([{"role": "user", "content": "x", "colour": "red"}], "messages[0].colour"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
    ],
)
def test_bad_messages_are_refused_by_path(target: Target, messages: Any, param: str) -> None:
    assert_error(target.chat(messages=messages), 400, param=param)


def test_two_assistant_messages_at_the_end_are_completed_turns(target: Target) -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "assistant", "content": "Anything else?"},
    ]
    response = target.chat(messages=messages)
    assert response.status_code in (200, 400)
    assert ("error" in response.json()) is (response.status_code == 400)


@pytest.mark.parametrize("body", ['"text"', "[1]", "7", "null", "true", "", "{", "{]", "nan"])
def test_bodies_that_are_no_object(target: Target, body: str) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        response = target.http.post(
            path, content=body, headers={"Content-Type": "application/json"}
        )
        assert_error(response, 400)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat", "complete"])
def test_prompt_over_the_context_is_400_before_any_event(
    target: Target, path: str, stream: bool
) -> None:
    limit = target.max_model_len
    text = "x7 " * (limit + 50)
    error = assert_error(getattr(target, path)(text, stream=stream), 400)
    assert error["code"] == "context_length_exceeded"
    assert str(limit) in error["message"]
    sizes = [int(number) for number in re.findall(r"\d+", error["message"])]
    assert any(size > limit for size in sizes)


def test_many_over_long_requests_at_once(target: Target) -> None:
    text = "x7 " * (target.max_model_len + 50)
    with ThreadPoolExecutor(10) as threads:
        futures = [
            threads.submit(target.chat, text if index % 2 else "short") for index in range(10)
        ]
    statuses = [future.result().status_code for future in futures]
    assert statuses == [200, 400] * 5


def test_unknown_model(target: Target) -> None:
    error = assert_error(target.chat(model="gpt-unknown"), 404, param="model")
    assert error["code"] == "model_not_found"
    assert target.model in error["message"]
    assert_error(target.chat(model=None), 400, param="model")
    with pytest.raises(openai.NotFoundError):
        target.openai.completions.create(model="gpt-unknown", prompt="x")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**70}, "seed"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 513}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [99_999_999]}, "stop_token_ids"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"logprobs": "many"}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_bad_fields_are_refused_by_name(target: Target, fields: Any, param: str) -> None:
    assert_error(target.chat(**fields), 400, param=param)
    assert_error(target.complete(**fields), 400, param=param)


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"audio": {"voice": "x"}},
        {"functions": [{"name": "f"}]},
        {"continue_final_message": True},
        {"chat_template": "{{ messages }}"},
        {"top_logprobs": 5},
    ],
)
def test_chat_fields_that_would_change_the_answer_are_refused(target: Target, fields: Any) -> None:
    assert_error(target.chat(**fields), 400, param=next(iter(fields)))


def test_harmless_fields_and_inert_values_are_accepted(target: Target) -> None:
    fields = {
        "user": "u1", "metadata": {"a": "b"}, "store": False, "service_tier": "auto",
        "prompt_cache_key": "k", "safety_identifier": "s", "parallel_tool_calls": False,
        "n": 1, "logprobs": False, "top_logprobs": None, "response_format": {"type": "text"},
        "tools": [], "tool_choice": "none", "top_k": -1, "stop": None, "logit_bias": None,
    }  # fmt: skip
    assert text_of(target.chat(**fields).json()) == text_of(target.chat().json())


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_json_does_not_know(target: Target, number: str) -> None:
    body = f'{{"model": "{target.model}", "prompt": "x", "temperature": {number}}}'
    response = target.http.post(
        "/v1/completions", content=body, headers={"Content-Type": "application/json"}
    )
    assert_error(response, 400)


@pytest.mark.parametrize("depth", [200, 100_000])
def test_deep_nesting(target: Target, depth: int) -> None:
    nested = "[" * depth + "]" * depth
    body = f'{{"model": "{target.model}", "messages": {nested}}}'
    response = target.http.post(
        "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
    )
    assert_error(response, 400)


def test_a_body_of_ten_megabytes_is_refused_with_the_limit(target: Target) -> None:
    body = json.dumps({"model": target.model, "prompt": "x" * 10_000_000}).encode()
    headers = {"Content-Type": "application/json"}

    def in_chunks() -> Iterator[bytes]:
        for start in range(0, len(body), 65_536):
            yield body[start : start + 65_536]

    for content in (body, in_chunks()):
        response = target.http.post("/v1/completions", content=content, headers=headers)
        error = assert_error(response, 413)
        assert re.search(r"limit of \d+ bytes", error["message"])
    assert target.complete().status_code == 200


@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ('"messages": [{"role": "user", "content": "fox \\ud83d"}]', "messages[0].content"),
        ('"messages": [{"role": "user", "content": "\\ude00 fox"}]', "messages[0].content"),
        ('"messages": [{"role": "user", "content": "x"}], "stop": ["\\ud83d"]', "stop[0]"),
        ('"messages": [{"role": "user", "content": "x"}], "cache_salt": "\\ud83d"', "cache_salt"),
        ('"messages": [{"role": "user", "content": "x"}], "session_id": "\\ud83d"', "session_id"),
        (
            '"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "type": "function",'
            ' "function": {"name": "\\ud83d", "arguments": "{}"}}]}]',
            "messages[0].tool_calls[0].function.name",
        ),
    ],
)
def test_lone_surrogates(target: Target, fields: str, param: str, stream: str) -> None:
    body = f'{{"model": "{target.model}", "stream": {stream}, {fields}}}'
    response = target.http.post(
        "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
    )
    assert_error(response, 400, param=param)


def test_both_spellings_of_a_character_are_the_same_prompt(target: Target) -> None:
    mark = time.time_ns()
    template = (
        '{"model": "%s", "max_tokens": 1, "messages": [{"role": "user", "content": "%s %s"}]}'
    )
    usages = []
    for spelling in ("\\ud83e\\udd8a", "🦊"):
        content = (template % (target.model, mark, spelling)).encode()
        response = target.http.post(
            "/v1/chat/completions", content=content, headers={"Content-Type": "application/json"}
        )
        usages.append(response.json()["usage"])
    assert usages[0]["prompt_tokens"] == usages[1]["prompt_tokens"]
    assert (
        usages[1]["prompt_tokens_details"]["cached_tokens"]
        > (usages[0]["prompt_tokens_details"]["cached_tokens"])
    )


def test_clients_that_leave_free_their_place(target: Target) -> None:
    fields = {"max_tokens": 2000, "ignore_eos": True, "stream": True}
    body = {"model": target.model, "prompt": "Tell the saga of the copper kettle", **fields}
    for _ in range(8):
        with target.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            for _ in range(5):
                next(lines)
    wait_until_idle(target, 3.0)
