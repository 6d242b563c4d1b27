"""A model that says one text over and over, in tokens that cut its characters apart.

Its layers add nothing to the embeddings, and its head maps each token of the text to the next one;
any other token is followed by the text's first.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer

from tests.gateway_kit import BYTE_CHARACTERS
from tests.models import FAMILIES, VOCAB_SIZE, build_case, build_tokenizer, save_tokenizer

TEXT = "naïve 猫 🦊👩\u200d🚀 끝"
# No two tokens are alike, since a token alone decides which one follows.
PIECES = (
    *(b"n", b"a", b"\xc3", b"\xaf", b"ve", b" \xe7", b"\x8c\xab", b" \xf0", b"\x9f\xa6", b"\x8a"),
    *(b"\xf0", b"\x9f\x91", b"\xa9\xe2", b"\x80", b"\x8d\xf0\x9f", b"\x9a\x80", b" \xeb"),
    *(b"\x81", b"\x9d"),
)
assert b"".join(PIECES).decode() == TEXT


def said(num_tokens: int) -> str:
    """The text of its first ``num_tokens`` tokens; half a character at the end is U+FFFD."""
    pieces = [PIECES[index % len(PIECES)] for index in range(num_tokens)]
    return b"".join(pieces).decode("utf-8", "replace")


def save_speaker(folder: Path) -> Path:
    """A safetensors folder with a tokenizer that has a token for each of the pieces."""
    tokenizer, piece_ids = _tokenizer()
    model = build_case(FAMILIES["llama-mqa"])
    width = model.config.hidden_size
    directions = torch.eye(width)[: len(PIECES) + 1]  # of each piece, and of any other token
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            elif "o_proj" in name or "down_proj" in name:
                parameter.zero_()
        embeddings = model.get_input_embeddings().weight
        embeddings.copy_(directions[-1].expand(VOCAB_SIZE, width))
        embeddings[piece_ids] = directions[:-1]
        head = model.get_output_embeddings().weight
        head.zero_()
        head[piece_ids[0]] = directions[-1] + directions[-2]
        head[piece_ids[1:]] = directions[:-2]
    model.save_pretrained(folder)
    save_tokenizer(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def _tokenizer() -> tuple[Tokenizer, list[int]]:
    """The tiny one, its last merges given up for the pieces that it lacks; the pieces' ids."""
    described = json.loads(build_tokenizer().to_str())
    vocabulary: dict[str, int] = described["model"]["vocab"]
    merges = described["model"]["merges"]
    names = ["".join(BYTE_CHARACTERS[byte] for byte in piece) for piece in PIECES]
    by_id = sorted(vocabulary, key=vocabulary.__getitem__)
    for name in names:
        if name not in vocabulary:
            vocabulary[name] = vocabulary.pop(by_id.pop())
            merges.pop()
    return Tokenizer.from_str(json.dumps(described)), [vocabulary[name] for name in names]
