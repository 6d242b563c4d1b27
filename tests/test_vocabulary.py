"""The bytes of each token, however its file writes them."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from service.vocabulary import Vocabulary, readable


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: at for at, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def metaspace() -> Tokenizer:
    pieces = {"<0xF0>": 0, "<0x0A>": 1, "\u2581the": 2, "caf\u00e9": 3}
    tokenizer = Tokenizer(models.BPE(pieces, []))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


@pytest.mark.parametrize(
    "text", ["plain words", " caf\u00e9\n", "\u732b \U0001f98a", "\x00\x7f\xad"]
)
def test_the_bytes_of_byte_level_tokens_are_those_of_the_text(text: str) -> None:
    tokenizer = byte_level()
    vocabulary = Vocabulary(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) == len(text.encode())  # no merges: a token is a byte
    assert b"".join(map(vocabulary.token_bytes, ids)) == text.encode()


def test_added_tokens_are_as_they_are_written_and_other_ids_empty() -> None:
    tokenizer = byte_level()
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.token_bytes(tokenizer.token_to_id("<|end|>")) == b"<|end|>"
    assert vocabulary.token_bytes(tokenizer.get_vocab_size() + 5) == b""


def test_pieces_with_byte_fallback() -> None:
    vocabulary = Vocabulary(metaspace())
    contents = [vocabulary.token_bytes(token_id) for token_id in range(4)]
    assert contents == [b"\xf0", b"\n", b" the", "caf\u00e9".encode()]


def test_parts_of_characters_are_readable() -> None:
    assert readable("caf\u00e9".encode()) == "caf\u00e9"
    assert readable(b"a\xf0\x9f") == "a\\xf0\\x9f"
