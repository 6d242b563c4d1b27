"""What of the dashboard's data is shown in a terminal, checked.

Owns the part of GET /dashboard/data and /dashboard/data/requests that `headstart top` reads, and
the speeds between two looks. Fields that it does not know are left alone: a newer server has more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from service.operator_client import OperatorClient, ServerError

__all__ = ["Look", "Rates", "look", "rates_between"]

_T = TypeVar("_T")


class Status(msgspec.Struct, frozen=True):
    state: str
    cause: str
    since: float


class Percentiles(msgspec.Struct, frozen=True):
    p50: float | None
    p95: float | None


class HitRate(msgspec.Struct, frozen=True):
    rate: float | None


class Window(msgspec.Struct, frozen=True):
    hit_rate: HitRate
    ttft_hit_s: Percentiles
    ttft_miss_s: Percentiles
    itl_s: Percentiles


class Requests(msgspec.Struct, frozen=True):
    running: int
    waiting: int
    queued: int
    ended: dict[str, int]


class TierMemory(msgspec.Struct, frozen=True):
    """Blocks."""

    tier: str
    total: int
    locked: int
    evictable: int
    free: int


class WorkerRow(msgspec.Struct, frozen=True):
    worker_id: str
    state: str
    detail: str
    device: str | None
    running: int
    waiting: int
    step_s: float


class BlockBytes(msgspec.Struct, frozen=True):
    bytes_per_block: int


class Totals(msgspec.Struct, frozen=True):
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    prefill_saved_s: float = 0.0
    sessions: int = 0


class RequestRow(msgspec.Struct, frozen=True):
    started_at: float
    tenant: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    reason: str
    ttft_s: float | None
    outcome: str


class _Latest(msgspec.Struct, frozen=True):
    requests: list[RequestRow]


class DashboardData(msgspec.Struct, frozen=True):
    at: float
    status: Status
    uptime_s: float
    models: list[str]
    windows: dict[str, Window]
    requests: Requests
    kv_blocks: BlockBytes
    memory: list[TierMemory]
    workers: list[WorkerRow]
    totals: Totals


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a server: its figures, and its latest requests, the newest first."""

    data: DashboardData
    requests: list[RequestRow]


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second between two looks: computed in prefill, saved by the cache, generated."""

    computed: float
    saved: float
    generated: float


def look(client: OperatorClient, num_requests: int) -> Look:
    """Raises ServerError."""
    data = _checked(client.json("/dashboard/data"), DashboardData)
    latest = _checked(client.json(f"/dashboard/data/requests?limit={num_requests}"), _Latest)
    return Look(data, latest.requests)


def rates_between(before: Look | None, now: Look) -> Rates | None:
    """None where there is nothing to compare, or the server was started anew in between."""
    if before is None:
        return None
    seconds = now.data.at - before.data.at
    old, new = before.data.totals, now.data.totals
    saved = new.cached_tokens - old.cached_tokens
    computed = new.prompt_tokens - old.prompt_tokens - saved
    generated = new.generated_tokens - old.generated_tokens
    if seconds <= 0 or min(saved, generated) < 0 or now.data.uptime_s < before.data.uptime_s:
        return None
    return Rates(max(computed, 0) / seconds, saved / seconds, generated / seconds)


def _checked(value: dict[str, Any], kind: type[_T]) -> _T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ServerError(f"the server has another version's dashboard: {error}") from None
