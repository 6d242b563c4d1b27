"""Routes that are nothing without the metadata store.

Owns the answer while it is out of reach: what an owner asks for must not silently not happen.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.responses import Response

from cache_store.metadata.base import MetadataError
from service.errors import Unavailable

__all__ = ["Handler", "needs_store"]

Handler = Callable[..., Awaitable[Response]]


def needs_store(handler: Handler) -> Handler:
    """503 while the store is away."""

    @functools.wraps(handler)
    async def guarded(*arguments: Any, **named: Any) -> Response:
        try:
            return await handler(*arguments, **named)
        except MetadataError:
            raise Unavailable(
                "The metadata store does not answer; nothing was certainly changed.",
                code="metadata_unavailable",
                retry_after=1,
            ) from None

    return guarded
