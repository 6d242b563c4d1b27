"""The main job on the demo model: the second request computes only what is new, and says so, and
answers what it would have answered without a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessageParam
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.demo import mt_bench, policy_text
from tests.http_kit import events_of, metric
from tests.models import DEMO_CACHE_DIR, demo_source
from tests.server_kit import real_target
from tests.target import Target, cached_tokens, streamed, text_of

Message = dict[str, str]

ANSWER_TOKENS = 12
SYSTEM_CHARACTERS = 2400  # some 500 tokens


def arguments(*more: str) -> Sequence[str]:
    return ("--model", "demo", "--model-cache-dir", str(DEMO_CACHE_DIR), "--max-model-len", "2048",
            *more)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(demo_source().folder)
    return loaded


@pytest.fixture(scope="module")
def target(tokenizer: PreTrainedTokenizerBase) -> Iterator[Target]:
    with real_target("demo", *arguments()) as found:
        yield found


@pytest.fixture(scope="module")
def uncached(tokenizer: PreTrainedTokenizerBase) -> Iterator[Target]:
    """Without a cache, and with chunks and blocks of other sizes."""
    sizes = ("--block-size", "16", "--max-num-batched-tokens", "160")
    with real_target("demo", *arguments("--cache", "none", *sizes)) as found:
        yield found


def conversation(*turns: str) -> list[Message]:
    roles = ("user", "assistant")
    said = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return [{"role": "system", "content": policy_text()[:SYSTEM_CHARACTERS]}, *said]


def ask(target: Target, messages: list[Message], **fields: Any) -> Any:
    options = {"max_tokens": ANSWER_TOKENS, "ignore_eos": True, **fields}
    return target.chat(messages=messages, **options).json()


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text_ids(tokenizer, str(text))


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def num_common(left: Sequence[int], right: Sequence[int]) -> int:
    same = 0
    while same < min(len(left), len(right)) and left[same] == right[same]:
        same += 1
    return same


def test_the_second_request_computes_only_what_is_new(
    target: Target, uncached: Target, tokenizer: PreTrainedTokenizerBase
) -> None:
    questions = [first for first, _ in mt_bench()[:3]]
    prompts = [prompt_ids(tokenizer, conversation(question)) for question in questions]
    before = metric(target.http, "prompt_tokens_computed_total")

    bodies = [ask(target, conversation(question)) for question in questions]
    assert [body["usage"]["prompt_tokens"] for body in bodies] == [len(ids) for ids in prompts]
    shared = [0, num_common(prompts[0], prompts[1])]
    shared.append(max(num_common(prompts[index], prompts[2]) for index in (0, 1)))
    assert all(count > 450 for count in shared[1:])
    assert [cached_tokens(body) for body in bodies] == shared
    computed = metric(target.http, "prompt_tokens_computed_total") - before
    assert computed == sum(map(len, prompts)) - sum(shared)

    alone = ask(uncached, conversation(questions[1]))
    assert cached_tokens(alone) == 0
    assert text_of(bodies[1]) == text_of(alone)
    assert alone["usage"]["completion_tokens"] == ANSWER_TOKENS


def test_a_stream_says_the_same_and_what_was_cached(target: Target) -> None:
    messages = conversation("May I bring my cat?")
    plain = ask(target, messages)
    response = target.chat(
        messages=messages,
        max_tokens=ANSWER_TOKENS,
        ignore_eos=True,
        stream=True,
        stream_options={"include_usage": True},
    )
    *events, usage, done = events_of(response)
    assert streamed([*events, done]) == text_of(plain)
    prompt_tokens = plain["usage"]["prompt_tokens"]
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == prompt_tokens
    assert cached_tokens(usage) == prompt_tokens - 1
    assert cached_tokens(plain) < prompt_tokens - 1


def test_the_next_turn_hits_through_the_end_of_the_answer(
    target: Target, uncached: Target, tokenizer: PreTrainedTokenizerBase
) -> None:
    question, follow_up = mt_bench()[5]
    first = ask(target, conversation(question))
    answer = text_of(first)
    history = conversation(question, answer, follow_up)
    second = ask(target, history)

    # What the first turn left behind: its prompt and its answer, but for the last token, whose KV
    # nothing needed.
    written = prompt_ids(tokenizer, conversation(question)) + text_ids(tokenizer, answer)
    assert len(text_ids(tokenizer, answer)) == ANSWER_TOKENS
    expected = num_common(written[:-1], prompt_ids(tokenizer, history))
    assert cached_tokens(second) == expected
    assert expected > first["usage"]["prompt_tokens"]
    assert text_of(second) == text_of(ask(uncached, history))


def test_the_official_client_sees_the_cached_tokens_grow(target: Target) -> None:
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": "Answer in one short sentence."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    cached = []
    for _ in range(3):
        stream = target.openai.chat.completions.create(
            model=target.model,
            messages=messages,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens or 0)
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": "And of the country to the south of it?"})
    assert cached[0] < cached[1] < cached[2]


def test_a_stop_string_in_real_text_never_leaks(target: Target) -> None:
    prompt = "Count from one to twenty in words, separated by commas."
    whole = text_of(target.chat(prompt, max_tokens=14, ignore_eos=True).json())
    stop = whole[15:27]
    for given, expected in ((stop, whole[: whole.index(stop)]), (stop + "zzz", whole)):
        fields = {"max_tokens": 14, "ignore_eos": True, "stop": [given]}
        assert text_of(target.chat(prompt, **fields).json()) == expected
        assert streamed(events_of(target.chat(prompt, stream=True, **fields))) == expected


def test_calls_that_the_models_template_would_drop_are_refused(target: Target) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Is the ferry running?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "cancelled"},
    ]
    response = target.chat(messages=messages)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "not_expressible"
    assert "tool_calls" in response.json()["error"]["message"]
