"""What clients rely on where there is much at once, where prompts are long, and of what is kept."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.http_kit import events_of, metric
from tests.target import Target, assert_error, cached_tokens, text_of, wait_until_idle


def fresh_prompt(num_tokens: int) -> list[int]:
    """Ids that no prompt before had."""
    source = random.Random(time.time_ns())
    return [source.randrange(40, 120) for _ in range(num_tokens)]


# ---------------------------------------------------------------- forms that are none


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "(["},
        {"guided_grammar": "start: nobody"},
        {"structured_outputs": {"json": {"type": "number", "minimum": "low"}}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "nosuch"}},
            }
        },
    ],
    ids=["regex", "grammar", "schema", "response_format"],
)
def test_what_no_answer_could_match_is_refused_and_the_next_is_served(
    target: Target, fields: dict[str, Any]
) -> None:
    for stream in (False, True):
        error = assert_error(target.chat(stream=stream, **fields), 400)
        assert error["param"].split(".")[0] in fields
    assert target.chat().status_code == 200


# ---------------------------------------------------------------- logprobs


def test_a_prompt_of_several_chunks_streams_logprobs_of_each_token(tiny_target: Target) -> None:
    prompt = "Shelf 12 holds jars of plum jam. " * 60  # some 1,900 tokens: more than a step's
    response = tiny_target.chat(
        prompt, stream=True, max_tokens=10, ignore_eos=True, logprobs=True, top_logprobs=1,
        stream_options={"include_usage": True},
    )  # fmt: skip
    *chunks, last, done = events_of(response)
    assert done == "[DONE]"
    parts = [chunk["choices"][0] for chunk in chunks]
    entries = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
    assert len(entries) == last["usage"]["completion_tokens"] == 10
    # Neither role, nor text, nor scores, nor an end: such a chunk would say nothing.
    silent = [
        part
        for part in parts
        if not part["delta"].get("content") and not part["logprobs"] and not part["finish_reason"]
    ]
    assert len(silent) <= 1


def test_text_offsets_are_the_same_in_a_stream_that_holds_text_back(target: Target) -> None:
    prompt = fresh_prompt(24)
    whole = text_of(target.complete(prompt, max_tokens=12, ignore_eos=True).json())
    stop = whole[len(whole) // 2 :][:3]  # its beginning is held back until it is whole
    fields = {"max_tokens": 12, "ignore_eos": True, "logprobs": 0, "stop": [stop, stop + "never"]}
    plain = target.complete(prompt, **fields).json()["choices"][0]
    events = events_of(target.complete(prompt, stream=True, **fields))[:-1]
    choices = [choice for event in events for choice in event["choices"]]
    told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    offsets = [offset for part in told for offset in part["text_offset"]]
    assert "".join(choice["text"] for choice in choices) == plain["text"]
    assert offsets == plain["logprobs"]["text_offset"]
    # A token that ends inside a character adds nothing to the text.
    assert offsets == sorted(offsets)
    assert offsets[0] == 0


def test_logprobs_of_a_prompt_as_many_as_are_asked_for(target: Target) -> None:
    prompt = fresh_prompt(20)
    assert_error(target.complete(prompt, prompt_logprobs=-1), 400, param="prompt_logprobs")
    assert "prompt_logprobs" not in target.complete(prompt).json()["choices"][0]
    for asked in (0, 1, 2):
        told = target.complete(prompt, prompt_logprobs=asked).json()["choices"][0]
        first, *others = told["prompt_logprobs"]
        assert first is None
        assert len(others) == len(prompt) - 1
        # The prompt's own token is named in any case, and may be one of the likeliest.
        assert all(max(asked, 1) <= len(entry) <= asked + 1 for entry in others)


# ---------------------------------------------------------------- more than there is room for


def test_more_requests_than_run_at_once_are_all_answered(tiny_target: Target) -> None:
    target, most = tiny_target, 0
    with ThreadPoolExecutor(24) as pool:
        asked = [
            pool.submit(target.complete, fresh_prompt(40), max_tokens=60, ignore_eos=True)
            for _ in range(24)
        ]
        while not all(item.done() for item in asked):
            most = max(most, int(metric(target.http, "num_requests_running")))
            time.sleep(0.01)
    bodies = [item.result().json() for item in asked]
    assert [body["usage"]["completion_tokens"] for body in bodies] == [60] * 24
    assert 1 < most <= 8
    wait_until_idle(target)


def test_a_pool_that_is_overrun_answers_everybody(tiny_target: Target) -> None:
    """Twelve times 680 tokens, in a pool of 3,200: seven prompts get in, and then they grow."""
    target = tiny_target
    prompts = [fresh_prompt(380) for _ in range(12)]
    fields = {"max_tokens": 300, "ignore_eos": True}
    before = metric(target.http, "num_preemptions_total")
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda prompt: target.complete(prompt, **fields), prompts))
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [300] * 12
    assert metric(target.http, "num_preemptions_total") > before
    alone = target.complete(prompts[-1], **fields)
    assert text_of(alone.json()) == text_of(answers[-1].json())
    wait_until_idle(target)


# ---------------------------------------------------------------- what is kept


def test_a_changed_tail_finds_what_is_common(target: Target) -> None:
    prompt = fresh_prompt(120)
    changed = [*prompt[:100], *fresh_prompt(20)]
    assert target.complete(prompt).status_code == 200
    found = cached_tokens(target.complete(changed).json())
    # A token or two of the new tail may happen to be the old one.
    assert 100 <= found <= 103


def test_after_a_reset_everything_is_computed(target: Target) -> None:
    prompt = fresh_prompt(120)
    target.complete(prompt)
    assert cached_tokens(target.complete(prompt).json()) > 0
    assert target.http.post("/reset_prefix_cache").status_code == 200
    assert cached_tokens(target.complete(prompt).json()) == 0
