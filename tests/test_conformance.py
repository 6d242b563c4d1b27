"""What clients rely on in an OpenAI-compatible server, over real HTTP.

By default each row is asked twice: of a gateway with a fake worker, which draws its tokens from the
prompt and the seed alone, and of `headstart serve` with a tiny model. With CONFORMANCE_URL (and
CONFORMANCE_MODEL) set, any running server is asked instead.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.gateway_kit import byte_ids_of
from tests.http_kit import events_of, metric
from tests.target import Target, assert_error, streamed, text_of, wait_until_idle

# ---------------------------------------------------------------- basics, models, health


def test_health_says_ready(target: Target) -> None:
    response = target.http.get("/health")
    assert response.status_code == 200
    assert "error" not in response.json()


def test_models_are_listed_and_found(target: Target) -> None:
    listed = [model.id for model in target.openai.models.list()]
    assert target.model in listed
    body = target.http.get("/v1/models").json()
    assert all(isinstance(entry["max_model_len"], int) for entry in body["data"])
    assert target.openai.models.retrieve(target.model).id == target.model
    error = assert_error(target.http.get("/v1/models/no-such-model"), 404)
    assert target.model in error["message"]


def test_version_is_exactly_that(target: Target) -> None:
    assert set(target.http.get("/version").json()) == {"version"}


def test_wrong_content_type_is_refused(target: Target) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert_error(target.http.post(path, data={"model": target.model}), 415)
    assert target.chat().status_code == 200


# ---------------------------------------------------------------- chat, plain


def test_a_plain_chat(target: Target) -> None:
    answer = target.openai.chat.completions.create(
        model=target.model,
        messages=[
            {"role": "system", "content": "Answer in one word."},
            {"role": "user", "content": "Colour of grass?"},
        ],
        max_tokens=8,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert "cmpl" in answer.id
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None


def test_text_parts_reach_the_prompt_in_order_joined_by_newlines(target: Target) -> None:
    parts = [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]
    in_parts = target.chat(parts).json()
    in_one = target.chat("first\nsecond").json()
    assert in_parts["usage"]["prompt_tokens"] == in_one["usage"]["prompt_tokens"]
    assert text_of(in_parts) == text_of(in_one)


def test_a_second_turn_has_the_longer_prompt(target: Target) -> None:
    first = target.chat("Hi").json()
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": text_of(first)},
        {"role": "user", "content": "And now?"},
    ]
    second = target.chat(messages=messages).json()
    assert second["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"]


def test_max_completion_tokens_is_max_tokens(target: Target) -> None:
    one = target.chat(max_tokens=5, ignore_eos=True).json()
    other = target.chat(max_tokens=None, max_completion_tokens=5, ignore_eos=True).json()
    assert one["usage"]["completion_tokens"] == other["usage"]["completion_tokens"] == 5
    assert text_of(one) == text_of(other)
    assert_error(target.chat(max_tokens=5, max_completion_tokens=6), 400)


def test_greedy_answers_are_equal_whatever_the_seed(target: Target) -> None:
    with ThreadPoolExecutor(2) as threads:
        bodies = [
            future.result().json()
            for future in [threads.submit(target.chat, seed=7, max_tokens=12) for _ in range(4)]
        ]
    assert len({text_of(body) for body in bodies}) == 1


def test_seeds_draw_different_answers_and_the_same_again(target: Target) -> None:
    def draw(seed: int) -> str:
        fields = {"temperature": 1, "max_tokens": 24, "ignore_eos": True}
        return text_of(target.chat(seed=seed, **fields).json())

    texts = [draw(seed) for seed in range(4)]
    assert len(set(texts)) == 4
    assert draw(2) == texts[2]


def test_logit_bias_keeps_tokens_out(target: Target) -> None:
    free = text_of(target.complete(max_tokens=16).json())
    banned = {str(token_id): -100 for token_id in byte_ids_of(free[0])}
    assert target.complete(max_tokens=16, logit_bias=banned).status_code == 200
    error = assert_error(target.chat(logit_bias={"99999999": 1}), 400, param="logit_bias")
    assert "99999999" in error["message"]
    assert re.search(r"vocabulary of \d+", error["message"])
    assert_error(target.chat(logit_bias={"cat": 1}), 400, param="logit_bias")
    assert_error(target.chat(logit_bias={"1": 101}), 400, param="logit_bias")


def test_ignore_eos_goes_on_to_the_limit(target: Target) -> None:
    body = target.chat(ignore_eos=True, max_tokens=40).json()
    assert body["usage"]["completion_tokens"] == 40
    assert body["choices"][0]["finish_reason"] == "length"


def test_penalties_are_accepted(target: Target) -> None:
    response = target.chat(frequency_penalty=1.0, presence_penalty=-1, repetition_penalty=1.1)
    assert isinstance(text_of(response.json()), str)


# ---------------------------------------------------------------- streaming


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


# ---------------------------------------------------------------- completions


def test_a_plain_completion(target: Target) -> None:
    body = target.complete(max_tokens=5, ignore_eos=True).json()
    usage = body["usage"]
    assert "cmpl" in body["id"]
    assert usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5


def test_token_ids_as_prompt(target: Target) -> None:
    assert target.complete([40, 41, 42, 43]).json()["usage"]["prompt_tokens"] == 4


def test_several_prompts(target: Target) -> None:
    body = target.complete(["Once upon", [40, 41, 42], "Once upon", [40, 41, 42]]).json()
    texts = [choice["text"] for choice in body["choices"]]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert texts[0] == texts[2]
    assert texts[1] == texts[3]
    alone = target.complete("Once upon").json()["usage"]["prompt_tokens"]
    assert body["usage"]["prompt_tokens"] == 2 * alone + 6


@pytest.mark.parametrize("prompt", ["Once upon a time", [40, 41, 42]])
@pytest.mark.parametrize("stream", [False, True])
def test_echo(target: Target, prompt: Any, stream: bool) -> None:
    response = target.complete(prompt, echo=True, stream=stream)
    plain = text_of(target.complete(prompt).json())
    text = streamed(events_of(response)) if stream else text_of(response.json())
    assert text.endswith(plain)
    if isinstance(prompt, str):
        assert text == prompt + plain


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], ["a", ""], [1, "a"], [1, [2]], None, 7])
def test_empty_or_mixed_up_prompts_are_refused(target: Target, prompt: Any) -> None:
    error = assert_error(target.complete(prompt), 400)
    assert error["param"].startswith("prompt")
    assert target.complete().status_code == 200


@pytest.mark.parametrize("prompt", [[99_999_999], [-1], [[1, 2], [-5]], [2**40], [1.5], [True]])
def test_ids_that_are_no_tokens_are_refused(target: Target, prompt: Any) -> None:
    assert_error(target.complete(prompt), 400)


# ---------------------------------------------------------------- stop


def test_stop_string_and_list(target: Target) -> None:
    whole = text_of(target.complete(max_tokens=40, ignore_eos=True).json())
    stop = whole[10:13]
    expected = whole[: whole.index(stop)]
    for given in (stop, [stop], ["never \u2603", stop]):
        body = target.complete(max_tokens=40, stop=given, ignore_eos=True).json()
        assert text_of(body) == expected
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["choices"][0]["stop_reason"] == stop


def test_stop_string_of_several_tokens_never_leaks(target: Target) -> None:
    prompt = "Count from one to twenty in words, separated by commas."
    fields = {"max_tokens": 40, "ignore_eos": True}
    whole = text_of(target.chat(prompt, **fields).json())
    stop = whole[15:27]
    expected = whole[: whole.index(stop)]
    for options in ({"stop": [stop]}, {"stop": [stop + "zzz"]}):
        plain = target.chat(prompt, **fields, **options).json()
        events = events_of(target.chat(prompt, **fields, **options, stream=True))
        is_stopped = options["stop"] == [stop]
        reason = "stop" if is_stopped else "length"
        assert text_of(plain) == streamed(events) == (expected if is_stopped else whole)
        assert plain["choices"][0]["finish_reason"] == reason
        assert events[-2]["choices"][0]["finish_reason"] == reason
    wait_until_idle(target)


def test_usage_counts_the_tokens_that_made_the_stop_string(target: Target) -> None:
    fields = {"max_tokens": 40, "ignore_eos": True}
    whole = text_of(target.complete(**fields).json())
    body = target.complete(**fields, stop=whole[10:13]).json()
    assert 0 < body["usage"]["completion_tokens"] < 40


# ---------------------------------------------------------------- bad input


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


# ---------------------------------------------------------------- cache and metrics


def test_the_same_prompt_twice(target: Target) -> None:
    prompt = f"{time.time_ns()} " + "Shelf holds jars of plum jam. " * 12
    cold = target.complete(prompt).json()
    warm = target.complete(prompt).json()
    assert text_of(cold) == text_of(warm)
    cached = warm["usage"]["prompt_tokens_details"]["cached_tokens"]
    # What begins every prompt (a first token, the first digits of the time) may be there.
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] < 16
    assert warm["usage"]["prompt_tokens"] - 64 < cached < warm["usage"]["prompt_tokens"]


def test_every_metric_is_documented_and_counters_end_in_total(target: Target) -> None:
    target.chat()
    text = target.http.get("/metrics").text
    helped = set(re.findall(r"^# HELP (\S+) \S", text, re.M))
    typed = dict(re.findall(r"^# TYPE (\S+) (\S+)", text, re.M))
    assert helped == set(typed)
    assert all(name.startswith("headstart_") for name in typed)
    assert all(name.endswith("_total") for name, kind in typed.items() if kind == "counter")
    assert "nan" not in text.lower().replace("headstart", "")
    for name in (
        "prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_cached_total",
        "kv_cache_usage_perc", "num_requests_running", "num_requests_waiting",
        "num_preemptions_total", "time_to_first_token_seconds", "inter_token_latency_seconds",
        "e2e_request_latency_seconds", "request_queue_time_seconds",
    ):  # fmt: skip
        assert f"headstart_{name}" in typed


COUNTED = (
    "prefix_cache_queries_total", "prefix_cache_hits_total", "generation_tokens_total",
    "prompt_tokens_total", "prompt_tokens_cached_total", "time_to_first_token_seconds_count",
    "e2e_request_latency_seconds_count", "request_queue_time_seconds_count",
    "inter_token_latency_seconds_count",
)  # fmt: skip


def test_metrics_are_the_sums_over_answers(target: Target) -> None:
    wait_until_idle(target)
    before = {name: metric(target.http, name) for name in COUNTED}
    usages = [target.chat("Ten times.", ignore_eos=True).json()["usage"] for _ in range(10)]
    grown = {name: metric(target.http, name) - before[name] for name in COUNTED}
    prompt = sum(usage["prompt_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert grown == {
        "prefix_cache_queries_total": prompt,
        "prefix_cache_hits_total": cached,
        "generation_tokens_total": 80,
        "prompt_tokens_total": prompt,
        "prompt_tokens_cached_total": cached,
        "time_to_first_token_seconds_count": 10,
        "e2e_request_latency_seconds_count": 10,
        "request_queue_time_seconds_count": 10,
        "inter_token_latency_seconds_count": 70,
    }


def test_dashboard_shows_the_same_hit_rate(target: Target) -> None:
    target.chat()
    shown = target.http.get("/dashboard/data").json()["hit_rate"]
    assert shown["queried"] == metric(target.http, "prefix_cache_queries_total")
    assert shown["hit"] == metric(target.http, "prefix_cache_hits_total") <= shown["queried"]
    assert shown["rate"] == pytest.approx(shown["hit"] / shown["queried"])


def test_one_generated_token_gives_no_broken_rates(target: Target) -> None:
    assert target.chat(max_tokens=1).status_code == 200
    text = target.http.get("/dashboard/data").text
    assert "NaN" not in text
    assert "Infinity" not in text
