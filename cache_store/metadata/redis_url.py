"""Where a Redis is, and the password for it, which is shown to nobody.

Owns the reading of redis://, rediss:// and unix:// URLs into what the client library takes. An
error never repeats what was given, since that may hold a password.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

__all__ = ["RedisUrl", "parse_redis_url"]

_EXPECTED = "expected redis://, rediss:// or unix:// and an address"
_DEFAULT_PORT = 6379
_CERTIFICATE_CHECKS = ("required", "none")
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """``address`` is for people; ``options`` are the client library's own."""

    address: str
    is_encrypted: bool
    options: dict[str, Any] = field(repr=False)


def parse_redis_url(url: str) -> RedisUrl:
    """redis://[user:password@]host[:port][/db], rediss:// the same over TLS, or
    unix://[user:password@]/path[?db=N].

    With rediss://, ?ssl_ca_certs=FILE names the authority to trust, ssl_certfile and ssl_keyfile
    a client certificate; ssl_cert_reqs=none trusts anyone. Raises ValueError.
    """
    try:
        parts = urlsplit(url.strip())
        port = parts.port or _DEFAULT_PORT
    except ValueError:
        raise ValueError(f"{_EXPECTED}; a password's special characters are %-encoded") from None
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    options: dict[str, Any] = {}
    if parts.scheme == "unix" and len(parts.path) > 1:
        options |= {"path": unquote(parts.path), "db": _database(query.pop("db", ""))}
        address = unquote(parts.path)
    elif parts.scheme in ("redis", "rediss") and parts.hostname:
        database = _database(query.pop("db", "") or parts.path.strip("/"))
        options |= {"host": parts.hostname, "port": port, "db": database}
        address = f"{parts.hostname}:{port}"
    else:
        raise ValueError(_EXPECTED)
    if parts.username:
        options["username"] = unquote(parts.username)
    if parts.password:
        options["password"] = unquote(parts.password)
    if parts.scheme == "rediss":
        options |= _tls_options(query)
    if query:
        raise ValueError(f"unknown option {next(iter(query))[:32]!r} in the URL")
    return RedisUrl(address, parts.scheme == "rediss", options)


def _database(text: str) -> int:
    if text and not (text.isascii() and text.isdigit()):
        raise ValueError("the database of a Redis URL is a number")
    return int(text or 0)


def _tls_options(query: dict[str, str]) -> dict[str, Any]:
    """Takes its options out of ``query``."""
    options: dict[str, Any] = {name: query.pop(name) for name in _FILES if name in query}
    check = query.pop("ssl_cert_reqs", "required")
    if check not in _CERTIFICATE_CHECKS:
        raise ValueError("ssl_cert_reqs is required or none")
    return options | {"ssl_cert_reqs": check, "ssl_check_hostname": check == "required"}
