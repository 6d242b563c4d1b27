"""Who may ask what: Host and Origin, keys, content type, and the size of a body.

Owns the checks that stand before every route. Keys are kept and compared as digests, in constant
time, and never logged. Knows nothing of what a request asks for.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from service.config import GatewayConfig, is_loopback
from service.errors import (
    AuthenticationFailed,
    BodyTooLarge,
    GatewayError,
    InvalidRequest,
    PermissionDenied,
    UnsupportedMediaType,
    error_response,
)
from service.sessions.identity import DEFAULT_TENANT, tenant_of_key

__all__ = ["KeyRing", "SecurityMiddleware", "read_body"]

_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
_OPEN_PATHS = frozenset({"/health", "/live", "/version"})
_ADMIN_PATHS = frozenset({"/reset_prefix_cache", "/dashboard/data"})
_DRAIN_LIMIT = 64 * 2**20  # bytes read and thrown away so that the client gets to see the answer
_DRAIN_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class KeyRing:
    """Digests of the API keys and of the admin keys; an admin key opens everything."""

    api: tuple[bytes, ...]
    admin: tuple[bytes, ...]

    @classmethod
    def of(cls, api_keys: Iterable[str], admin_keys: Iterable[str]) -> KeyRing:
        return cls(tuple(map(_digest, api_keys)), tuple(map(_digest, admin_keys)))

    @property
    def is_empty(self) -> bool:
        return not (self.api or self.admin)

    def check(self, headers: Headers, *, needs_admin: bool) -> str:
        """The tenant that the key stands for. Raises AuthenticationFailed or PermissionDenied.
        An empty ring lets everyone in, as one tenant."""
        if self.is_empty:
            return DEFAULT_TENANT
        key = _key_of(headers)
        given = _digest(key)
        is_admin = _is_among(given, self.admin)
        is_known = _is_among(given, self.api) or is_admin
        if not is_known:
            raise AuthenticationFailed(
                "A valid API key is needed: Authorization: Bearer KEY, or X-Api-Key: KEY."
            )
        if needs_admin and not is_admin:
            raise PermissionDenied("This needs an admin key.", code="admin_key_required")
        return tenant_of_key(key)


class SecurityMiddleware:
    """Checks Host, Origin, key and content type of each request before any of its body is read."""

    def __init__(self, app: ASGIApp, config: GatewayConfig) -> None:
        self._app = app
        self._keys = KeyRing.of(config.api_keys, config.admin_keys)
        self._is_local = is_loopback(config.host)
        names = {name.lower() for name in config.allowed_hosts}
        if self._is_local or names:
            names |= _LOCAL_NAMES | {_bracketed(config.host)}
        self._hosts = frozenset(names)  # empty: any

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            tenant = self._check(scope["method"], scope["path"], Headers(scope=scope))
        except GatewayError as error:
            await error_response(error)(scope, receive, send)
            return
        scope["headstart_tenant"] = tenant
        await self._app(scope, receive, send)

    def _check(self, method: str, path: str, headers: Headers) -> str:
        """The tenant."""
        self._check_host(headers)
        tenant = DEFAULT_TENANT
        if self._needs_key(path):
            tenant = self._keys.check(headers, needs_admin=path in _ADMIN_PATHS)
        # Some POSTs may come without a body; everything else must say that it is JSON.
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        may_be_empty = path in _ADMIN_PATHS or path.startswith("/v1/sessions")
        if method == "POST" and (has_body or not may_be_empty):
            media_type = headers.get("content-type", "").split(";")[0].strip().lower()
            if media_type != "application/json":
                raise UnsupportedMediaType("The Content-Type of a POST must be application/json.")
        return tenant

    def _check_host(self, headers: Headers) -> None:
        host = headers.get("host", "").lower()
        if self._hosts and _host_name(host) not in self._hosts:
            raise PermissionDenied(
                "This Host is not served here; add it with --allowed-host.", code="host_not_allowed"
            )
        origin = headers.get("origin")
        if origin is not None and origin.lower().partition("://")[2] != host:
            raise PermissionDenied(
                "Requests from pages of another origin are refused.", code="origin_not_allowed"
            )

    def _needs_key(self, path: str) -> bool:
        """The dashboard's page and files hold no data; /metrics is open on loopback alone."""
        if path == "/metrics":
            return not self._is_local
        is_asset = path == "/" or (path.startswith("/dashboard") and path not in _ADMIN_PATHS)
        return not (is_asset or path in _OPEN_PATHS)


async def read_body(request: Request, limit: int, *, may_be_empty: bool = False) -> bytes:
    """The whole body, of at most ``limit`` bytes whether its length was announced or not.

    A larger one is read on and thrown away for a while, so that the client, which is still
    sending, gets to see the answer. Raises BodyTooLarge or InvalidRequest.
    """
    announced = request.headers.get("content-length", "")
    chunks: list[bytes] = []
    size = 0
    is_too_large = announced.isdecimal() and int(announced) > limit
    try:
        # From its announcement on, whether or not anything of it ever comes.
        async with asyncio.timeout(_DRAIN_SECONDS if is_too_large else None) as deadline:
            async for chunk in request.stream():
                size += len(chunk)
                if is_too_large or size > limit:
                    is_too_large = True
                    chunks.clear()
                    if deadline.when() is None:
                        now = asyncio.get_running_loop().time()
                        deadline.reschedule(now + _DRAIN_SECONDS)
                    if size > limit + _DRAIN_LIMIT:
                        break
                else:
                    chunks.append(chunk)
    except TimeoutError:
        assert is_too_large
    if is_too_large:
        raise BodyTooLarge(f"The body is larger than the limit of {limit} bytes.")
    if not size and not may_be_empty:
        raise InvalidRequest("The body is empty; it must be a JSON object.", code="invalid_json")
    return b"".join(chunks)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _is_among(digest: bytes, known: tuple[bytes, ...]) -> bool:
    is_found = False
    for other in known:  # no early exit: the time taken says nothing about which key it was
        is_found |= hmac.compare_digest(digest, other)
    return is_found


def _key_of(headers: Headers) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key", "")


def _bracketed(host: str) -> str:
    bare = host.lower().strip("[]")
    return f"[{bare}]" if ":" in bare else bare


def _host_name(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
