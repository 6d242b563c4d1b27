"""Token ids as bytes whose order is the order of the tokens.

Owns the byte form (big-endian unsigned 32 bit, no separators) and the common prefix of two such
strings. It is what lets the tree compare, sort and search token ids at the speed of memcmp. Knows
nothing of blocks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TOKEN_BYTES = 4
_FEW_BYTES = 1024  # up to here one big-integer xor is quicker than two numpy views

TokenIds = NDArray[np.int32]
TokenBytes = bytes | bytearray


def encode_tokens(token_ids: TokenIds) -> bytes:
    """The byte form of a 1-D int32 array: 4 bytes per token."""
    assert token_ids.ndim == 1, "token ids are a flat array"
    assert token_ids.dtype == np.int32, f"token ids are int32, not {token_ids.dtype}"
    return token_ids.astype(">u4").tobytes()


def decode_tokens(encoded: TokenBytes) -> TokenIds:
    """The inverse of :func:`encode_tokens`."""
    return np.frombuffer(encoded, dtype=">u4").astype(np.int32)


def num_common_tokens(left: TokenBytes, right: TokenBytes) -> int:
    """How many leading tokens two byte forms share."""
    length = min(len(left), len(right))
    left, right = left[:length], right[:length]
    if left == right:
        return length // TOKEN_BYTES
    if length <= _FEW_BYTES:
        difference = int.from_bytes(left, "big") ^ int.from_bytes(right, "big")
        return (length - (difference.bit_length() + 7) // 8) // TOKEN_BYTES
    unequal = np.frombuffer(left, dtype=np.uint32) != np.frombuffer(right, dtype=np.uint32)
    return int(unequal.argmax())
