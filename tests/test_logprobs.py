"""Scores in the forms of the two endpoints."""

from __future__ import annotations

import math

import msgspec

from service.answer_text import ScoredToken
from service.logprobs import LEAST_LOGPROB, chat_logprobs, completion_logprobs
from service.vocabulary import Vocabulary
from tests.gateway_kit import byte_ids_of, make_tokenizer

VOCABULARY = make_tokenizer().vocabulary
A, B, LEAD = byte_ids_of("ab")[0], byte_ids_of("ab")[1], byte_ids_of("\U0001f98a")[0]


def test_the_chat_form_has_bytes_and_exactly_the_top_that_was_asked_for() -> None:
    scores = [ScoredToken(A, -0.5, ((A, -0.5), (LEAD, -1.0)), 0, 1), ScoredToken(B, -2.0)]
    first, second = chat_logprobs(scores, VOCABULARY).content
    assert (first.token, first.logprob, first.bytes) == ("a", -0.5, [97])
    assert [(top.token, top.bytes) for top in first.top_logprobs] == [
        ("a", [97]),
        ("\\xf0", [0xF0]),
    ]
    assert second.top_logprobs == ()


def test_the_completions_form_names_the_token_beside_the_top() -> None:
    scores = [
        ScoredToken(A, None, (), 0, 1),
        ScoredToken(B, -3.0, ((A, -0.1), (LEAD, -0.2)), 1, 2),
        ScoredToken(B, -0.1, (), 2, 3),
    ]
    written = completion_logprobs(scores, VOCABULARY)
    assert written.tokens == ("a", "b", "b")
    assert written.token_logprobs == (None, -3.0, -0.1)
    assert written.top_logprobs == (None, {"a": -0.1, "bytes:\\xf0": -0.2, "b": -3.0}, {"b": -0.1})
    assert written.text_offset == (0, 1, 2)


def test_what_cannot_come_is_finite() -> None:
    scores = [ScoredToken(A, -math.inf, ((B, -math.inf),), 0, 1)]
    chat = chat_logprobs(scores, VOCABULARY).content[0]
    assert chat.logprob == chat.top_logprobs[0].logprob == LEAST_LOGPROB
    written = completion_logprobs(scores, VOCABULARY)
    assert written.token_logprobs == (LEAST_LOGPROB,)
    assert b"null" not in msgspec.json.encode(written)


def test_the_vocabulary_of_the_kit_is_one_of_bytes() -> None:
    assert isinstance(VOCABULARY, Vocabulary)
    assert b"".join(map(VOCABULARY.token_bytes, byte_ids_of("x\u732b"))) == "x\u732b".encode()
