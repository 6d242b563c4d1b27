"""What clients rely on where there are several choices, logprobs, prefills and token ids."""

from __future__ import annotations

from typing import Any

import pytest

from tests.http_kit import events_of
from tests.target import Target, assert_error, streamed, text_of

PREFILL = [
    {"role": "user", "content": "Name a colour."},
    {"role": "assistant", "content": "My favourite is"},
]


def choices_of(response: Any) -> list[Any]:
    assert response.status_code == 200, response.text
    found: list[Any] = response.json()["choices"]
    return found


# ---------------------------------------------------------------- choices


def test_two_choices_twice(target: Target) -> None:
    for _ in range(2):
        choices = choices_of(target.chat(n=2))
        assert [choice["index"] for choice in choices] == [0, 1]
        assert all(choice["finish_reason"] for choice in choices)


def test_choices_of_a_seed_differ_and_come_in_order(target: Target) -> None:
    fields = {"n": 3, "temperature": 1, "seed": 5, "max_tokens": 24, "ignore_eos": True}
    texts = [choice["message"]["content"] for choice in choices_of(target.chat(**fields))]
    assert len(set(texts)) == 3
    again = [choice["message"]["content"] for choice in choices_of(target.chat(**fields))]
    assert again == texts


def test_a_stream_of_three_choices(target: Target) -> None:
    fields = {"n": 3, "temperature": 1, "seed": 5, "max_tokens": 6, "ignore_eos": True}
    plain = choices_of(target.chat(**fields))
    events = events_of(target.chat(**fields, stream=True))
    ended = [
        choice["index"]
        for event in events[:-1]
        for choice in event["choices"]
        if choice["finish_reason"] is not None
    ]
    assert sorted(ended) == [0, 1, 2]
    texts = [streamed(events, index) for index in range(3)]
    assert texts == [choice["message"]["content"] for choice in plain]


def test_choices_of_several_prompts_are_grouped_and_prompts_counted_once(target: Target) -> None:
    prompts = [[40, 41, 42], [50, 51]]
    body = target.complete(prompts, n=2, ignore_eos=True).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in body["choices"]]
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
    assert body["usage"]["prompt_tokens"] == 5
    assert body["usage"]["completion_tokens"] == 32


# ---------------------------------------------------------------- logprobs


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top", [0, 5])
def test_logprobs_of_a_chat(target: Target, top: int, stream: bool) -> None:
    fields = {"logprobs": True, "top_logprobs": top, "stream": stream, "ignore_eos": True}
    response = target.chat(**fields)
    if stream:
        parts = [event["choices"][0] for event in events_of(response)[:-1]]
        entries = [
            entry for part in parts for entry in (part["logprobs"] or {"content": []})["content"]
        ]
        text = streamed(events_of(response))
    else:
        (choice,) = choices_of(response)
        entries, text = choice["logprobs"]["content"], choice["message"]["content"]
    assert len(entries) == 8
    written = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert written.decode("utf-8", "replace") == text
    for entry in entries:
        assert len(entry["top_logprobs"]) == top
        assert -9999.0 <= entry["logprob"] <= 0
        assert all(item["logprob"] <= 0 for item in entry["top_logprobs"])


def test_no_logprobs_unless_asked_for(target: Target) -> None:
    for fields in ({}, {"logprobs": False}):
        (choice,) = choices_of(target.chat(**fields))
        assert choice["logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_too_many_logprobs_are_refused(target: Target, stream: bool) -> None:
    for top in (21, 30):
        response = target.chat(logprobs=True, top_logprobs=top, stream=stream)
        assert_error(response, 400, param="top_logprobs")
    assert target.chat().status_code == 200


@pytest.mark.parametrize(("asked", "counts"), [(0, {1}), (5, {5, 6})])
def test_logprobs_of_a_completion(target: Target, asked: int, counts: set[int]) -> None:
    (choice,) = choices_of(target.complete(logprobs=asked, ignore_eos=True))
    told = choice["logprobs"]
    assert len(told["tokens"]) == len(told["token_logprobs"]) == len(told["text_offset"]) == 8
    assert all(len(entry) in counts for entry in told["top_logprobs"])


def test_logprobs_of_an_echoed_prompt_cold_and_warm(target: Target) -> None:
    prompt = list(range(40, 90))
    fields = {"echo": True, "logprobs": 1, "max_tokens": 2, "ignore_eos": True}
    told = [choices_of(target.complete(prompt, **fields))[0]["logprobs"] for _ in range(2)]
    assert told[0]["token_logprobs"][0] is None
    assert all(value is not None for value in told[0]["token_logprobs"][1:])
    assert len(told[0]["tokens"]) == len(told[0]["text_offset"]) == len(prompt) + 2
    assert told[1]["token_logprobs"][1:] == pytest.approx(told[0]["token_logprobs"][1:], abs=1e-4)


# ---------------------------------------------------------------- prefills


def test_a_prefill_is_gone_on_with_and_said_again_where_asked_for(target: Target) -> None:
    plain = text_of(target.chat(messages=PREFILL).json())
    explicit = {"add_generation_prompt": False, "continue_final_message": True}
    assert text_of(target.chat(messages=PREFILL, **explicit).json()) == plain
    for echo, expected in ((False, plain), (True, PREFILL[1]["content"] + plain)):
        said = target.chat(messages=PREFILL, **explicit, echo=echo)
        assert text_of(said.json()) == expected


def test_a_prefill_in_parts_is_the_same_prompt(target: Target) -> None:
    parts = [{"type": "text", "text": "My favourite"}, {"type": "text", "text": "is"}]
    in_parts = [PREFILL[0], {"role": "assistant", "content": parts}]
    joined = [PREFILL[0], {"role": "assistant", "content": "My favourite\nis"}]
    tokens = [
        target.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
        for messages in (in_parts, joined)
    ]
    assert tokens[0] == tokens[1]


def test_both_ways_of_ending_a_prompt_are_refused(target: Target) -> None:
    fields = {"add_generation_prompt": True, "continue_final_message": True}
    assert_error(target.chat(messages=PREFILL, **fields), 400)


# ---------------------------------------------------------------- token ids


@pytest.mark.parametrize("text", ["Hello, world", "天気がいい", "🦊 and 👩‍🚀", "a\tb\n"])
def test_text_comes_back_from_its_ids(target: Target, text: str) -> None:
    asked = {"prompt": text, "add_special_tokens": False}
    tokens = target.http.post("/tokenize", json=asked).json()["tokens"]
    found = target.http.post("/detokenize", json={"tokens": tokens}).json()
    assert found["prompt"] == text


def test_a_conversation_counts_as_many_tokens_as_its_request(target: Target) -> None:
    messages = [{"role": "user", "content": "How many?"}]
    counted = target.http.post("/tokenize", json={"messages": messages}).json()
    assert counted["count"] == len(counted["tokens"]) > 0
    assert counted["max_model_len"] == target.max_model_len
    assert counted["token_strs"] is None
    answered = target.chat(messages=messages).json()
    assert answered["usage"]["prompt_tokens"] == counted["count"]


def test_pieces_come_where_they_are_asked_for(target: Target) -> None:
    for name in ("return_token_strs", "with_pieces"):
        told = target.http.post("/tokenize", json={"prompt": "One two", name: True}).json()
        assert len(told["token_strs"]) == told["count"]
        assert all(told["token_strs"])


# ---------------------------------------------------------------- salts and structure


def test_a_salt_keeps_prefixes_apart(target: Target) -> None:
    prompt = "The salt keeps what one has computed from the others, again and again. " * 3
    cached = [
        target.complete(prompt, cache_salt=salt).json()["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ]
        for salt in ("conformance-a", "conformance-a", "conformance-b")
    ]
    assert cached[0] == cached[2] == 0
    assert cached[1] > 0


@pytest.mark.parametrize(
    "form",
    [
        {"type": "nothing"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": 5}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}},
    ],
)
def test_forms_that_are_none_are_refused(target: Target, form: Any) -> None:
    assert_error(target.chat(response_format=form), 400)
    assert target.chat().status_code == 200


def test_a_named_tool_without_tools_is_refused(target: Target) -> None:
    choice = {"type": "function", "function": {"name": "f"}}
    assert_error(target.chat(tool_choice=choice), 400)


def test_special_tokens_stand_before_the_text_unless_told_otherwise(target: Target) -> None:
    def ids(**fields: Any) -> list[int]:
        body = target.http.post("/tokenize", json={"prompt": "One two", **fields}).json()
        tokens: list[int] = body["tokens"]
        return tokens

    bare = ids(add_special=False)
    assert ids(add_special_tokens=False) == bare
    assert ids()[-len(bare) :] == bare
    for fields, sent in (({}, ids()), ({"add_special_tokens": False}, bare)):
        usage = target.complete("One two", **fields).json()["usage"]
        assert usage["prompt_tokens"] == len(sent)
