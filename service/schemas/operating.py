"""The bodies of the routes that say how the server does, and of the reset of its cache.

Owns their fields. Knows nothing of where the figures come from.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

__all__ = ["BlocksDropped", "CacheReset", "Health", "Load", "Running", "Version"]

Running = Literal["keep", "refuse", "drain"]


class Health(msgspec.Struct, frozen=True):
    """``reason`` says why it is degraded."""

    status: Literal["ok", "degraded"] = "ok"
    reason: str | UnsetType = UNSET


class Version(msgspec.Struct, frozen=True):
    version: str


class Load(msgspec.Struct, frozen=True):
    server_load: int


class CacheReset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``keep`` leaves what running requests hold."""

    running: Running = "keep"


class BlocksDropped(msgspec.Struct, frozen=True):
    num_blocks_dropped: int
