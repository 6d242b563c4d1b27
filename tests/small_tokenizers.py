"""Small tokenizers of the kinds there are, for what must hold with any of them."""

from __future__ import annotations

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from service.tokenizer import ModelTokenizer
from tests.models import CHAT_TEMPLATE, build_tokenizer, demo_source

SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
_WORDS = "hello world the user assistant system answer is 12 and"


@functools.cache
def tokenizer_of(kind: str) -> ModelTokenizer:
    if kind == "demo":
        return ModelTokenizer(AutoTokenizer.from_pretrained(demo_source().folder))
    made = {
        "byte_level": build_tokenizer,
        "byte_level_with_space": _byte_level_with_space,
        "metaspace_always": lambda: _metaspace("always"),
        "metaspace_first": lambda: _metaspace("first"),
        "prepended": _prepended,
        "stripping": _stripping,
        "at_the_start": _at_the_start,
    }[kind]()
    return wrapped(made)


def wrapped(tokenizer: Tokenizer) -> ModelTokenizer:
    fast: type = PreTrainedTokenizerFast
    return ModelTokenizer(fast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE))


def _byte_level_with_space() -> Tokenizer:
    tokenizer = build_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def _unigram() -> Tokenizer:
    """Pieces with U+2581 for a space, as SentencePiece models have; bytes for all else."""
    pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    pieces += [(character, -5.0) for character in "▁abcdefghijklmnopqrstuvwxyz0123456789.,"]
    pieces += [(mark + word, -2.0) for word in _WORDS.split() for mark in ("", "▁")]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return tokenizer


def _metaspace(scheme: str) -> Tokenizer:
    tokenizer = _unigram()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)]
    )
    return tokenizer


def _prepended() -> Tokenizer:
    """The older way of Llama's: a normalizer that writes the first space."""
    tokenizer = _unigram()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _stripping() -> Tokenizer:
    """Its added tokens swallow the white space after them."""
    tokenizer = build_tokenizer()
    described = [AddedToken(text, special=True, rstrip=True) for text in SPECIALS]
    fresh = Tokenizer(tokenizer.model)
    fresh.pre_tokenizer, fresh.decoder = tokenizer.pre_tokenizer, tokenizer.decoder
    fresh.add_special_tokens(described)
    return fresh


def _at_the_start() -> Tokenizer:
    """An added token at the very start of a text is not found there, but spelled out."""
    tokenizer = _unigram()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    fresh = Tokenizer(tokenizer.model)
    fresh.pre_tokenizer = tokenizer.pre_tokenizer
    fresh.decoder = decoders.Metaspace(prepend_scheme="first")
    fresh.add_tokens([AddedToken(text, single_word=True) for text in ("s", "im")])
    return fresh
