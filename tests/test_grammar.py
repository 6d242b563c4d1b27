"""Grammars on a tokenizer: which tokens they allow, what ends them, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from tokenizers import Tokenizer

from model_worker.grammar import GrammarCompiler, GrammarError, TokenMatcher, num_mask_words
from model_worker.sampling_params import Grammar
from tests.models import EOS_TOKEN_IDS, VOCAB_SIZE, build_tokenizer, demo_source

COSTLY = "(.*a.{0,200}){40}b"  # beyond the bound after some fifty times "a"
PADDED = VOCAB_SIZE + 37  # a model's vocabulary may be larger than its tokenizer's


@cache
def tokenizer() -> Tokenizer:
    return build_tokenizer()


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer().to_str().encode(), PADDED, EOS_TOKEN_IDS)


def matcher_of(kind: str, text: str) -> TokenMatcher:
    return compiler().compile(Grammar(kind, text))  # type: ignore[arg-type]


def allowed(matcher: TokenMatcher, drafts: Sequence[int] = ()) -> list[set[int]]:
    masks = np.full((1 + len(drafts), num_mask_words(PADDED)), 0xFFFFFFFF, dtype=np.uint32)
    matcher.fill(masks, drafts)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def ids(text: str) -> list[int]:
    encoded: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
    return encoded


def advance(matcher: TokenMatcher, text: str) -> None:
    for token in ids(text):
        assert token in allowed(matcher)[0]
        matcher.advance(token)


def test_exactly_the_tokens_that_may_come_are_allowed() -> None:
    """All of the vocabulary, by the text of each token."""
    (found,) = allowed(matcher_of("regex", "the[a-z ]{1,40}"))
    texts = {token: tokenizer().decode([token]) for token in range(VOCAB_SIZE)}
    starts = {t for t, text in texts.items() if text and ("the".startswith(text) or
              (text.startswith("the") and text[3:].replace(" ", "").isalpha()))}  # fmt: skip
    assert found == {token for token in starts if token not in range(4)}
    assert len(found) > 4


def test_ids_that_no_text_has_are_never_allowed() -> None:
    (found,) = allowed(matcher_of("regex", r"(.|\n)*"))
    assert not found & set(range(VOCAB_SIZE, PADDED + 31))
    assert set(EOS_TOKEN_IDS) <= found
    assert not found & {0, 2}  # the special tokens that end nothing


def test_a_complete_answer_may_only_end() -> None:
    matcher = matcher_of("regex", "that")
    advance(matcher, "that")
    assert matcher.is_complete
    assert matcher.problem is None
    assert allowed(matcher) == [set(EOS_TOKEN_IDS)]


@pytest.mark.parametrize("eos", EOS_TOKEN_IDS)
def test_an_answer_that_could_go_on_may_end_with_any_end(eos: int) -> None:
    matcher = matcher_of("regex", "(that)+")
    advance(matcher, "that")
    assert not matcher.is_complete
    assert set(EOS_TOKEN_IDS) < allowed(matcher)[0]
    matcher.advance(eos)
    assert matcher.is_complete


def test_drafts_are_tried_and_taken_back() -> None:
    matcher = matcher_of("json_schema", '{"type": "object", "properties": {"that": {"enum": [1]}},'
                         ' "required": ["that"], "additionalProperties": false}')  # fmt: skip
    answer = ids('{"that": 1}')
    rows = allowed(matcher, answer)
    for row, token in zip(rows, answer, strict=False):
        assert token in row
        assert allowed(matcher)[0] == row
        matcher.advance(token)
    assert matcher.is_complete
    assert len(rows) == len(answer) + 1


def test_rows_behind_a_draft_that_is_not_allowed_are_left_alone() -> None:
    matcher = matcher_of("regex", "that[0-9]{3}")
    right, wrong = ids("that")[0], ids("which")[0]
    rows = allowed(matcher, [right, wrong, right])
    free = set(range(num_mask_words(PADDED) * 32))
    assert rows[1] != free
    assert rows[2:] == [free, free]
    advance(matcher, "that123")
    assert matcher.is_complete


def test_a_draft_of_the_end_is_taken_back_too() -> None:
    matcher = matcher_of("regex", "(that)+")
    advance(matcher, "that")
    before = allowed(matcher)
    rows = allowed(matcher, [EOS_TOKEN_IDS[0], ids("that")[0]])
    assert rows[0] == before[0]
    assert allowed(matcher) == before
    advance(matcher, "that")


def test_a_copy_goes_its_own_way() -> None:
    matcher = matcher_of("regex", "that|those")
    other = matcher.copy()
    advance(matcher, "that")
    assert matcher.is_complete
    advance(other, "those")
    assert other.is_complete


def test_whitespace_between_the_parts_of_json_is_bounded() -> None:
    schema = '{"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}'
    for text in ("[1,2]", "[1, 2]", "[\n  1,\n  2\n]"):
        matcher = matcher_of("json_schema", schema)
        advance(matcher, text)
        assert matcher.is_complete
    matcher = matcher_of("json_schema", schema)
    advance(matcher, "[ ")
    assert ids(" ")[0] not in allowed(matcher)[0]


def test_bytes_of_one_character_come_one_by_one() -> None:
    matcher = matcher_of("regex", "[äöü]")
    tokens = ids("ö")
    assert len(tokens) == 2
    for token in tokens:
        assert token in allowed(matcher)[0]
        matcher.advance(token)
    assert matcher.is_complete


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("json_schema", "nothing", "expected ident"),
        ("json_schema", "[]", "object schema"),
        ("json_schema", '{"type": "wrong"}', "Invalid type: wrong"),
        ("json_schema", '{"not": {}}', 'Unimplemented keys: ["not"]'),
        ("json_schema", '{"x-guidance": {"lenient": true}, "not": {}}', "Unimplemented"),
        ("regex", "a(b", "unclosed group"),
        ("regex", "a(?=b)", "look-ahead"),
        ("lark", "start: other", 'unknown name: "other"'),
        ("lark", "", "Empty grammar"),
    ],
)
def test_what_cannot_be_followed_is_refused_in_one_line(kind: str, text: str, problem: str) -> None:
    with pytest.raises(GrammarError) as refusal:
        matcher_of(kind, text)
    assert problem in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_tokenizer_that_cannot_be_read_is_named() -> None:
    broken = GrammarCompiler(b"{}", VOCAB_SIZE, EOS_TOKEN_IDS)
    with pytest.raises(GrammarError, match="this model's tokenizer cannot follow a grammar"):
        broken.compile(Grammar("regex", "a"))


def test_an_answer_that_costs_too_much_has_a_problem() -> None:
    matcher = matcher_of("regex", COSTLY)
    for _ in range(100):
        allowed(matcher)
        if matcher.problem is not None:
            break
        matcher.advance(ids("a")[0])
    assert matcher.problem is not None
    assert not matcher.is_complete


def test_the_demo_tokenizer_maps_byte_for_byte() -> None:
    """All of its 49,152 tokens: what one token may begin with is what the tokenizer says of it."""
    content = (demo_source().folder / "tokenizer.json").read_bytes()
    demo = Tokenizer.from_buffer(content)
    matcher = GrammarCompiler(content, 49152, [2]).compile(Grammar("regex", "[0-9a-f]+"))
    masks = np.zeros((1, num_mask_words(49152)), dtype=np.uint32)
    matcher.fill(masks, ())
    bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
    texts = demo.decode_batch([[token] for token in range(49152)], skip_special_tokens=False)
    wanted = [t for t, text in enumerate(texts) if text and set(text) <= set("0123456789abcdef")]
    assert np.flatnonzero(bits).tolist() == wanted
