"""When a request waited, loaded, prefilled and decoded, as spans want it: from when to when.

Owns how a worker's durations and the gateway's own readings are laid out on one clock, the
gateway's, so that clocks of two machines are never compared.
"""

from __future__ import annotations

from dataclasses import dataclass

from service.diagnostics.trace import RequestTrace

__all__ = ["Phase", "phases_of"]

_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Phase:
    """Both times in nanoseconds since 1970."""

    name: str  # queue, load, prefill or decode
    start_ns: int
    end_ns: int


def phases_of(trace: RequestTrace) -> tuple[Phase, ...]:
    """Those that are known of a request, in order; load only where it waited for blocks.

    The worker's durations follow one another from the moment at which the request was sent to it.
    Decode begins at the first token here: what lies between is the way of that token.
    """
    found: list[Phase] = []
    now = trace.sent_at
    durations = (("queue", trace.queue_s), ("load", trace.load_s), ("prefill", trace.prefill_s))
    for name, duration in durations:
        if duration is None or now is None or (name == "load" and duration <= 0):
            continue
        found.append(Phase(name, _wall_ns(trace, now), _wall_ns(trace, now + duration)))
        now += duration
    first = trace.first_token_at
    if first is not None and trace.decode_s is not None:
        end = first + trace.decode_s
        found.append(Phase("decode", _wall_ns(trace, first), _wall_ns(trace, end)))
    return tuple(found)


def _wall_ns(trace: RequestTrace, reading: float) -> int:
    """``reading`` is one of the trace's clock, in seconds."""
    return int((trace.started_at + (reading - trace.received_at)) * _NS_PER_S)
