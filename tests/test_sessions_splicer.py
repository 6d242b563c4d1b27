"""Each tokenizer is tried when it is loaded: where it may be cut, and whether at all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import AddedToken as TokenizersAddedToken

from service.sessions.splicer import AddedToken, Boundary, Splicer
from tests.models import build_tokenizer
from tests.small_tokenizers import tokenizer_of, wrapped

TEXT = "<|im_start|>user\nhello<|im_end|>\n"


@pytest.mark.parametrize(
    ("kind", "cuts"),
    [
        ("demo", [12, 32]),
        ("byte_level", [12, 32]),
        ("byte_level_with_space", [12, 32]),
        ("metaspace_always", [12, 32]),
        ("prepended", [12, 32]),
        ("metaspace_first", [0, 22]),  # the start of a text differs from what follows a token
        ("stripping", [0, 22]),  # what follows a token may be swallowed by it
    ],
)
def test_where_a_text_may_be_cut(kind: str, cuts: list[int]) -> None:
    tokenizer = tokenizer_of(kind)
    assert (tokenizer.splicer.is_on, tokenizer.splicer.problem) == (True, "")
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    found = tokenizer.splicer.boundaries(TEXT, ids)
    assert [boundary.num_chars for boundary in found] == cuts
    for boundary in found:
        assert tokenizer.splicer.is_boundary(TEXT, boundary.num_chars)
        left = tokenizer.encode(TEXT[: boundary.num_chars], add_special_tokens=False)
        assert left.tolist() == ids.tolist()[: boundary.num_tokens]
    assert not tokenizer.splicer.is_boundary(TEXT, 14)


def test_tokens_that_are_found_only_as_whole_words_are_no_place_to_cut() -> None:
    splicer = tokenizer_of("at_the_start").splicer
    assert splicer.problem == "the tokenizer has no added token to cut at"
    assert splicer.boundaries("s im", np.array([1], dtype=np.int32)) == []
    assert not splicer.is_boundary("s im", 1)
    assert splicer.is_boundary("s im", 0)


def test_a_tokenizer_whose_pieces_differ_from_the_whole_is_found_out() -> None:
    def encode(texts: Sequence[str]) -> list[NDArray[np.int32]]:
        # The first id tells the text's length: nothing encoded apart is part of the whole.
        return [np.array([len(text), *text.encode()], dtype=np.int32) for text in texts]

    splicer = Splicer(encode, [AddedToken(0, "<|im_end|>")])
    assert not splicer.is_on
    assert splicer.problem == "the tokenizer encodes a text's pieces differently from the whole"
    assert splicer.text_of(0) == "<|im_end|>"


def test_tokens_that_overlap_others_are_no_place_to_cut() -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens(
        [TokenizersAddedToken(text) for text in ("<|im_end|><|", "[a]", "x[a]x", "||", "|-|")]
    )
    splicer = wrapped(tokenizer).splicer
    text = "<|im_start|>[a]||<s>|-|<|im_end|>"  # <|im_start|> begins as another token ends
    assert [at for at in range(len(text) + 1) if splicer.is_boundary(text, at)] == [0, 17, 20]


def test_an_id_that_stands_for_no_written_token_gives_no_boundary() -> None:
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer.encode("hello<|im_end|>", add_special_tokens=False)
    splicer = tokenizer.splicer
    assert splicer.boundaries("hello<|im_end|>", ids) == [Boundary(15, len(ids))]
    assert splicer.boundaries("hello, hello", ids) == []


def test_a_tokenizer_that_cannot_be_cut_is_told_of_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrapped(build_tokenizer())
    assert caplog.text == ""
    tokenizer_of.__wrapped__("at_the_start")
    assert "sessions re-encode every turn: the tokenizer has no added token" in caplog.text
