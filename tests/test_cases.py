"""What users of prefix-caching servers have run into, asked of a real server over HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessageParam

from service.request_fields import REQUEST_FIELDS
from tests.gateway_kit import ids_of, make_tokenizer
from tests.http_kit import events_of, metric
from tests.models import EOS_TOKEN_ID, VOCAB_SIZE
from tests.server_kit import Stream
from tests.target import (
    Target,
    assert_error,
    cached_tokens,
    streamed,
    text_of,
    wait_until_idle,
)

SAGA = "Tell the saga of the copper kettle"
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def target(tiny_target: Target) -> Target:
    return tiny_target


def lines(count: int, first: str = "") -> str:
    """A text that no other test has asked about, when ``first`` is its own."""
    body = "\n".join(f"Shelf {i} holds {i * 7} jars of plum jam." for i in range(1, count + 1))
    return f"{first}\n{body}" if first else body


def counters(target: Target, *names: str) -> dict[str, float]:
    return {name: metric(target.http, name) for name in names}


def grown(target: Target, before: dict[str, float]) -> dict[str, float]:
    return {name: metric(target.http, name) - value for name, value in before.items()}


def assert_no_trace(target: Target, seconds: float = 2.0) -> None:
    wait_until_idle(target, seconds)
    assert target.complete("A plain request.").status_code == 200


# ---------------------------------------------------------------- stop strings


@pytest.mark.parametrize("seed", range(4))
def test_a_stop_string_of_several_tokens_never_leaks(target: Target, seed: int) -> None:
    fields = {"max_tokens": 40, "ignore_eos": True, "seed": seed, "temperature": 1}
    whole = text_of(target.chat(**fields).json())
    stop = whole[15:27]
    for sought in (stop, stop + "zzz"):
        is_found = sought in whole
        assert is_found is (sought == stop)
        expected = whole[: whole.index(sought)] if is_found else whole
        plain = target.chat(stop=[sought], **fields).json()
        events = events_of(target.chat(stop=[sought], stream=True, **fields))
        assert text_of(plain) == streamed(events) == expected
        reason = "stop" if is_found else "length"
        assert plain["choices"][0]["finish_reason"] == reason
        assert events[-2]["choices"][0]["finish_reason"] == reason
    assert_no_trace(target)


# ---------------------------------------------------------------- what steers the engine


def test_biased_tokens_never_appear(target: Target) -> None:
    fields = {"max_tokens": 40, "ignore_eos": True}
    free = set(text_of(target.chat(**fields).json())) - {"\ufffd"}
    assert len(free) > 5
    pieces = [make_tokenizer().decode([token_id]) for token_id in range(VOCAB_SIZE)]
    banned = {str(i): -100 for i, piece in enumerate(pieces) if free & set(piece)}
    assert len(banned) < 300
    assert not free & set(text_of(target.chat(logit_bias=banned, **fields).json()))


def test_the_end_of_sequence_ends_an_answer_unless_ignored(target: Target) -> None:
    forced = {"logit_bias": {str(EOS_TOKEN_ID): 100}, "max_tokens": 6}
    ended = target.chat(**forced).json()
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert ended["choices"][0]["stop_reason"] == EOS_TOKEN_ID
    assert text_of(ended) == ""
    assert ended["usage"]["completion_tokens"] == 1
    assert streamed(events_of(target.chat(stream=True, **forced))) == ""
    ignored = target.chat(ignore_eos=True, **forced).json()
    assert ignored["choices"][0]["finish_reason"] == "length"
    assert ignored["choices"][0]["stop_reason"] is None
    assert ignored["usage"]["completion_tokens"] == 6


def test_a_stop_token_ends_an_answer_and_is_named(target: Target) -> None:
    wanted = 300
    fields = {"logit_bias": {str(wanted): 100}, "stop_token_ids": [wanted], "max_tokens": 6}
    body = target.complete(**fields).json()
    assert text_of(body) == ""
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["stop_reason"] == wanted


def test_penalties_change_the_answer(target: Target) -> None:
    fields = {"max_tokens": 30, "ignore_eos": True, "logit_bias": {"300": 4, "301": 3.9}}
    plain = text_of(target.complete(**fields).json())
    for penalty in ({"frequency_penalty": 2}, {"presence_penalty": 2}, {"repetition_penalty": 3}):
        assert text_of(target.complete(**fields, **penalty).json()) != plain


def test_a_running_request_is_counted_until_it_ends(target: Target) -> None:
    wait_until_idle(target)
    with Stream(target.url, target.model, prompt=SAGA, max_tokens=300) as stream:
        stream.events(2)
        assert metric(target.http, "requests_in_flight") == 1
        assert metric(target.http, "num_requests_running") == 1
        stream.events()
    wait_until_idle(target)


def test_a_prompt_of_several_chunks_streams_without_empty_pieces(target: Target) -> None:
    prompt = lines(60, "Several chunks.")
    fields = {"max_tokens": 12, "ignore_eos": True, "stream_options": {"include_usage": True}}
    *events, usage, _ = events_of(target.chat(prompt, stream=True, **fields))
    assert usage["usage"]["prompt_tokens"] > 1000
    assert usage["usage"]["completion_tokens"] == 12
    pieces = [event["choices"][0]["delta"].get("content") for event in events[:-1]]
    assert pieces.count("") <= 1  # the opening


# ---------------------------------------------------------------- clients that leave


def test_streams_that_are_left_end_within_two_seconds(target: Target) -> None:
    streams = [Stream(target.url, target.model, prompt=SAGA, max_tokens=2000) for _ in range(8)]
    for stream in streams:
        with stream:
            stream.events(3)
    wait_until_idle(target, 2.0)
    generated = metric(target.http, "worker_generated_tokens_total")
    time.sleep(0.3)
    assert metric(target.http, "worker_generated_tokens_total") == generated
    assert cached_tokens(target.complete(SAGA).json()) > 0


def test_plain_requests_that_are_left_end_within_two_seconds(target: Target) -> None:
    body = {"model": target.model, "prompt": SAGA, "max_tokens": 2000, "ignore_eos": True}
    for _ in range(5):
        with pytest.raises(httpx.ReadTimeout):
            target.http.post("/v1/completions", json=body, timeout=0.3)
    wait_until_idle(target, 2.0)
    generated = metric(target.http, "worker_generated_tokens_total")
    time.sleep(0.3)
    assert metric(target.http, "worker_generated_tokens_total") == generated
    assert_no_trace(target)


def test_two_hundred_disconnects_in_mid_stream_leave_nothing(target: Target) -> None:
    before = metric(target.http, "requests_total", outcome="abort")

    def leave(number: int) -> None:
        prompt = lines(number % 7, f"Disconnect {number % 50}.")
        with Stream(target.url, target.model, prompt=prompt, max_tokens=1000) as stream:
            assert len(stream.events(1 + number % 3)) == 1 + number % 3

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(leave, range(200)))
    assert_no_trace(target, 5.0)
    assert metric(target.http, "requests_total", outcome="abort") == before + 200


def test_two_hundred_at_once_time_out_and_a_short_one_is_answered(target: Target) -> None:
    body = {"model": target.model, "prompt": SAGA, "max_tokens": 2000, "ignore_eos": True}

    async def leave(client: httpx.AsyncClient) -> bool:
        try:
            response = await client.post("/v1/completions", json=body)
        except httpx.TimeoutException:
            return True
        assert response.status_code == 429, response.text
        return False

    async def leave_all() -> list[bool]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=target.url, timeout=0.5, limits=limits, verify=False
        ) as client:
            return await asyncio.gather(*(leave(client) for _ in range(200)))

    assert any(asyncio.run(leave_all()))
    started = time.monotonic()
    # The queue is full until the server has seen that they left: clients come again, as they are
    # told to.
    while (short := target.complete("Short.")).status_code == 429:
        time.sleep(float(short.headers["retry-after"]))
    assert short.status_code == 200
    assert time.monotonic() - started < 5
    assert_no_trace(target, 5.0)


# ---------------------------------------------------------------- what is refused


def test_the_scores_of_an_echoed_prompt_are_the_same_when_it_is_stored(target: Target) -> None:
    def scores(prompt: str) -> dict[str, Any]:
        response = target.complete(prompt, echo=True, logprobs=1, max_tokens=1)
        assert response.status_code == 200, response.text
        body = response.json()
        found: dict[str, Any] = body["choices"][0]["logprobs"]
        num_tokens = body["usage"]["prompt_tokens"] + 1
        assert {len(values) for values in found.values()} == {num_tokens}
        return found

    first = lines(40, "Scored shelves.")
    changed = first.replace("280 jars", "281 jars")
    assert changed != first
    cold, warm, other, again = scores(first), scores(first), scores(changed), scores(first)
    assert cold["token_logprobs"][0] is None
    assert "".join(cold["tokens"]).removeprefix("<s>").startswith(first)
    for found in (warm, again):
        assert found["tokens"] == cold["tokens"]
        assert found["text_offset"] == cold["text_offset"]
        assert found["token_logprobs"][1:] == pytest.approx(cold["token_logprobs"][1:], abs=1e-3)
    same = next(at for at, pair in enumerate(zip(cold["tokens"], other["tokens"], strict=False))
                if pair[0] != pair[1])  # fmt: skip
    assert other["token_logprobs"][1:same] == pytest.approx(
        cold["token_logprobs"][1:same], abs=1e-3
    )
    assert_no_trace(target)


def test_the_samples_of_one_prompt_count_it_once(target: Target) -> None:
    """Cold it is cold, although three of four found what the first had computed."""
    prompt = lines(30, "Four samples.")
    before = counters(target, "prefix_cache_queries_total", "prefix_cache_hits_total")
    usages = []
    for _ in range(2):
        body = target.chat(prompt, n=4, max_tokens=4).json()
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        usages.append(body["usage"])
    options = {"include_usage": True}
    stream = target.chat(prompt, n=4, max_tokens=4, stream=True, stream_options=options)
    usages.append(events_of(stream)[-2]["usage"])
    cold, *warm = usages
    num_prompt = cold["prompt_tokens"]
    num_before = cold["prompt_tokens_details"]["cached_tokens"]
    assert num_before < BLOCK_SIZE  # no more than the head that all chats have
    for usage in usages:
        assert usage["prompt_tokens"] == num_prompt
        assert usage["completion_tokens"] == 16
        assert usage["total_tokens"] == num_prompt + 16
    for usage in warm:
        assert usage["prompt_tokens_details"]["cached_tokens"] == num_prompt - 1
    assert grown(target, before) == {
        "prefix_cache_queries_total": 3 * num_prompt,
        "prefix_cache_hits_total": num_before + 2 * (num_prompt - 1),
    }
    assert_no_trace(target)


def test_an_over_long_prompt_is_refused_before_any_event_and_stores_nothing(
    target: Target,
) -> None:
    limit = target.max_model_len
    ids = [10 + index % 400 for index in range(limit + 50)]
    shorter = ids[:320]
    target.complete(shorter)
    had = cached_tokens(target.complete(shorter).json())
    before = counters(target, "prompt_tokens_computed_total", "prefix_cache_queries_total")
    for stream in (True, False):
        error = assert_error(target.complete(ids, stream=stream), 400)
        assert str(limit) in error["message"]
        assert str(len(ids)) in error["message"]
        assert error["code"] == "context_length_exceeded"
    assert set(grown(target, before).values()) == {0}
    assert cached_tokens(target.complete(shorter).json()) == had == len(shorter) - 1


def test_an_answer_ends_where_the_context_ends(target: Target) -> None:
    ids = [7 + index % 300 for index in range(target.max_model_len - 1)]
    fields = {"max_tokens": 50, "ignore_eos": True}
    plain = target.complete(ids, **fields).json()
    events = events_of(target.complete(ids, stream=True, **fields))
    assert plain["usage"]["completion_tokens"] == 1
    assert plain["choices"][0]["finish_reason"] == "length"
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert streamed(events) == text_of(plain)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
FUZZED = sorted({field.name for field in REQUEST_FIELDS} - {"max_tokens", "max_completion_tokens"})


@settings(max_examples=200, deadline=None)
@given(
    field=st.sampled_from([*FUZZED, "messages[0]", "content", "role", "tool_calls"]),
    value=ANYTHING,
    is_chat=st.booleans(),
)
def test_no_value_of_any_field_is_an_internal_error(
    tiny_target: Target, field: str, value: Any, is_chat: bool
) -> None:
    message: Any = {"role": "user", "content": "Hi"}
    if field == "messages[0]":
        message = value
    elif field in ("content", "role", "tool_calls"):
        message[field] = value
    asked = {"messages": [message]} if is_chat else {"prompt": "Hi"}
    body = {"model": tiny_target.model, "max_tokens": 1, **asked}
    if field in FUZZED:
        body[field] = value
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    response = tiny_target.http.post(
        path, content=json.dumps(body), headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 200 or 400 <= response.status_code < 500, response.text
    if response.status_code != 200:
        assert_error(response, 400, 404, 413)


# ---------------------------------------------------------------- history with tool calls


def ferry(assistant: dict[str, Any], *more: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "Is the ferry to Inishbeg running?"},
        {"role": "assistant", **assistant},
        {"role": "tool", "tool_call_id": "c1", "content": "cancelled, swell 4 m"},
        {"role": "user", "content": "So?"},
        *more,
    ]


def call(name: str = "ferry_status", arguments: str = '{"route":"inishbeg"}') -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"tool_calls": [{"id": "c1", "type": "function", "function": function}]}


def test_an_assistants_turn_with_calls_and_no_content(target: Target) -> None:
    variants = [{"content": None, **call()}, call(), {"content": "", **call()}]
    bodies = [target.chat(messages=ferry(variant)).json() for variant in variants]
    assert len({body["usage"]["prompt_tokens"] for body in bodies}) == 1
    assert len({text_of(body) for body in bodies}) == 1
    (prompt_tokens,) = {body["usage"]["prompt_tokens"] for body in bodies}
    # The whole prompt, the last token aside, is what the other spellings have left in the cache.
    assert cached_tokens(bodies[1]) == cached_tokens(bodies[2]) == prompt_tokens - 1

    # The call stands in the prompt: another one is the same up to where it differs.
    before = (
        "<s><|im_start|>user\nIs the ferry to Inishbeg running?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name": "ferry_'
    )
    named = target.chat(messages=ferry({"content": None, **call(name="ferry_fares")})).json()
    assert cached_tokens(named) == len(ids_of(before))
    before += 'status", "arguments": {"route": "inish'
    other = call(arguments='{"route":"inishmor"}')
    argued = target.chat(messages=ferry({"content": None, **other})).json()
    assert cached_tokens(argued) == len(ids_of(before))


def test_the_next_turn_hits_the_whole_of_a_prompt_with_calls(target: Target) -> None:
    history = ferry({"content": None, **call(name="ferry_next_turn")})
    first = target.chat(messages=history).json()
    more = [
        {"role": "assistant", "content": "It is cancelled."},
        {"role": "user", "content": "And tomorrow?"},
    ]
    second = target.chat(messages=[*history, *more]).json()
    assert cached_tokens(second) >= first["usage"]["prompt_tokens"]


def test_the_official_client_sends_calls_back(target: Target) -> None:
    messages: list[ChatCompletionMessageParam] = [
        {"role": "user", "content": "Is the ferry to Inishbeg running?"},
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "ferry_status", "arguments": '{"route":"inishbeg"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "cancelled, swell 4 m"},
        {"role": "user", "content": "So?"},
    ]
    answer = target.openai.chat.completions.create(
        model=target.model, messages=messages, max_tokens=4, temperature=0
    )
    plain = target.chat(messages=ferry({"content": None, **call()}), max_tokens=4).json()
    assert answer.choices[0].message.content == text_of(plain)


# ---------------------------------------------------------------- counters


COUNTED = ("prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_cached_total")


def test_counters_are_what_clients_were_told_whatever_waits_or_is_preempted(
    target: Target,
) -> None:
    wait_until_idle(target)
    warm = lines(40, "Warm.")
    target.complete(warm, max_tokens=1)
    before = counters(target, *COUNTED, "num_preemptions_total", "prompt_tokens_total")

    def long(number: int) -> Any:
        return target.complete(f"{number}. {SAGA}", max_tokens=450, ignore_eos=True).json()

    def short(_: int) -> Any:
        return target.complete(warm, max_tokens=4, ignore_eos=True).json()

    seen_waiting = 0.0
    with ThreadPoolExecutor(14) as threads:
        futures = [threads.submit(long, number) for number in range(8)]
        while metric(target.http, "num_requests_running") < 8:
            time.sleep(0.01)
        futures += [threads.submit(short, number) for number in range(6)]
        while not all(future.done() for future in futures):
            seen_waiting = max(seen_waiting, metric(target.http, "num_requests_waiting"))
            time.sleep(0.02)
    usages = [future.result()["usage"] for future in futures]
    told = grown(target, before)

    assert seen_waiting >= 6
    assert told["num_preemptions_total"] > 0
    assert [usage["completion_tokens"] for usage in usages] == [450] * 8 + [4] * 6
    prompt = sum(usage["prompt_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert told["prefix_cache_queries_total"] == told["prompt_tokens_total"] == prompt
    assert told["prefix_cache_hits_total"] == told["prompt_tokens_cached_total"] == cached
    shown = target.http.get("/dashboard/data").json()["hit_rate"]
    assert shown["queried"] == metric(target.http, "prefix_cache_queries_total")
    assert shown["hit"] == metric(target.http, "prefix_cache_hits_total")
    assert shown["rate"] == pytest.approx(shown["hit"] / shown["queried"])
    assert_no_trace(target)


def test_more_requests_than_fit_at_once_are_all_answered_as_if_alone(target: Target) -> None:
    prompts = [lines(20, f"Client {number}.") for number in range(12)]
    fields = {"max_tokens": 60, "ignore_eos": True}
    with ThreadPoolExecutor(12) as threads:
        bodies = list(threads.map(lambda prompt: target.complete(prompt, **fields), prompts))
    assert [body.status_code for body in bodies] == [200] * 12
    target.http.post("/reset_prefix_cache", json={}).raise_for_status()
    for prompt, body in zip(prompts, bodies, strict=True):
        assert text_of(target.complete(prompt, **fields).json()) == text_of(body.json())


def test_eight_clients_on_one_cold_prefix_compute_it_once(target: Target) -> None:
    prefix = ids_of(lines(200, "One cold prefix."))[:1300]
    assert len(prefix) == 1300
    suffixes = [ids_of(f" Client {number} asks for the jars of shelf {number * 3}.")
                for number in range(8)]  # fmt: skip
    before = counters(target, "prompt_tokens_computed_total")
    start = time.monotonic()
    with ThreadPoolExecutor(8) as threads:
        bodies = list(
            threads.map(lambda suffix: target.complete([*prefix, *suffix]).json(), suffixes)
        )
    assert time.monotonic() - start < 60
    computed = grown(target, before)["prompt_tokens_computed_total"]
    assert computed <= len(prefix) + sum(map(len, suffixes)) + 8 * BLOCK_SIZE
    assert computed >= len(prefix)
    for body, suffix in zip(bodies, suffixes, strict=True):
        assert body["usage"]["prompt_tokens"] == len(prefix) + len(suffix)
    told = sum(cached_tokens(body) for body in bodies)
    assert computed == 8 * len(prefix) + sum(map(len, suffixes)) - told


def test_the_chunks_of_a_long_cold_prompt_are_no_hits(target: Target) -> None:
    ids = ids_of(lines(200, "Longer than a step."))[:1500]
    body = target.complete(ids).json()
    assert cached_tokens(body) < BLOCK_SIZE * 2
    assert cached_tokens(target.complete(ids).json()) == len(ids) - 1


def test_a_changed_tail_hits_up_to_the_very_token_that_differs(target: Target) -> None:
    ids = list(ids_of(lines(12, "Where tails part.")))[:200]
    target.complete(ids)
    for index in (199, 192, 177, 160, 33):
        changed = [*ids[:index], (ids[index] + 1) % 500, *ids[index + 1 :]]
        body = target.complete(changed).json()
        assert cached_tokens(body) == min(index, len(ids) - 1)


# ---------------------------------------------------------------- characters


def test_both_spellings_of_a_character_hit_each_other(target: Target) -> None:
    """The escaped pair is the literal character: the whole prompt is a hit."""
    escaped = json.dumps("A \U0001f98a " + lines(3, "Foxes."))
    literal = json.dumps("A \U0001f98a " + lines(3, "Foxes."), ensure_ascii=False)
    assert escaped != literal
    usages = []
    for spelled in (escaped, literal):
        body = f'{{"model": "{target.model}", "max_tokens": 1, "prompt": {spelled}}}'
        response = target.http.post(
            "/v1/completions",
            content=body.encode(),
            headers={"Content-Type": "application/json"},
        )
        assert response.status_code == 200
        usages.append(response.json())
    first, second = (body["usage"]["prompt_tokens"] for body in usages)
    assert first == second
    assert cached_tokens(usages[1]) == first - 1


@pytest.mark.parametrize("max_tokens", range(1, 21))
def test_bytes_that_make_no_character_are_the_same_streamed_and_whole(
    target: Target, max_tokens: int
) -> None:
    pieces = [make_tokenizer().decode([token_id]) for token_id in range(VOCAB_SIZE)]
    bias = {str(i): 100 for i, text in enumerate(pieces) if "\ufffd" in text}
    assert len(bias) >= 128
    fields = {"max_tokens": max_tokens, "logit_bias": bias, "temperature": 1.5, "seed": 3}
    plain = target.chat(**fields).json()
    options = {"include_usage": True}
    response = target.chat(**fields, stream=True, stream_options=options)
    for line in response.content.split(b"\n"):
        line.decode("utf-8")
    events = events_of(response)
    assert streamed([*events[:-2], "[DONE]"]) == text_of(plain)
    assert events[-2]["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
