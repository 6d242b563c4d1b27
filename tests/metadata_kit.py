"""Records for the tests of metadata stores."""

from __future__ import annotations

import time
from typing import Any

from cache_store.events import BlockRemoved, BlockStored, Tier
from cache_store.metadata.base import SessionRecord, WorkerRecord


def make_worker(worker_id: str = "w1", epoch: int = 7, fingerprint: str = "model") -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id,
        epoch=epoch,
        endpoint=f"tcp://127.0.0.1:{7000 + epoch}",
        fingerprint=fingerprint,
    )


def make_session(
    session_id: str = "s1", *, tenant: str = "t1", lifetime_s: float = 60.0, **fields: Any
) -> SessionRecord:
    now = round(time.time(), 3)
    values: dict[str, Any] = {"created_at": now, "last_active_at": now, "version": 0}
    return SessionRecord(
        tenant=tenant, session_id=session_id, expires_at=now + lifetime_s, **(values | fields)
    )


def chunk(number: int) -> bytes:
    """The hash of some chunk; every byte value comes up in the first 256."""
    return bytes([number % 256]) * 12 + number.to_bytes(4, "big")


def chunks(*numbers: int) -> bytes:
    return b"".join(chunk(number) for number in numbers)


def stored(*numbers: int, tier: Tier = Tier.DEVICE) -> BlockStored:
    return BlockStored(tier, chunks(*numbers))


def removed(*numbers: int) -> BlockRemoved:
    return BlockRemoved(chunks(*numbers))
