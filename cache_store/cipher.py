"""Encryption of what is kept outside the process: token ids in Redis, in files and on disk.

Owns the key file and the form of a sealed record (one byte of version, a random 96-bit nonce,
AES-256-GCM ciphertext with its tag). The associated data names the record, so that a sealed one
put in another's place does not open. Knows nothing of what is sealed or where it is kept. A key
seals at most 2**32 records (the bound for random nonces); with a new key earlier records do not
open, and their readers take them for absent.
"""

from __future__ import annotations

import base64
import binascii
import os
import secrets
import stat
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

__all__ = ["KEY_BYTES", "SEAL_BYTES", "Cipher", "CipherError", "KeyFileError"]

KEY_BYTES = 32
_VERSION = b"\x01"
_NONCE_BYTES = 12
_TAG_BYTES = 16
SEAL_BYTES = len(_VERSION) + _NONCE_BYTES + _TAG_BYTES  # what sealing adds to a record
_MAX_FILE_BYTES = 4096


class CipherError(Exception):
    """A record does not open: another key, another record's place, or damaged. Holds no data."""


class KeyFileError(CipherError):
    """The key file cannot be used; the message names the file and what to do, never its text."""


class Cipher:
    """Seals and opens records with one key. Threads may share it."""

    def __init__(self, key: bytes) -> None:
        """``key`` is 32 bytes; any other length is a ValueError."""
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
        self._aead = AESGCM(key)

    @classmethod
    def from_key_file(cls, path: str | Path) -> Cipher:
        """The file holds 32 raw bytes, or their hex or base64 text, and only its owner (or root)
        may have access to it. Raises KeyFileError."""
        return cls(_decode(_read(Path(path)), path))

    def seal(self, plain: bytes, aad: bytes) -> bytes:
        """``aad`` names the record; SEAL_BYTES longer than ``plain``."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return _VERSION + nonce + self._aead.encrypt(nonce, plain, _VERSION + aad)

    def open(self, sealed: bytes, aad: bytes) -> bytes:
        """What was sealed under the same ``aad``. Raises CipherError."""
        if len(sealed) < SEAL_BYTES or sealed[:1] != _VERSION:
            raise CipherError("not a sealed record")
        nonce = sealed[1 : 1 + _NONCE_BYTES]
        try:
            return self._aead.decrypt(nonce, sealed[1 + _NONCE_BYTES :], _VERSION + aad)
        except InvalidTag:
            raise CipherError("a sealed record does not open with this key") from None


def _read(path: Path) -> bytes:
    try:
        # Looked at through the open file, so that what is checked is what is read.
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise KeyFileError(f"the key file {path} is not a file")
            if stat.S_IMODE(status.st_mode) & 0o077:
                raise KeyFileError(
                    f"the key file {path} can be read by others: chmod 600 (or 400) it"
                )
            return file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise KeyFileError(f"the key file {path} cannot be read: {error.strerror}") from None


def _decode(content: bytes, path: str | Path) -> bytes:
    if len(content) == KEY_BYTES:
        return content
    text = b"".join(content.split())
    for decode in (binascii.unhexlify, _base64):
        try:
            key = decode(text)
        except ValueError:
            continue
        if len(key) == KEY_BYTES:
            return key
    raise KeyFileError(
        f"the key file {path} does not hold a key of {KEY_BYTES} bytes (raw, hex or base64)"
    )


def _base64(text: bytes) -> bytes:
    return base64.b64decode(text, altchars=b"-_" if {*b"-_"} & {*text} else None, validate=True)
