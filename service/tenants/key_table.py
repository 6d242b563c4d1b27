"""API keys as they are known here: digests, never the keys.

Owns the making of keys and the finding of one among many in a time that says nothing of them. Knows
nothing of requests, of files or of what a tenant may do.

A key made here holds 256 random bits, so a plain SHA-256 is the right digest: nobody can go through
2**256 keys, however quick the hash, and a slow one (scrypt, Argon2) protects secrets that can be
guessed, at the price of milliseconds in each request. (NIST SP 800-63B, 5.1.1.2 and its note on
look-up secrets of at least 112 bits.)
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

from service.tenants.tenant import EVERYONE, Tenant

__all__ = ["KeyTable", "KnownKey", "digest_of", "make_key"]

KEY_PREFIX = "hs-"
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKey:
    """``digest`` is 32 bytes; ``expires_at`` is in seconds since 1970, None for never."""

    digest: bytes = field(repr=False)
    tenant: Tenant
    is_admin: bool = False
    expires_at: float | None = None

    def has_expired(self, now: float) -> bool:
        return self.expires_at is not None and self.expires_at <= now


class KeyTable:
    """Immutable. Raises ValueError if two of ``keys`` are the same."""

    def __init__(self, keys: Iterable[KnownKey]) -> None:
        self._blind = secrets.token_bytes(_KEY_BYTES)
        self._keys: dict[bytes, KnownKey] = {}
        for key in keys:
            place = self._place_of(key.digest)
            if place in self._keys:
                raise ValueError("the same key twice")
            self._keys[place] = key
        self._nobody = KnownKey(digest=bytes(_KEY_BYTES), tenant=EVERYONE)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, key: str, now: float) -> KnownKey | None:
        """None for a key that is unknown or has expired.

        What the dictionary compares is a keyed hash that no client can predict, and what is found
        is compared once more in constant time: how long it takes depends on no digit of any key.
        """
        digest = digest_of(key)
        found = self._keys.get(self._place_of(digest), self._nobody)
        is_known = hmac.compare_digest(found.digest, digest)
        return found if is_known and not found.has_expired(now) else None

    def _place_of(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, digest_size=16, key=self._blind).digest()


def digest_of(key: str) -> bytes:
    """SHA-256 of the key as it stands in a header."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def make_key() -> str:
    """256 random bits in characters that every header, shell and file can hold."""
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)
