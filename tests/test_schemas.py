"""Bodies to structs: defaults, limits at their edges, and errors that name the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from service.errors import InvalidRequest
from service.schemas.chat import content_text, parse_chat_request
from service.schemas.completion import parse_completion_request
from service.schemas.parsing import parse_object


def chat(**fields: Any) -> Any:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return parse_chat_request(json.dumps(body).encode())


def completion(**fields: Any) -> Any:
    return parse_completion_request(json.dumps({"model": "m", "prompt": "x", **fields}).encode())


def refusal(body: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as failure:
        parse_object(body)
    return failure.value


def test_defaults() -> None:
    params = chat().sampling_params(7, 512)
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (7, 1.0, 1.0, 0)
    assert chat().requested_max_tokens is None
    assert completion().requested_max_tokens == 16


@pytest.mark.parametrize(("given", "wanted"), [(511, 511), (512, 512), (10**30, 512)])
def test_top_k_is_at_most_the_vocabulary(given: int, wanted: int) -> None:
    assert chat(top_k=given).sampling_params(7, 512).top_k == wanted


def test_all_sampling_fields_arrive() -> None:
    params = chat(
        temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, seed=5, presence_penalty=1,
        frequency_penalty=-1, repetition_penalty=1.2, logit_bias={"3": -5}, stop_token_ids=[4],
        ignore_eos=True,
    ).sampling_params(1, 512)  # fmt: skip
    assert params.temperature == 0.5
    assert params.top_p == 0.9
    assert params.top_k == 0
    assert params.min_p == 0.1
    assert params.seed == 5
    assert params.presence_penalty == 1.0
    assert params.frequency_penalty == -1.0
    assert params.repetition_penalty == 1.2
    assert params.logit_bias == {3: -5.0}
    assert params.stop_token_ids == (4,)
    assert params.ignore_eos is True


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a", ["a"]),
        ([1, 2], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
    ],
)
def test_forms_of_a_prompt(given: Any, expected: Any) -> None:
    assert completion(prompt=given).prompts == expected


def test_edges_of_the_limits() -> None:
    assert len(completion(prompt=["x"] * 128).prompts) == 128
    with pytest.raises(InvalidRequest, match="at most 128"):
        completion(prompt=["x"] * 129)
    assert len(chat(stop=["s" * 512] * 16).stop_strings) == 16
    for stop in (["s" * 513], ["s"] * 17):
        with pytest.raises(InvalidRequest, match="at most"):
            chat(stop=stop)


@pytest.mark.parametrize(
    ("content", "text"), [(None, ""), ("", ""), ([], ""), ([{"type": "text", "text": "a"}], "a")]
)
def test_content(content: Any, text: str) -> None:
    request = chat(messages=[{"role": "user", "content": content}])
    assert content_text(request.messages[0].content) == text


def test_an_answer_sent_back_as_it_came() -> None:
    answer = {
        "role": "assistant", "content": "Hi", "refusal": None, "annotations": [], "audio": None,
        "function_call": None, "tool_calls": None,
    }  # fmt: skip
    assert chat(messages=[answer]).messages[0].content == "Hi"


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"", "invalid_json", None),
        (b"\xff", "invalid_json", None),
        (b"[]", "invalid_json", None),
        (b'{"a": NaN}', "invalid_json", "a"),
        (b'{"a": {"b": [1, 1e999]}}', "invalid_json", "a.b[1]"),
        (b"[" * 100_000, "invalid_json", None),
        (b'{"a": ["x", {"b": "\\ud800"}]}', "invalid_unicode", "a[1].b"),
        (b'{"\\ud800": 1}', "invalid_unicode", "a field's name"),
        (b'{"a": "\xed\xa0\x80"}', "invalid_unicode", "a"),
        (b'{"a": "\xff"}', "invalid_json", None),
        (b'{"a": ["x", "\\ud800", NaN]}', "invalid_unicode", "a[1]"),
        (b'{"a": [' + b'"x", ' * 100_000 + b"NaN]}", "invalid_json", None),  # too far to look
    ],
)
def test_bodies_that_are_no_json_object(body: bytes, code: str | None, param: str | None) -> None:
    error = refusal(body)
    assert (error.code, error.param) == (code, param)


def test_a_proper_pair_is_its_character() -> None:
    assert parse_object(b'{"a": "\\ud83e\\udd8a"}') == {"a": "🦊"}


def test_errors_name_the_path_and_what_was_expected() -> None:
    with pytest.raises(InvalidRequest) as failure:
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": 5}]}])
    assert failure.value.param == "messages[0].content[0].text"
    assert failure.value.message == "messages[0].content[0].text: expected 'str', got 'int'."
