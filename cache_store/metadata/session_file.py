"""Sessions in one file, for a store that lives in memory.

Owns the file's form: a version, a checksum, and one record after the other, each sealed if there is
a cipher. It is written beside its place and then renamed, so that a reader finds the old one or the
new one; a file that cannot be read is a file without sessions. Knows nothing of when to save.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import xxhash

from cache_store.cipher import Cipher
from cache_store.metadata.base import SessionRecord
from cache_store.metadata.keys import decode_part, encode_part, session_key
from cache_store.metadata.session_codec import SealedSession, SessionCodec, UnreadableRecordError

__all__ = ["SessionFile"]

_log = logging.getLogger("headstart.metadata")
_MAGIC = b"headstart sessions 1\n"
_LENGTH_BYTES = 4
_RECORDS_PER_PAUSE = 64
_NAME = "sessions"


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    tenant: str  # both encoded as parts of a key, which any text can be
    session_id: str
    version: int
    meta: bytes
    history: bytes


class SessionFile:
    """The file ``sessions`` in ``folder``, which is made if need be. Used by one thread at a
    time."""

    def __init__(self, folder: str | Path, cipher: Cipher | None = None) -> None:
        self._folder = Path(folder)
        self._codec = SessionCodec(cipher)

    @property
    def path(self) -> Path:
        return self._folder / _NAME

    def load(self) -> list[SessionRecord]:
        """In the order they were saved; none, with a warning, if the file cannot be read."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            _log.warning("sessions in %s cannot be read: %s", self.path, error.strerror)
            return []
        try:
            return [self._decode(raw) for raw in _frames(content)]
        except (ValueError, msgspec.DecodeError):
            reason = "it is damaged or of another version"
        except UnreadableRecordError:
            reason = "it was written with another encryption key, or with none"
        _log.warning("sessions in %s are left out: %s", self.path, reason)
        return []

    def save(self, records: Iterable[SessionRecord], *, pause_s: float = 0.0) -> None:
        """Replace the file. A failure is logged: the sessions in memory go on without it.

        ``pause_s`` after every 64 records leaves the interpreter to other threads.
        """
        temporary = self.path.with_name(f"{_NAME}.{os.getpid()}.tmp")
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._write(temporary, records, pause_s)
            temporary.replace(self.path)
        except OSError as error:
            _log.warning("sessions cannot be saved in %s: %s", self.path, error.strerror)
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _write(self, path: Path, records: Iterable[SessionRecord], pause_s: float) -> None:
        path.unlink(missing_ok=True)  # of an earlier process with the same id
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        digest = xxhash.xxh3_64()
        with open(descriptor, "wb") as file:
            file.write(_MAGIC)
            for number, record in enumerate(records, 1):
                raw = self._encode(record)
                frame = len(raw).to_bytes(_LENGTH_BYTES, "little") + raw
                digest.update(frame)
                file.write(frame)
                if pause_s and number % _RECORDS_PER_PAUSE == 0:
                    time.sleep(pause_s)
            file.write(bytes(_LENGTH_BYTES) + digest.digest())
            file.flush()
            os.fsync(file.fileno())

    def _encode(self, record: SessionRecord) -> bytes:
        tenant, session_id = record.tenant, record.session_id
        sealed = self._codec.encode(record, session_key(tenant, session_id))
        return msgspec.msgpack.encode(
            _Entry(
                encode_part(tenant),
                encode_part(session_id),
                record.version,
                sealed.meta,
                sealed.history,
            )
        )

    def _decode(self, raw: bytes) -> SessionRecord:
        entry = msgspec.msgpack.decode(raw, type=_Entry)
        tenant, session_id = (decode_part(p.encode()) for p in (entry.tenant, entry.session_id))
        key = session_key(tenant, session_id)
        sealed = SealedSession(entry.meta, entry.history)
        return self._codec.decode(tenant, session_id, key, entry.version, sealed)


def _frames(content: bytes) -> Iterator[bytes]:
    """Raises ValueError, if need be after some frames."""
    if not content.startswith(_MAGIC):
        raise ValueError("another version")
    start = position = len(_MAGIC)
    while True:
        size = int.from_bytes(content[position : position + _LENGTH_BYTES], "little")
        if size == 0:
            break
        yield content[position + _LENGTH_BYTES : position + _LENGTH_BYTES + size]
        position += _LENGTH_BYTES + size
    checksum = content[position + _LENGTH_BYTES :]
    if checksum != xxhash.xxh3_64(content[start:position]).digest():
        raise ValueError("damaged")
