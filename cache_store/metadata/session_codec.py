"""The byte form of a session's record, sealed or plain.

Owns what is kept beside a session's version: its figures, and its history and cache salt, which a
cipher seals under the record's own key. With a cipher a record that was not sealed does not open:
whoever can write to the store could otherwise put words into a conversation. Knows nothing of
where records are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from cache_store.cipher import Cipher, CipherError
from cache_store.metadata.base import SessionRecord

__all__ = ["SealedSession", "SessionCodec", "UnreadableRecordError"]


class UnreadableRecordError(Exception):
    """Damaged, sealed with another key, or written by something else."""


@dataclass(frozen=True, slots=True)
class SealedSession:
    """What is stored of one session. ``meta`` is small, ``history`` may be megabytes."""

    meta: bytes
    history: bytes


class _Meta(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    is_sealed: bool
    created_at: float
    last_active_at: float
    expires_at: float
    priority: int
    retention_s: float
    cache_salt: bytes
    worker_id: str
    num_prompt_tokens_total: int
    num_cached_tokens_total: int


class SessionCodec:
    def __init__(self, cipher: Cipher | None = None) -> None:
        self._cipher = cipher
        self._decoder = msgspec.msgpack.Decoder(_Meta)

    def encode(self, record: SessionRecord, key: str) -> SealedSession:
        """``key`` names the record, and binds what is sealed to its place."""
        meta = _Meta(
            is_sealed=self._cipher is not None,
            created_at=record.created_at,
            last_active_at=record.last_active_at,
            expires_at=record.expires_at,
            priority=record.priority,
            retention_s=record.retention_s,
            cache_salt=self._seal(_utf8(record.cache_salt), key, "salt"),
            worker_id=record.worker_id,
            num_prompt_tokens_total=record.num_prompt_tokens_total,
            num_cached_tokens_total=record.num_cached_tokens_total,
        )
        return SealedSession(
            msgspec.msgpack.encode(meta), self._seal(record.history, key, "history")
        )

    def decode(
        self, tenant: str, session_id: str, key: str, version: int, sealed: SealedSession
    ) -> SessionRecord:
        """An empty ``sealed.history`` gives an empty history. Raises UnreadableRecordError."""
        try:
            meta = self._decoder.decode(sealed.meta)
            if meta.is_sealed is not (self._cipher is not None):
                raise UnreadableRecordError
            return SessionRecord(
                tenant=tenant,
                session_id=session_id,
                version=version,
                created_at=meta.created_at,
                last_active_at=meta.last_active_at,
                expires_at=meta.expires_at,
                priority=meta.priority,
                retention_s=meta.retention_s,
                cache_salt=self._open(meta.cache_salt, key, "salt").decode("utf-8", _SURROGATES),
                worker_id=meta.worker_id,
                num_prompt_tokens_total=meta.num_prompt_tokens_total,
                num_cached_tokens_total=meta.num_cached_tokens_total,
                history=self._open(sealed.history, key, "history") if sealed.history else b"",
            )
        except (msgspec.DecodeError, CipherError, UnicodeDecodeError):
            raise UnreadableRecordError from None

    def _seal(self, plain: bytes, key: str, field: str) -> bytes:
        return plain if self._cipher is None else self._cipher.seal(plain, _name(key, field))

    def _open(self, sealed: bytes, key: str, field: str) -> bytes:
        return sealed if self._cipher is None else self._cipher.open(sealed, _name(key, field))


_SURROGATES = "surrogatepass"


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", _SURROGATES)


def _name(key: str, field: str) -> bytes:
    return f"{field}:{key}".encode()
