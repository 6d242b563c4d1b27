"""What clients rely on in an OpenAI-compatible server, over real HTTP.

By default each row is asked twice: of a gateway with a fake worker, which draws its tokens from the
prompt and the seed alone, and of `headstart serve` with a tiny model. With CONFORMANCE_URL (and
CONFORMANCE_MODEL) set, any running server is asked instead.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

from tests.gateway_kit import byte_ids_of
from tests.target import Target, assert_error, text_of

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
