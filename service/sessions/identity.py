"""Whose session is meant: its tenant, and its id as clients give it.

Owns the rules for a session's id and where it may stand. Knows nothing of what a session holds.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from starlette.requests import Request

from service.errors import InvalidRequest
from service.tenants.tenant import tenant_in

__all__ = [
    "HEADER",
    "RESPONSE_PREFIX",
    "SessionKey",
    "check_session_id",
    "is_response_session",
    "named_session",
    "session_digest",
    "tenant_of",
]

HEADER = "X-Session-ID"
RESPONSE_PREFIX = "~"  # of stored responses' sessions: no id that a client gives begins with it
_SESSION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@=+~-]{0,127}")


@dataclass(frozen=True, slots=True)
class SessionKey:
    tenant: str
    session_id: str


def check_session_id(given: str, param: str = "session_id") -> str:
    """Raises InvalidRequest."""
    if not _SESSION_ID.fullmatch(given):
        raise InvalidRequest(
            f"{param}: must be 1 to 128 of the characters A-Z a-z 0-9 . _ : @ = + ~ - and begin "
            "with a letter or a digit.",
            param=param,
        )
    return given


def is_response_session(session_id: str) -> bool:
    """Whether it is no conversation that a client has named."""
    return session_id.startswith(RESPONSE_PREFIX)


def session_digest(tenant: str, label: str) -> str:
    """Names a session, or whatever label its client chose, without telling it: 16 hexadecimal
    digits. The same in every process, so whoever guesses a label can check it."""
    return hashlib.blake2b(f"{tenant}\0{label}".encode(), digest_size=8).hexdigest()


def named_session(request: Request, body_field: str | None) -> SessionKey | None:
    """The session that header or body name, None if neither does. Raises InvalidRequest."""
    headers = request.headers.getlist(HEADER)
    if len(set(headers)) > 1:
        raise InvalidRequest(f"{HEADER}: given more than once.", param=HEADER)
    if headers:
        check_session_id(headers[0], HEADER)
    if body_field is not None:
        check_session_id(body_field)
    if headers and body_field is not None and headers[0] != body_field:
        raise InvalidRequest(
            f"session_id: '{body_field}' in the body, but '{headers[0]}' in {HEADER}.",
            param="session_id",
        )
    session_id = headers[0] if headers else body_field
    return None if session_id is None else SessionKey(tenant_of(request), session_id)


def tenant_of(request: Request) -> str:
    """The id of the tenant whose key the request came with."""
    return tenant_in(request).tenant_id
