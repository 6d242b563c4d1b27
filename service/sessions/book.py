"""Which sessions this gateway has seen, how recently, and how much they hold.

Owns the order of their activity: who is idle, whose time has run out, and who goes first when there
are too many. Holds no history and asks no store. Used from the event loop alone.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from service.sessions.identity import SessionKey

__all__ = ["SessionBook", "SessionLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Times in seconds, sizes in bytes. Beyond them the least recently active goes first."""

    ttl: float = 86_400.0
    idle_timeout: float = 60.0
    max_history_bytes: int = 256 * 2**20
    max_sessions: int = 200_000
    max_sessions_per_tenant: int = 150_000


@dataclass(slots=True)
class _Entry:
    last_active_at: float
    ends_at: float


class SessionBook:
    """All times are seconds since 1970. ``cap_of`` tells how many sessions a tenant may have at
    most, None for as many as any."""

    def __init__(
        self, limits: SessionLimits, cap_of: Callable[[str], int | None] = lambda tenant: None
    ) -> None:
        self._limits = limits
        self._cap_of = cap_of
        self._tenants: dict[str, OrderedDict[str, _Entry]] = {}
        self._num_sessions = 0
        self._awake: OrderedDict[SessionKey, None] = OrderedDict()  # not put to rest since
        self._histories: OrderedDict[SessionKey, int] = OrderedDict()
        self._ends: list[tuple[float, str, str]] = []  # a heap; may hold what has changed
        self.history_bytes = 0

    def __len__(self) -> int:
        return self._num_sessions

    def note(
        self, key: SessionKey, last_active_at: float, ends_at: float, history_bytes: int
    ) -> None:
        """``key`` was active: the most recent of all from here on."""
        tenant = self._tenants.setdefault(key.tenant, OrderedDict())
        self._num_sessions += key.session_id not in tenant
        tenant[key.session_id] = _Entry(last_active_at, ends_at)
        tenant.move_to_end(key.session_id)
        self._awake[key] = None
        self._awake.move_to_end(key)
        heapq.heappush(self._ends, (ends_at, key.tenant, key.session_id))
        if len(self._ends) > 2 * self._num_sessions + 1_000:
            self._ends = list(self._all_ends())
            heapq.heapify(self._ends)
        self.note_history(key, history_bytes)

    def note_history(self, key: SessionKey, history_bytes: int) -> None:
        self.history_bytes += history_bytes - self._histories.pop(key, 0)
        if history_bytes:
            self._histories[key] = history_bytes

    def forget(self, key: SessionKey) -> None:
        tenant = self._tenants.get(key.tenant)
        if tenant is None or tenant.pop(key.session_id, None) is None:
            return
        self._num_sessions -= 1
        if not tenant:
            del self._tenants[key.tenant]
        self._awake.pop(key, None)
        self.note_history(key, 0)

    def is_known(self, key: SessionKey) -> bool:
        return key.session_id in self._tenants.get(key.tenant, ())

    def is_older(self, key: SessionKey, last_active_at: float) -> bool:
        """Whether what is known of ``key`` is from before then; true if nothing is."""
        sessions = self._tenants.get(key.tenant)
        entry = None if sessions is None else sessions.get(key.session_id)
        return entry is None or entry.last_active_at < last_active_at

    def latest(self) -> list[SessionKey]:
        """All that are known, the most recently active first."""
        recent = sorted(
            (
                (entry.last_active_at, tenant, name)
                for tenant, sessions in self._tenants.items()
                for name, entry in sessions.items()
            ),
            reverse=True,
        )
        return [SessionKey(tenant, name) for _, tenant, name in recent]

    def is_awake(self, key: SessionKey) -> bool:
        return key in self._awake

    # ------------------------------------------------------------ what is due

    def take_idle(self, now: float, limit: int) -> list[SessionKey]:
        """Those idle for longer than the limit; each is told once until it is active again."""
        idle: list[SessionKey] = []
        for key in self._awake:
            entry = self._tenants[key.tenant][key.session_id]
            if len(idle) == limit or entry.last_active_at + self._limits.idle_timeout > now:
                break
            idle.append(key)
        for key in idle:
            del self._awake[key]
        return idle

    def take_ended(self, now: float, limit: int) -> list[SessionKey]:
        """Those whose time has run out; they stay known until they are forgotten."""
        ended: list[SessionKey] = []
        while self._ends and self._ends[0][0] <= now and len(ended) < limit:
            ends_at, tenant, session_id = heapq.heappop(self._ends)
            sessions = self._tenants.get(tenant)
            entry = None if sessions is None else sessions.get(session_id)
            if entry is not None and entry.ends_at == ends_at:
                ended.append(SessionKey(tenant, session_id))
        return ended

    def defer_end(self, key: SessionKey, ends_at: float) -> None:
        """Have it told again then: its end could not be seen to."""
        sessions = self._tenants.get(key.tenant)
        entry = None if sessions is None else sessions.get(key.session_id)
        if entry is not None:
            entry.ends_at = ends_at
            heapq.heappush(self._ends, (ends_at, key.tenant, key.session_id))

    def excess_sessions(self, limit: int) -> list[SessionKey]:
        """The least recently active beyond the limits: of a tenant that has too many, or of the
        one that has the most."""
        limits = self._limits
        excess: list[SessionKey] = []
        for tenant, sessions in self._tenants.items():
            cap, most = self._cap_of(tenant), limits.max_sessions_per_tenant
            num_over = len(sessions) - (most if cap is None else min(cap, most))
            excess += [SessionKey(tenant, name) for name in _first(sessions, num_over)]
        num_over = self._num_sessions - len(excess) - limits.max_sessions
        if num_over > 0 and not excess:
            largest = max(self._tenants, key=lambda tenant: len(self._tenants[tenant]))
            sessions = self._tenants[largest]
            excess = [SessionKey(largest, name) for name in _first(sessions, num_over)]
        return excess[:limit]

    def excess_histories(self, limit: int) -> list[SessionKey]:
        """Those to be given up so that the rest fits, the least recently active first."""
        excess: list[SessionKey] = []
        num_bytes = self.history_bytes
        for key, size in self._histories.items():
            if num_bytes <= self._limits.max_history_bytes or len(excess) == limit:
                break
            excess.append(key)
            num_bytes -= size
        return excess

    def _all_ends(self) -> Iterator[tuple[float, str, str]]:
        for tenant, sessions in self._tenants.items():
            for session_id, entry in sessions.items():
                yield entry.ends_at, tenant, session_id


def _first(sessions: OrderedDict[str, _Entry], count: int) -> list[str]:
    return [name for name, _ in zip(sessions, range(max(0, count)), strict=False)]
