"""OpenAI's fields about how long a prompt's prefix is to be kept, as seconds of retention.

Owns their form and the time that they ask for. Where a prefix ends is not asked here: all of a
prompt is kept in any case, so a breakpoint marks nothing that would not be kept without it. Knows
nothing of tenants' caps or of eviction.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

__all__ = [
    "PromptCacheBreakpoint",
    "PromptCacheOptions",
    "PromptCacheRetention",
    "ResponseCacheOptions",
    "Ttl",
    "longest_ttl",
    "retention_of",
    "seconds_of",
]

Ttl = Annotated[str, msgspec.Meta(pattern=r"^[1-9][0-9]{0,3}[smh]$")]
PromptCacheRetention = Literal["in_memory", "in-memory", "24h"]

_UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0}


class PromptCacheBreakpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """On a part of a message's content. ``ttl`` None is that of the request's options."""

    mode: Literal["explicit"]
    ttl: Ttl | None = None


class PromptCacheOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``mode`` explicit leaves out the breakpoint at the prompt's end, which saves the price of
    writing it; here writing has none, and the whole prompt is kept either way."""

    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Ttl | None = None


class ResponseCacheOptions(PromptCacheOptions, frozen=True):
    """Of a response, whose prompt may be compared with that of another one."""

    comparison_response_id: str | None = None


def seconds_of(ttl: str) -> float:
    return int(ttl[:-1]) * _UNIT_S[ttl[-1]]


def longest_ttl(
    options: PromptCacheOptions | None, breakpoints: list[PromptCacheBreakpoint]
) -> str | None:
    """Of those that are named; None for none."""
    named = [item.ttl for item in (options, *breakpoints) if item is not None and item.ttl]
    return max(named, key=seconds_of, default=None)


def retention_of(
    retention: float | None,
    ttl: str | None,
    kept: PromptCacheRetention | None,
    most: float | None,
) -> float | None:
    """Seconds: the longest of what is asked for, None where nothing is.

    ``most`` is what a tenant's ttl may come to: clients choose among a few lifetimes and do not
    know what they may have. ``retention`` is a number of their own and was checked against it.
    """
    asked = [] if ttl is None else [seconds_of(ttl)]
    if kept == "24h":
        asked.append(86_400.0)
    if most is not None:
        asked = [min(item, most) for item in asked]
    if retention is not None:
        asked.append(retention)
    return max(asked, default=None)
