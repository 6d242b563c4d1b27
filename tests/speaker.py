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
    """A safetensors folder with the tokenizer whose last ids are the text's tokens."""
    model = build_case(FAMILIES["llama-mqa"])
    first_id = VOCAB_SIZE - len(PIECES)
    width = model.config.hidden_size
    directions = torch.eye(width)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            elif "o_proj" in name or "down_proj" in name or "lm_head" in name:
                parameter.zero_()
        embeddings = model.get_input_embeddings().weight
        head = model.get_output_embeddings().weight
        embeddings.copy_(directions[len(PIECES)].expand(VOCAB_SIZE, width))
        embeddings[first_id:] = directions[: len(PIECES)]
        head[first_id] = directions[len(PIECES)] + directions[len(PIECES) - 1]
        head[first_id + 1 :] = directions[: len(PIECES) - 1]
    model.save_pretrained(folder)
    save_tokenizer(folder)
    _tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def _tokenizer() -> Tokenizer:
    """The tiny one, its last merges given up for the text's tokens, which no text encodes to."""
    described = json.loads(build_tokenizer().to_str())
    vocabulary = described["model"]["vocab"]
    del described["model"]["merges"][-len(PIECES) :]
    first_id = VOCAB_SIZE - len(PIECES)
    kept = {token: token_id for token, token_id in vocabulary.items() if token_id < first_id}
    spelled = ("".join(BYTE_CHARACTERS[byte] for byte in piece) for piece in PIECES)
    # A single byte has a token already: its twin's name is never decoded to, so give it that id.
    for token_id, token in enumerate(spelled, start=first_id):
        kept[token] = token_id
    described["model"]["vocab"] = kept
    return Tokenizer.from_str(json.dumps(described))
