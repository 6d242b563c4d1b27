"""What breaks prefixes, over all the latest requests: where, how often, and what it costs.

Owns the adding up. Knows nothing of text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from service.diagnostics.explanation import Explanation, Kind, Reason
from service.diagnostics.trace import RequestTrace

__all__ = ["PrefixBreaker", "find_breakers"]

_LATER_MESSAGE = re.compile(r"^(messages|input)\[[1-9]\d*\]")
_TOOL = re.compile(r"^tools\[\d+\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixBreaker:
    """One kind of divergence in one field of a tenant's requests. ``num_lost_tokens`` is over all
    of the ``num_requests``, ``share`` what part of the tenant's latest requests these are;
    ``last_at`` is in seconds since 1970, ``request_id`` the latest of them."""

    tenant: str
    kind: Kind
    field: str
    num_requests: int
    num_lost_tokens: int
    share: float
    last_at: float
    request_id: str
    suggestion: str

    @property
    def tokens_per_request(self) -> int:
        return round(self.num_lost_tokens / self.num_requests)


def find_breakers(
    explained: Iterable[tuple[RequestTrace, Explanation]],
) -> list[PrefixBreaker]:
    """Those that lose most first. ``explained`` are in the order in which they came."""
    groups: dict[tuple[str, Kind, str], list[tuple[RequestTrace, Explanation]]] = {}
    num_of: dict[str, int] = {}
    for trace, told in explained:
        tenant = trace.prompt.tenant
        num_of[tenant] = num_of.get(tenant, 0) + 1
        if told.reason is Reason.DIVERGED and told.kind is not None and told.num_lost_tokens:
            key = tenant, told.kind, _place(told.field)
            groups.setdefault(key, []).append((trace, told))
    found = [_added_up(*key, members, num_of[key[0]]) for key, members in groups.items()]
    return sorted(found, key=lambda each: -each.num_lost_tokens)


def _added_up(
    tenant: str,
    kind: Kind,
    field: str,
    members: list[tuple[RequestTrace, Explanation]],
    num_of_tenant: int,
) -> PrefixBreaker:
    last, told = members[-1]
    num_lost = sum(told.num_lost_tokens for _, told in members)
    return PrefixBreaker(
        tenant=tenant,
        kind=kind,
        field=field,
        num_requests=len(members),
        num_lost_tokens=num_lost,
        share=len(members) / num_of_tenant,
        last_at=last.started_at,
        request_id=last.prompt.request_id,
        suggestion=told.suggestion_for(field, round(num_lost / len(members))),
    )


def _place(field: str) -> str:
    """Conversations grow: what is one fault must not be another with each turn."""
    return _TOOL.sub("tools[*]", _LATER_MESSAGE.sub(r"\1[*]", field))
