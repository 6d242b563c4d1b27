"""The names of what is kept in Redis, and their version.

Owns the key of every record. A key is ``headstart:1:`` and parts joined by colons; each part that
comes from outside is percent-encoded, colons included, so that no two records share a key. A change
to the form of any record changes the version, and old ones run out by their lifetimes.
"""

from __future__ import annotations

from urllib.parse import quote_from_bytes, unquote_to_bytes

__all__ = ["KEY_PREFIX", "decode_part", "encode_part", "session_key"]

KEY_PREFIX = "headstart:1:"


def encode_part(text: str) -> str:
    """One part of a key; different texts give different parts, also ill-formed ones."""
    return quote_from_bytes(text.encode("utf-8", "surrogatepass"), safe="")


def decode_part(part: bytes) -> str:
    """The text behind a part. Raises ValueError for what :func:`encode_part` cannot have made."""
    text = unquote_to_bytes(part).decode("utf-8", "surrogatepass")
    if encode_part(text).encode() != part:
        raise ValueError("not a part of a key")
    return text


def session_key(tenant: str, session_id: str) -> str:
    return f"{KEY_PREFIX}session:{encode_part(tenant)}:{encode_part(session_id)}"
