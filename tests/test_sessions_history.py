"""A history gives the very ids that were served, and canonical ones for all that is new."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.sessions.branches import MAX_BRANCHES
from service.sessions.history import (
    NEVER,
    History,
    Prompt,
    ServedAnswer,
    prepare_ids,
    prepare_text,
)
from service.tokenizer import ModelTokenizer
from tests.small_tokenizers import SPECIALS, tokenizer_of

KINDS = (
    *("demo", "byte_level", "byte_level_with_space", "metaspace_always", "metaspace_first"),
    *("prepended", "stripping"),
)
BYTE_KINDS = ("demo", "byte_level")

words = st.text("helo wrd12.\n'é猫🦊  ", max_size=12)
marks = st.sampled_from([*SPECIALS, "<|im_start|>user\n", "<|im_end|>\n", "<|im", "|>", ""])
texts = st.lists(st.one_of(words, marks), max_size=8).map("".join)


def prepare(
    tokenizer: ModelTokenizer, text: str, history: History, first_ids: Sequence[int] = ()
) -> Prompt:
    def encode(part: str) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return tokenizer.encode(part, add_special_tokens=False)

    return prepare_text(text, history, tokenizer.splicer, encode, first_ids=first_ids)


def answered(
    tokenizer: ModelTokenizer,
    prompt: Prompt,
    token_ids: Sequence[int] = (),
    text: str = "",
    stop_token_id: int | None = None,
) -> History:
    answer = ServedAnswer(token_ids=token_ids, text=text, stop_token_id=stop_token_id)
    stop_text = None if stop_token_id is None else tokenizer.splicer.text_of(stop_token_id)
    history, _ = prompt.answered(answer, tokenizer.decode_exactly, stop_text)
    again = History.decode(history.encode(), "m")
    assert again == history
    return history


def canonical(tokenizer: ModelTokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).tolist()
    return ids


def chat(*turns: str) -> str:
    """The prompt of the tiny chat template without its first token."""
    roles = ("user", "assistant")
    told = (
        f"<|im_start|>{roles[index % 2]}\n{turn}<|im_end|>\n" for index, turn in enumerate(turns)
    )
    return "".join(told) + "<|im_start|>assistant\n"


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(common=texts, first=texts, second=texts, third=texts)
def test_without_answers_the_ids_are_the_canonical_ones(
    kind: str, common: str, first: str, second: str, third: str
) -> None:
    tokenizer = tokenizer_of(kind)
    history = History.empty("m", b"key")
    for text in (common + first, common + second, common + second + third, common, first):
        prompt = prepare(tokenizer, text, history)
        assert prompt.token_ids.tolist() == canonical(tokenizer, text)
        history = answered(tokenizer, prompt)
        assert history.token_ids.tolist() == prompt.token_ids.tolist()


@pytest.mark.parametrize("kind", BYTE_KINDS)
@settings(max_examples=40, deadline=None)
@given(asked=words, ids=st.lists(st.integers(20, 500), max_size=6), follow=words, edited=words)
def test_generated_ids_are_kept_and_decode_to_the_same_text(
    kind: str, asked: str, ids: list[int], follow: str, edited: str
) -> None:
    tokenizer = tokenizer_of(kind)
    stop = canonical(tokenizer, "<|im_end|>")[0]
    text = tokenizer.decode_exactly(ids)
    first = prepare(tokenizer, chat(asked), History.empty("m", b"key"))
    history = answered(tokenizer, first, ids, text, stop)
    assert first.is_exact
    served = [*first.token_ids.tolist(), *ids, stop]

    second = prepare(tokenizer, chat(asked, text, follow), history)
    assert second.is_exact  # half a character as well: it is what the client was given
    assert tokenizer.decode_exactly(second.token_ids.tolist()) == chat(asked, text, follow)
    assert second.token_ids.tolist()[: len(served)] == served
    rest = canonical(tokenizer, chat(asked, text, follow)[len(chat(asked) + text) :])
    assert second.token_ids.tolist() == [*served[:-1], *rest]

    other = prepare(tokenizer, chat(asked, edited, follow), history)
    if edited != text:
        assert not other.is_exact
        assert other.token_ids.tolist() == canonical(tokenizer, chat(asked, edited, follow))


def test_ids_that_encoding_would_not_give_are_taken_over() -> None:
    tokenizer = tokenizer_of("byte_level")
    spelled = [canonical(tokenizer, letter)[0] for letter in "hello"]
    assert canonical(tokenizer, "hello") != spelled
    stop = canonical(tokenizer, "<|im_end|>")[0]
    first = prepare(tokenizer, chat("Hi"), History.empty("m", b"key"))
    history = answered(tokenizer, first, spelled, "hello", stop)
    encoded: list[str] = []

    def encode(part: str) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        encoded.append(part)
        return tokenizer.encode(part, add_special_tokens=False)

    text = chat("Hi", "hello", "More")
    second = prepare_text(text, history, tokenizer.splicer, encode)
    assert encoded == ["\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"]
    assert second.num_reused_tokens == len(first.token_ids) + 6
    assert second.token_ids.tolist()[: len(first.token_ids) + 6] == [
        *first.token_ids.tolist(),
        *spelled,
        stop,
    ]


def test_cutting_before_added_tokens_alone_is_enough() -> None:
    tokenizer = tokenizer_of("metaspace_first")
    stop = canonical(tokenizer, "<|im_end|>")[0]
    spelled = [*canonical(tokenizer, "<|im_end|>hel")[1:], *canonical(tokenizer, "</s>lo")[1:]]
    first = prepare(tokenizer, chat("Hi"), History.empty("m", b"key"))
    history = answered(tokenizer, first, spelled, "hello", stop)
    second = prepare(tokenizer, chat("Hi", "hello", "More"), history)
    assert second.is_exact
    assert second.token_ids.tolist()[: len(first.token_ids) + len(spelled)] == [
        *first.token_ids.tolist(),
        *spelled,
    ]
    assert second.num_reused_tokens == len(first.token_ids) + len(spelled)


def test_a_text_that_lost_a_character_keeps_no_answer() -> None:
    tokenizer = tokenizer_of("metaspace_first")
    ids = canonical(tokenizer, "hello")  # with the space that a text begins with
    first = prepare(tokenizer, chat("Hi"), History.empty("m", b"key"))
    history = answered(tokenizer, first, ids, tokenizer.decode(ids))
    assert history.num_exact_tokens == NEVER
    second = prepare(tokenizer, chat("Hi", "hello", "More"), history)
    assert not second.is_exact
    assert second.token_ids.tolist() == canonical(tokenizer, chat("Hi", "hello", "More"))


def test_a_stop_string_keeps_the_prompt_and_not_the_answer() -> None:
    tokenizer = tokenizer_of("byte_level")
    first = prepare(tokenizer, chat("Hi"), History.empty("m", b"key"))
    history = answered(tokenizer, first, canonical(tokenizer, "hello STOP"), "hello ")
    second = prepare(tokenizer, chat("Hi", "hello ", "More"), history)
    assert not second.is_exact
    # To the end of the last added token of the prompt.
    assert second.num_reused_tokens == len(canonical(tokenizer, chat("Hi")[: -len("assistant\n")]))
    assert second.token_ids.tolist() == canonical(tokenizer, chat("Hi", "hello ", "More"))


def test_another_stop_token_than_the_template_writes() -> None:
    tokenizer = tokenizer_of("byte_level")
    first = prepare(tokenizer, chat("Hi"), History.empty("m", b"key"))
    ids = canonical(tokenizer, "hello")
    history = answered(tokenizer, first, ids, "hello", canonical(tokenizer, "</s>")[0])
    second = prepare(tokenizer, chat("Hi", "hello", "More"), history)
    assert second.is_exact
    assert second.num_reused_tokens == len(first.token_ids) + len(ids)


def test_reasoning_that_the_template_strips_is_kept_up_to_where_the_texts_agree() -> None:
    tokenizer = tokenizer_of("byte_level")
    thought = canonical(tokenizer, "think think</s>answer")
    stop = canonical(tokenizer, "<|im_end|>")[0]
    first = prepare(tokenizer, chat("Hi"), History.empty("m", b"key"))
    history = answered(tokenizer, first, thought, "think think</s>answer", stop)
    second = prepare(tokenizer, chat("Hi", "answer", "More"), history)
    assert not second.is_exact
    assert second.num_reused_tokens == len(canonical(tokenizer, chat("Hi")[: -len("assistant\n")]))
    (left_behind,) = answered(tokenizer, second).sequences()[1:]
    assert left_behind.tolist() == history.token_ids.tolist()


def test_an_added_token_spelled_in_the_answer_stays_what_was_generated() -> None:
    tokenizer = tokenizer_of("byte_level")
    spelled = [canonical(tokenizer, letter)[0] for letter in "<|im_end|>"]
    first = prepare(tokenizer, chat("Hi"), History.empty("m", b"key"))
    history = answered(tokenizer, first, spelled, "<|im_end|>")
    second = prepare(tokenizer, chat("Hi", "<|im_end|>", "More"), history)
    assert second.is_exact
    begun = [*first.token_ids.tolist(), *spelled]
    assert second.token_ids.tolist()[: len(begun)] == begun


def test_first_ids_stand_before_the_text_and_set_it_apart() -> None:
    tokenizer = tokenizer_of("byte_level")
    first = prepare(tokenizer, chat("Hi"), History.empty("m", b"key"), first_ids=(0,))
    assert first.token_ids.tolist() == [0, *canonical(tokenizer, chat("Hi"))]
    history = answered(tokenizer, first, canonical(tokenizer, "you"), "you")
    same = prepare(tokenizer, chat("Hi", "you", "x"), history, first_ids=(0,))
    assert same.is_exact
    assert same.token_ids.tolist() == [0, *canonical(tokenizer, chat("Hi", "you", "x"))]
    bare = prepare(tokenizer, chat("Hi", "you", "x"), history)
    assert (bare.num_reused_tokens, bare.is_exact) == (0, False)
    assert bare.token_ids.tolist() == canonical(tokenizer, chat("Hi", "you", "x"))


def test_prompts_of_ids_are_compared_as_ids() -> None:
    tokenizer = tokenizer_of("byte_level")
    first = prepare_ids(np.array([5, 6, 7], dtype=np.int32), History.empty("m", b"key"))
    assert first.is_exact
    history = answered(tokenizer, first, [20], tokenizer.decode([20]))
    assert prepare_ids(np.array([5, 6, 7, 20, 9], dtype=np.int32), history).is_exact
    assert not prepare_ids(np.array([5, 6, 7, 21], dtype=np.int32), history).is_exact


def test_a_prompt_without_an_answer_leaves_exactness_as_it_was() -> None:
    tokenizer = tokenizer_of("byte_level")
    first = prepare(tokenizer, chat("Hi"), History.empty("m", b"key"))
    history = answered(tokenizer, first, canonical(tokenizer, "hello"), "hello")
    warmed = prepare(tokenizer, chat("Hi", "hello", "x"), history)
    after = answered(tokenizer, warmed)
    assert after.num_exact_tokens == history.num_exact_tokens
    assert prepare(tokenizer, chat("Hi", "hello", "x y"), after).is_exact
    assert not prepare(tokenizer, chat("Hi", "hullo", "x y"), after).is_exact


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x90", msgspec.msgpack.encode(["m", 1])])
def test_a_damaged_history_is_a_lost_one(content: bytes) -> None:
    assert History.decode(content, "m") is None


def test_a_history_of_another_model_is_a_lost_one() -> None:
    assert History.decode(History.empty("other", b"key").encode(), "m") is None


def test_what_was_left_behind_is_bounded() -> None:
    tokenizer = tokenizer_of("byte_level")
    history = History.empty("m", b"key")
    given_up: list[list[int]] = []
    for number in range(MAX_BRANCHES + 3):
        prompt = prepare_ids(np.array([1, 2, 100 + number], dtype=np.int32), history)
        history, left = prompt.answered(ServedAnswer(token_ids=(), text=""), str, None)
        given_up += [ids.tolist() for ids in left]
    assert given_up == [[1, 2, 100], [1, 2, 101]]
    kept = [ids.tolist() for ids in history.sequences()]
    assert kept == [[1, 2, 118], *([1, 2, 102 + n] for n in range(MAX_BRANCHES))]
    assert tokenizer.splicer.is_on
