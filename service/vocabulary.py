"""What each token id stands for, in bytes.

Owns the ways in which tokenizer files write bytes as text. Knows nothing of decoding whole answers,
which is the tokenizer's: here a token stands alone, and may be a part of a character.
"""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["Vocabulary", "readable"]

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # what SentencePiece writes for a space


class Vocabulary:
    """Of a fast tokenizer's ``backend`` (tokenizers.Tokenizer)."""

    def __init__(self, backend: Any) -> None:
        self._piece_of = backend.id_to_token
        self._added = {
            token_id: token.content.encode()
            for token_id, token in backend.get_added_tokens_decoder().items()
        }
        decoder = json.loads(backend.to_str()).get("decoder") or {}
        kinds = {part.get("type") for part in decoder.get("decoders", (decoder,))}
        self._byte_of = _bytes_by_character() if "ByteLevel" in kinds else None

    def token_bytes(self, token_id: int) -> bytes:
        """Empty for an id that is no token."""
        added: bytes | None = self._added.get(token_id)
        if added is not None:
            return added
        piece: str | None = self._piece_of(token_id)
        if piece is None:
            return b""
        if self._byte_of is not None:
            return bytes(self._byte_of[char] for char in piece if char in self._byte_of)
        found = _BYTE_PIECE.fullmatch(piece)
        return bytes.fromhex(found[1]) if found else piece.replace(_SPACE, " ").encode()


def readable(content: bytes) -> str:
    """As text; bytes that are none, of a character that several tokens make, as ``\\xf0``."""
    return content.decode("utf-8", "backslashreplace")


def _bytes_by_character() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte (Radford et al., "Language
    Models are Unsupervised Multitask Learners", 2019): itself where it is printable in Latin-1, and
    the next free code point from 256 on for the others."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    characters = {chr(byte): byte for byte in printable}
    characters |= {chr(256 + number): byte for number, byte in enumerate(others)}
    return characters
