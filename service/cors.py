"""Which pages of other origins may use the server from a browser, and how browsers are told.

Owns the headers of the CORS protocol (Fetch standard, 3.2). Knows nothing of keys: a page that is
allowed still needs one. Cookies play no part here, so credentials are never allowed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import Message, Send

__all__ = ["CorsPolicy", "is_preflight"]

_LOCAL_ORIGIN = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?")
_METHODS = "GET, POST, DELETE, OPTIONS"
_HEADERS = "Authorization, Content-Type, X-Api-Key, X-Request-Id, X-Session-ID, X-Headstart-Explain"
_EXPOSED = (
    "X-Request-Id, request-id, X-Session-History, X-Headstart-Worker, "
    "X-Headstart-Cached-Tokens, X-Headstart-Cache-Reason, Retry-After, "
    "x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
    "x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)
_MAX_AGE = "600"  # seconds


class CorsPolicy:
    """``origins`` as --cors-origin takes them: origins, ``localhost`` for those of this machine on
    whatever port, ``*`` for all."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins) - {"*", "localhost"}
        self._is_any = "*" in origins
        self._is_local = "localhost" in origins

    def allows(self, origin: str) -> bool:
        """``origin`` as a browser sends it. No part of a name is enough: localhost.example is not
        localhost."""
        given = origin.lower()
        if self._is_any or given in self._origins:
            return True
        return self._is_local and _LOCAL_ORIGIN.fullmatch(given) is not None

    def telling(self, send: Send, origin: str) -> Send:
        """``send``, which also says that ``origin``, an allowed one, may read the answer."""

        async def send_and_tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Access-Control-Allow-Origin"] = "*" if self._is_any else origin
                headers["Access-Control-Expose-Headers"] = _EXPOSED
                headers.add_vary_header("Origin")
            await send(message)

        return send_and_tell

    def preflight(self, headers: Headers) -> Response:
        """The answer to a browser that asks what an allowed origin may send."""
        asked = headers.get("access-control-request-headers", "")
        return Response(
            status_code=200,
            headers={
                "Access-Control-Allow-Methods": _METHODS,
                # Clients send headers of their own; none of them is trusted here.
                "Access-Control-Allow-Headers": asked or _HEADERS,
                "Access-Control-Max-Age": _MAX_AGE,
                "Vary": "Access-Control-Request-Headers",
            },
        )


def is_preflight(method: str, headers: Headers) -> bool:
    return method == "OPTIONS" and "access-control-request-method" in headers
