"""Plain completions, and where a stop string ends them. See tests/test_conformance.py."""

from __future__ import annotations

from typing import Any

import pytest

from tests.http_kit import events_of
from tests.target import Target, assert_error, streamed, text_of, wait_until_idle

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
