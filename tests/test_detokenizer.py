"""Incremental detokenizing: nothing lost, nothing early, never half a character."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from service.detokenizer import Detokenizer
from tests import models
from tests.gateway_kit import byte_ids_of, ids_of

TOKENIZER = models.build_tokenizer()
TEXT = "naïve 猫 🦊👩‍🚀 끝"
byte_ids = st.sampled_from(byte_ids_of("".join(map(chr, range(128)))) + byte_ids_of("é猫🦊끝"))


def decode(ids: list[int]) -> str:
    return TOKENIZER.decode(ids, skip_special_tokens=True)


def pieces_of(ids: list[int] | tuple[int, ...], context: tuple[int, ...] = ()) -> list[str]:
    detokenizer = Detokenizer(decode, context)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


@given(st.lists(st.integers(0, models.VOCAB_SIZE - 1), max_size=80))
@settings(max_examples=150, deadline=None)
def test_pieces_of_random_tokens_join_to_the_whole_text(ids: list[int]) -> None:
    assert "".join(pieces_of(ids)) == decode(ids)


@given(st.lists(byte_ids, max_size=60))
@settings(max_examples=150, deadline=None)
def test_pieces_of_random_bytes_join_to_the_whole_text(ids: list[int]) -> None:
    assert "".join(pieces_of(ids)) == decode(ids)


@pytest.mark.parametrize("length", range(1, len(byte_ids_of(TEXT)) + 1))
def test_replacement_character_only_where_the_answer_ends_inside_a_character(length: int) -> None:
    *pieces, tail = pieces_of(byte_ids_of(TEXT)[:length])
    assert "\ufffd" not in "".join(pieces)
    ends_inside = TEXT.encode()[:length].decode(errors="ignore").encode() != TEXT.encode()[:length]
    assert tail == ("\ufffd" if ends_inside else "")


def test_each_character_comes_with_the_token_that_completes_it() -> None:
    assert pieces_of(byte_ids_of("a猫b")) == ["a", "", "", "猫", "b", ""]


def test_special_tokens_give_no_text() -> None:
    ids = [*ids_of("one"), models.TURN_END_TOKEN_ID, *ids_of(" two"), models.EOS_TOKEN_ID]
    assert "".join(pieces_of(ids)) == "one two"


def test_a_special_token_within_a_character_leaves_it_whole() -> None:
    first, *rest = byte_ids_of("猫")
    assert "".join(pieces_of([first, models.TURN_END_TOKEN_ID, *rest])) == "猫"


def test_the_replacement_character_itself_survives() -> None:
    assert "".join(pieces_of(byte_ids_of("a\ufffdb"))) == "a\ufffdb"


def test_context_that_ends_inside_a_character_is_not_used() -> None:
    context = byte_ids_of("猫")[:1]
    assert "".join(pieces_of(ids_of("you"), context)) == "you"


def test_time_is_linear_even_over_bytes_that_are_no_text() -> None:
    def seconds(ids: tuple[int, ...]) -> float:
        start = time.perf_counter()
        pieces_of(ids)
        return time.perf_counter() - start

    for ids in (ids_of("the and you "), byte_ids_of("猫")[:1], byte_ids_of("猫")[1:2]):
        short, long = ids * (2000 // len(ids)), ids * (16000 // len(ids))
        assert seconds(long) < 8 * 4 * max(seconds(short), 0.002)


def sentencepiece_like() -> Tokenizer:
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁Once", "▁upon", "▁a"]
    tokenizer = Tokenizer(
        BPE(vocab={word: index for index, word in enumerate(words)}, merges=[], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def test_byte_fallback_and_leading_spaces() -> None:
    tokenizer = sentencepiece_like()
    fox = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "🦊".encode()]
    ids = [tokenizer.token_to_id(word) for word in ("▁Once", "▁upon")] + fox + fox
    detokenizer = Detokenizer(tokenizer.decode)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert pieces == ["Once", " upon", "", "", "", "🦊", "", "", "", "🦊"]
    assert detokenizer.finish() == ""


def test_a_continuation_keeps_its_leading_space() -> None:
    tokenizer = sentencepiece_like()
    once, upon = tokenizer.token_to_id("▁Once"), tokenizer.token_to_id("▁upon")
    assert Detokenizer(tokenizer.decode, [once]).push(upon) == " upon"
    assert Detokenizer(tokenizer.decode).push(upon) == "upon"
