"""What both ends of a link share: its keys, its timing, and waking a thread that polls sockets.

Owns how a shared secret becomes CURVE keys, which endpoints are legal, and the default intervals.
Knows nothing of messages, engines or HTTP. The gateway gets these names from
:mod:`model_worker.protocol`, the one module of the worker that it imports.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

__all__ = [
    "MIN_LINK_SECRET_BYTES",
    "LinkError",
    "LinkKeys",
    "LinkTiming",
    "Waker",
    "derive_link_keys",
    "link_keys_for",
    "read_link_secret",
]

MIN_LINK_SECRET_BYTES = 16
MAX_IPC_PATH_BYTES = 107  # sockaddr_un.sun_path less its final zero byte
_KEY_SALT = b"headstart link keys 1"


class LinkError(Exception):
    """A link cannot be set up as told, or its thread has failed; one line for a person."""


@dataclass(frozen=True, slots=True)
class LinkTiming:
    """Intervals of one link in seconds.

    A peer sends something every ``heartbeat_s``; one that was not heard for ``silence_s`` is taken
    for lost. The gateway says why it is not connected after ``answer_s``, opens a lost link again
    after ``reopen_s``, and one that the worker refused after ``refused_retry_s``.
    """

    heartbeat_s: float = 0.5
    silence_s: float = 10.0
    answer_s: float = 5.0
    reopen_s: float = 0.1
    refused_retry_s: float = 10.0


@dataclass(frozen=True, slots=True)
class LinkKeys:
    """CURVE key pairs of both ends, z85, 40 bytes each."""

    server_public: bytes
    server_secret: bytes = field(repr=False)
    client_public: bytes
    client_secret: bytes = field(repr=False)


def derive_link_keys(secret: bytes) -> LinkKeys:
    """Both key pairs of a link, the same on each host that holds ``secret``.

    Raises LinkError when the secret is shorter than MIN_LINK_SECRET_BYTES.
    """
    if len(secret) < MIN_LINK_SECRET_BYTES:
        raise LinkError(f"the link secret must have at least {MIN_LINK_SECRET_BYTES} bytes")
    server_secret = z85.encode(_hkdf_sha256(secret, b"server"))
    client_secret = z85.encode(_hkdf_sha256(secret, b"client"))
    return LinkKeys(
        server_public=zmq.curve_public(server_secret),
        server_secret=server_secret,
        client_public=zmq.curve_public(client_secret),
        client_secret=client_secret,
    )


def _hkdf_sha256(secret: bytes, info: bytes) -> bytes:
    """RFC 5869 for the 32 bytes of one X25519 secret: extract, then a single expand block."""
    pseudo_random_key = hmac.digest(_KEY_SALT, secret, hashlib.sha256)
    return hmac.digest(pseudo_random_key, info + b"\x01", hashlib.sha256)


def read_link_secret(path: str | Path) -> bytes:
    """The secret in a file, less the white space around it. Raises LinkError."""
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        reason = error.strerror or error
        raise LinkError(f"cannot read the link secret file {path}: {reason}") from error
    if len(secret) < MIN_LINK_SECRET_BYTES:
        raise LinkError(
            f"the link secret file {path} must hold at least {MIN_LINK_SECRET_BYTES} bytes"
        )
    return secret


def link_keys_for(endpoint: str, secret: bytes | None) -> LinkKeys | None:
    """The keys that ``endpoint`` needs: none for ipc, whose guard is the file system.

    Raises LinkError for another transport, for tcp without a secret, and for a path too long.
    """
    if endpoint.startswith("tcp://"):
        if not secret:
            raise LinkError(f"{endpoint}: a link over TCP needs a shared secret (link secret file)")
        return derive_link_keys(secret)
    if endpoint.startswith("ipc://"):
        if len(endpoint.removeprefix("ipc://").encode()) > MAX_IPC_PATH_BYTES:
            raise LinkError(f"{endpoint}: the path is longer than {MAX_IPC_PATH_BYTES} bytes")
        return None
    raise LinkError(f"{endpoint}: a link endpoint starts with ipc:// or tcp://")


class Waker:
    """Wakes one thread that polls sockets, from any thread and from signal handlers."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def wake(self) -> None:
        # A full buffer means that the wake-up is pending already; a closed one that nobody polls.
        try:
            self._writer.send(b"\x00")
        except OSError:
            return

    def clear(self) -> None:
        """Called by the polling thread, before it looks at what it was woken for."""
        try:
            while self._reader.recv(4096):
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
