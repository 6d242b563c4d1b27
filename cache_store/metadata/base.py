"""The contract of a metadata store: workers, locations of prefixes, and sessions.

Owns the records and what every store promises. Metadata is a hint: whoever reads it goes on
correctly when it is absent, stale or wrong, and no caller waits for it beyond a bounded time.
Knows nothing of Redis, of HTTP or of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from cache_store.events import CacheEvent, Tier
from cache_store.metadata.stats import MetadataStats


class MetadataError(Exception):
    """The store did not answer in time or not sensibly; the message holds no secret."""


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as it announced itself; it is forgotten when its lease runs out."""

    worker_id: str
    epoch: int
    endpoint: str
    fingerprint: str


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One session of one tenant. Times are seconds since 1970.

    ``history`` is the gateway's own encoding (token ids and checkpoints; see service.sessions).
    ``version`` rises by one with each stored change and is what compare-and-set compares.
    """

    tenant: str
    session_id: str
    version: int
    created_at: float
    last_active_at: float
    expires_at: float
    priority: int = 0
    retention_s: float = 0.0
    cache_salt: str = ""
    worker_id: str = ""  # the one that served it last
    num_prompt_tokens_total: int = 0
    num_cached_tokens_total: int = 0
    history: bytes = b""


@dataclass(frozen=True, slots=True)
class BlockLocation:
    """``worker_id`` holds the first ``len(tiers)`` chunks asked for, each in its tier."""

    worker_id: str
    epoch: int
    tiers: tuple[Tier, ...]


class MetadataStore(Protocol):
    """Every method may raise MetadataError, and returns or raises within a bounded time."""

    @property
    def is_degraded(self) -> bool:
        """Whether the store is out of reach and callers are served without it."""
        ...

    @property
    def stats(self) -> MetadataStats: ...

    async def start(self) -> None:
        """Returns although the store may be out of reach."""
        ...

    async def close(self) -> None: ...

    # ------------------------------------------------------------ workers

    async def renew_worker(self, worker: WorkerRecord, lease_s: float) -> None:
        """Announce a worker, or that it is still there. A new epoch forgets the locations of the
        old one."""
        ...

    async def remove_worker(self, worker_id: str) -> None: ...

    async def workers(self, fingerprint: str) -> Sequence[WorkerRecord]:
        """Those of one model whose lease has not run out."""
        ...

    async def all_workers(self) -> Sequence[WorkerRecord]:
        """Those of every model, as :meth:`workers`."""
        ...

    # ------------------------------------------------------------ locations

    async def apply_events(
        self, worker: WorkerRecord, events: Sequence[CacheEvent], lease_s: float
    ) -> None:
        """Note what a worker's cache said, in order. Locations live as long as the lease."""
        ...

    async def locate(self, fingerprint: str, chunk_hashes: bytes) -> Sequence[BlockLocation]:
        """Who holds how much of a prefix: ``chunk_hashes`` are those of the last block of each
        chunk, 16 bytes each, joined. One round trip; per worker the first gap ends it."""
        ...

    # ------------------------------------------------------------ sessions

    async def get_session(self, tenant: str, session_id: str) -> SessionRecord | None:
        """None for an unknown one, a deleted one and one whose time has run out."""
        ...

    async def put_session(self, record: SessionRecord, expected_version: int) -> bool:
        """Store ``record`` if the stored version is ``expected_version`` (0: there is none);
        whether it was. The stored record has version ``expected_version + 1``."""
        ...

    async def delete_session(self, tenant: str, session_id: str) -> SessionRecord | None:
        """The record that was deleted."""
        ...

    async def list_sessions(
        self, tenant: str, *, cursor: str = "", limit: int = 100
    ) -> tuple[Sequence[SessionRecord], str]:
        """Some sessions, without their histories, and the cursor of the next page ("" at the
        end)."""
        ...

    async def num_sessions(self) -> int:
        """Over all tenants; may count some whose time has just run out."""
        ...
