"""The outcome of a simulation as rows: for a table in the terminal, and as JSON.

Owns the figures' form. Knows nothing of how they were found.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from cache_store.simulation.replay import Capacity
from cache_store.simulation.sweep import Outcome
from service.simulation.source import Recorded

__all__ = ["SimulationReport", "SimulationRow", "make_report", "print_report"]


class SimulationRow(msgspec.Struct, frozen=True, kw_only=True):
    """One cache. Sizes in blocks; ``hit_rate`` by prompt tokens, of which ``from_host`` and
    ``from_disk`` were found below the device; 0 to 1. ``is_present`` marks the server's own."""

    policy: str
    device: int
    host: int
    disk: int
    hit_rate: float
    from_host: float
    from_disk: float
    num_saved_tokens: int
    saved_s: float | None
    is_present: bool


class SimulationReport(msgspec.Struct, frozen=True, kw_only=True):
    """``ideal`` is the cache that never evicts. ``served_hit_rate`` is what the server that the
    requests come from found itself, None where they do not say."""

    source: str
    num_requests: int
    duration_s: float
    num_prompt_tokens: int
    num_unique_blocks: int
    block_tokens: int
    block_bytes: int | None
    served_hit_rate: float | None
    rows: list[SimulationRow]
    ideal: SimulationRow


def make_report(
    recorded: Recorded,
    outcomes: Sequence[Outcome],
    best: Outcome,
    *,
    block_bytes: int | None,
    tokens_per_s: float | None,
) -> SimulationReport:
    """``tokens_per_s`` is the speed of prefill, if it is known."""
    trace = recorded.trace
    found, total = trace.num_found_tokens, trace.num_tokens
    return SimulationReport(
        source=recorded.name,
        num_requests=len(trace.requests),
        duration_s=trace.requests[-1].arrival_s - trace.requests[0].arrival_s,
        num_prompt_tokens=total,
        num_unique_blocks=best.num_unique_blocks,
        block_tokens=trace.block_tokens,
        block_bytes=block_bytes,
        served_hit_rate=None if found is None or not total else found / total,
        rows=[_row(outcome, recorded.present, tokens_per_s) for outcome in outcomes],
        ideal=_row(best, None, tokens_per_s),
    )


def _row(outcome: Outcome, present: Capacity | None, tokens_per_s: float | None) -> SimulationRow:
    result, scenario = outcome.result, outcome.scenario
    capacity = Capacity(outcome.num_unique_blocks) if scenario is None else scenario.capacity
    rate = result.token_hit_rate
    per_block = rate / result.num_hit_blocks if result.num_hit_blocks else 0.0
    return SimulationRow(
        policy="any" if scenario is None else scenario.policy,
        device=capacity.device,
        host=capacity.host,
        disk=capacity.disk,
        hit_rate=rate,
        from_host=result.num_host_blocks * per_block,
        from_disk=result.num_disk_blocks * per_block,
        num_saved_tokens=result.num_hit_tokens,
        saved_s=None if tokens_per_s is None else result.num_hit_tokens / tokens_per_s,
        is_present=scenario is not None and capacity == present,
    )


def print_report(console: Console, report: SimulationReport) -> None:
    console.print(
        f"{report.num_requests:,} requests over {report.duration_s:,.0f} s, "
        f"{report.num_prompt_tokens:,} prompt tokens, {report.num_unique_blocks:,} different "
        f"blocks of {report.block_tokens} tokens"
    )
    if report.served_hit_rate is not None:
        console.print(f"The server itself found {report.served_hit_rate:.1%} of them.")
    has_tiers = any(row.host or row.disk for row in report.rows)
    has_seconds = report.ideal.saved_s is not None
    table = Table(box=None, pad_edge=False, header_style="bold")
    headings = ["policy", "device", *(("host", "disk") if has_tiers else ()), "hit rate"]
    headings += ["from host", "from disk"] if has_tiers else []
    headings += ["prefill saved", *(("seconds saved",) if has_seconds else ()), "of the ideal"]
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for row in (*report.rows, report.ideal):
        table.add_row(
            *_cells(row, report, has_tiers=has_tiers, has_seconds=has_seconds),
            style="bold" if row.is_present else "",
            end_section=row is report.rows[-1],
        )
    console.print(table)
    if any(row.is_present for row in report.rows):
        console.print("[dim]* the server's own sizes; its policy may be another[/]")


def _cells(
    row: SimulationRow, report: SimulationReport, *, has_tiers: bool, has_seconds: bool
) -> list[str]:
    cells = [row.policy + (" *" if row.is_present else ""), _size(row.device, report.block_bytes)]
    if has_tiers:
        cells += [_size(size, report.block_bytes) for size in (row.host, row.disk)]
    cells.append(f"{row.hit_rate:.1%}")
    if has_tiers:
        cells += [f"{share:.1%}" if share else "-" for share in (row.from_host, row.from_disk)]
    cells.append(f"{row.num_saved_tokens:,}")
    if has_seconds:
        cells.append(f"{row.saved_s or 0.0:,.1f}")
    best = report.ideal.hit_rate
    return [*cells, f"{row.hit_rate / best:.0%}" if best else "-"]


def _size(num_blocks: int, block_bytes: int | None) -> str:
    if not num_blocks:
        return "-"
    if block_bytes is None:
        return f"{num_blocks:,}"
    gib = num_blocks * block_bytes / 2**30
    return f"{num_blocks:,} ({gib:,.1f} GiB)" if gib >= 0.1 else f"{num_blocks:,}"
