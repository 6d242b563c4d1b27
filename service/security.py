"""Who may ask what: Host and Origin, keys, content type, and the size and pace of head and body.

Owns the checks that stand before every route. Which key is whose is service.tenants' knowledge;
keys are never logged. Knows nothing of what a request asks for.
"""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.config import GatewayConfig, is_loopback
from service.cors import CorsPolicy, is_preflight
from service.errors import (
    AuthenticationFailed,
    BodyTooLarge,
    GatewayError,
    HeadersTooLarge,
    InvalidRequest,
    PermissionDenied,
    RequestTimeout,
    UnsupportedMediaType,
    error_response,
)
from service.tenants.directory import TenantDirectory
from service.tenants.rate_limits import RateLimits
from service.tenants.tenant import EVERYONE, Caller, Tenant, put_caller

__all__ = ["MAX_HEAD_BYTES", "SecurityMiddleware", "key_of", "read_body"]

MAX_HEAD_BYTES = 32 * 2**10
_MAX_HEADERS = 100
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
_OPEN_PATHS = frozenset({"/health", "/live", "/version", "/openapi.json"})
_ADMIN_PATHS = frozenset({"/reset_prefix_cache", "/v1/cache/history"})
_DASHBOARD_DATA = "/dashboard/data"  # and all below it
_DRAIN_LIMIT = 64 * 2**20  # bytes read and thrown away so that the client gets to see the answer
_DRAIN_SECONDS = 5.0
_IDLE_SECONDS = 30.0  # without a byte of a body
_BODY_SECONDS = 60.0  # for a body, and one more for each _BODY_PACE bytes of the limit
_BODY_PACE = 100_000


class SecurityMiddleware:
    """Checks Host, Origin, key and content type of each request before any of its body is read."""

    def __init__(
        self, app: ASGIApp, config: GatewayConfig, tenants: TenantDirectory, rates: RateLimits
    ) -> None:
        self._app = app
        self._tenants = tenants
        self._rates = rates
        self._cors = CorsPolicy(config.cors_origins)
        self._is_local = is_loopback(config.host)
        self._has_tenants = config.tenant_file is not None
        names = {name.lower() for name in config.allowed_hosts}
        if self._is_local or names:
            names |= _LOCAL_NAMES | {_bracketed(config.host)}
        self._hosts = frozenset(names)  # empty: any

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin", "")
        if origin and self._cors.allows(origin):
            send = self._cors.telling(send, origin)
        try:
            self._check_head(scope, headers)
            self._check_host(headers)
            if origin and is_preflight(scope["method"], headers) and self._cors.allows(origin):
                await self._cors.preflight(headers)(scope, receive, send)
                return
            caller = self._check(scope["method"], scope["path"], headers)
        except GatewayError as error:
            await error_response(error)(scope, receive, send)
            return
        put_caller(scope, caller)
        await self._app(scope, receive, self._with_rates(send, caller.tenant))

    def _check(self, method: str, path: str, headers: Headers) -> Caller:
        caller = Caller(EVERYONE)
        if self._needs_key(path):
            is_admins = _needs_admin(path) or (path == "/metrics" and self._has_tenants)
            caller = self._identify(headers, needs_admin=is_admins)
        # Some POSTs may come without a body; everything else must say that it is JSON.
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        may_be_empty = path in _ADMIN_PATHS or path.startswith("/v1/sessions")
        if method == "POST" and (has_body or not may_be_empty):
            media_type = headers.get("content-type", "").split(";")[0].strip().lower()
            if media_type != "application/json":
                raise UnsupportedMediaType("The Content-Type of a POST must be application/json.")
        return caller

    def _identify(self, headers: Headers, *, needs_admin: bool) -> Caller:
        """Whose key it is. Without any key everyone is let in, as one tenant."""
        if not self._tenants.needs_keys:
            return Caller(EVERYONE, is_admin=True)
        known = self._tenants.find(key_of(headers))
        if known is None:
            raise AuthenticationFailed(
                "A valid API key is needed: Authorization: Bearer KEY, or X-Api-Key: KEY."
            )
        if needs_admin and not known.is_admin:
            raise PermissionDenied("This needs an admin key.", code="admin_key_required")
        return Caller(known.tenant, known.is_admin)

    def _check_head(self, scope: Scope, headers: Headers) -> None:
        num_bytes = len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
        num_bytes += sum(len(name) + len(value) for name, value in headers.raw)
        if len(headers.raw) > _MAX_HEADERS or num_bytes > MAX_HEAD_BYTES:
            raise HeadersTooLarge(
                f"The head of a request may have {_MAX_HEADERS} headers and {MAX_HEAD_BYTES} bytes."
            )

    def _check_host(self, headers: Headers) -> None:
        host = headers.get("host", "").lower()
        if self._hosts and _host_name(host) not in self._hosts:
            raise PermissionDenied(
                "This Host is not served here; add it with --allowed-host.", code="host_not_allowed"
            )
        origin = headers.get("origin")
        if origin is None or origin.lower().partition("://")[2] == host:
            return
        if not self._cors.allows(origin):
            raise PermissionDenied(
                "Requests from pages of another origin are refused; --cors-origin allows them.",
                code="origin_not_allowed",
            )

    def _needs_key(self, path: str) -> bool:
        """The dashboard's page and files hold no data; /metrics is open on loopback alone, and not
        there where it tells of named tenants."""
        if path == "/metrics":
            return not self._is_local or self._has_tenants
        is_asset = path == "/" or (path.startswith("/dashboard") and not _needs_admin(path))
        return not (is_asset or path in _OPEN_PATHS)

    def _with_rates(self, send: Send, tenant: Tenant) -> Send:
        """``send``, which also says where the tenant stands with its limits, if it has any."""
        limits = tenant.limits
        if limits.requests_per_minute is None and limits.tokens_per_minute is None:
            return send

        async def send_with_rates(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(dict(self._rates.headers(tenant)))
            await send(message)

        return send_with_rates


def _needs_admin(path: str) -> bool:
    is_data = path == _DASHBOARD_DATA or path.startswith(_DASHBOARD_DATA + "/")
    return is_data or path in _ADMIN_PATHS


def key_of(headers: Headers) -> str:
    """The key that a request came with; empty if with none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key", "")


async def read_body(request: Request, limit: int, *, may_be_empty: bool = False) -> bytes:
    """The whole body, of at most ``limit`` bytes whether its length was announced or not.

    A larger one is read on and thrown away for a while, so that the client, which is still
    sending, gets to see the answer. Raises BodyTooLarge, RequestTimeout or InvalidRequest.
    """
    announced = request.headers.get("content-length", "")
    chunks: list[bytes] = []
    size = 0
    is_too_large = announced.isdecimal() and int(announced) > limit
    now = asyncio.get_running_loop().time
    ends_at = now() + (_DRAIN_SECONDS if is_too_large else _BODY_SECONDS + limit / _BODY_PACE)
    try:
        # From its announcement on, whether or not anything of it ever comes.
        async with asyncio.timeout_at(min(ends_at, now() + _IDLE_SECONDS)) as deadline:
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit and not is_too_large:
                    is_too_large, ends_at = True, now() + _DRAIN_SECONDS
                    chunks.clear()
                if size > limit + _DRAIN_LIMIT:
                    break
                if not is_too_large:
                    chunks.append(chunk)
                deadline.reschedule(min(ends_at, now() + _IDLE_SECONDS))
    except TimeoutError:
        if not is_too_large:
            raise RequestTimeout("The body did not come in time.") from None
    if is_too_large:
        raise BodyTooLarge(f"The body is larger than the limit of {limit} bytes.")
    if not size and not may_be_empty:
        raise InvalidRequest("The body is empty; it must be a JSON object.", code="invalid_json")
    return b"".join(chunks)


def _bracketed(host: str) -> str:
    bare = host.lower().strip("[]")
    return f"[{bare}]" if ":" in bare else bare


def _host_name(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
