"""Model cards, scripts and apps for the gateway's tests; no model and no network beyond loopback.

The tokenizer is the tiny byte-level one of tests/models.py: every id decodes and every text
round-trips.
"""

from __future__ import annotations

import functools
import hashlib
import tempfile
from pathlib import Path

from model_worker.protocol import ModelCard, TokenizerFile
from service.tokenizer import ModelTokenizer
from tests import models

MODEL_NAME = "tiny"
MAX_MODEL_LEN = 2048
BLOCK_SIZE = 16


def make_card(
    *,
    chat_template: str | None = models.TOOL_CHAT_TEMPLATE,
    max_model_len: int = MAX_MODEL_LEN,
    names: tuple[str, ...] = (MODEL_NAME,),
) -> ModelCard:
    return ModelCard(
        model="tiny-random",
        served_model_names=names,
        fingerprint="0123456789abcdef",
        block_size=BLOCK_SIZE,
        hash_version="1",
        max_model_len=max_model_len,
        vocab_size=models.VOCAB_SIZE,
        eos_token_ids=models.EOS_TOKEN_IDS,
        tokenizer_files=tokenizer_files(chat_template),
        kv_bytes_per_token=1024,
        num_blocks=1024,
        dtype="float32",
        device="cpu",
    )


@functools.cache
def tokenizer_files(chat_template: str | None) -> tuple[TokenizerFile, ...]:
    with tempfile.TemporaryDirectory() as folder:
        models.save_tokenizer(folder, chat_template=chat_template)
        return tuple(
            TokenizerFile(
                name=path.name,
                content=path.read_bytes(),
                sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
            )
            for path in sorted(Path(folder).iterdir())
        )


@functools.cache
def make_tokenizer(chat_template: str | None = models.TOOL_CHAT_TEMPLATE) -> ModelTokenizer:
    return ModelTokenizer.from_card(make_card(chat_template=chat_template))


def ids_of(text: str) -> tuple[int, ...]:
    """The token ids of ``text``, without special tokens."""
    return tuple(models.build_tokenizer().encode(text, add_special_tokens=False).ids)


def byte_ids_of(text: str) -> tuple[int, ...]:
    """One token per byte of UTF-8, so that characters are split over tokens."""
    tokenizer = models.build_tokenizer()
    return tuple(tokenizer.token_to_id(BYTE_CHARACTERS[byte]) for byte in text.encode("utf-8"))


def _byte_characters() -> dict[int, str]:
    """How byte-level vocabularies write each byte: printable ones as they are."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + index) for index, byte in enumerate(others)
    }


BYTE_CHARACTERS = _byte_characters()
