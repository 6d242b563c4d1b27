"""One frame of `headstart top`, as rich draws it.

Owns its layout and the form of figures. What comes from the server is shown as text, never as
markup.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from service.top.data import Look, Percentiles, Rates, RequestRow, TierMemory

__all__ = ["frame"]

_BAR = 40  # characters
_STATES = {"ready": "green", "degraded": "yellow"}
_OUTCOMES = {"error": "red", "abort": "yellow"}


def frame(url: str, seen: Look, rates: Rates | None, problem: str = "") -> RenderableType:
    """``problem`` says why there is nothing newer than ``seen``."""
    parts = [_header(url, seen, problem), Text(), _windows(seen), Text(), _load(seen, rates)]
    parts += [Text(), _memory(seen), Text(), _workers(seen)]
    if seen.requests:
        parts += [Text(), _requests(seen)]
    return Group(*parts)


def _header(url: str, seen: Look, problem: str) -> RenderableType:
    data, status = seen.data, seen.data.status
    line = Text(", ".join(data.models) or "no model yet", style="bold")
    line.append(f" at {url}  up {_duration(data.uptime_s)}", style="not bold")
    state = Text(status.state, style=f"bold {_STATES.get(status.state, 'red')}")
    since = _duration(max(data.at - status.since, 0.0))
    state.append(f": {status.cause}, for {since}", style="not bold default")
    if problem:
        state = Text(problem, style="bold red")
    return Group(line, state)


def _windows(seen: Look) -> Table:
    table = _table("last", "hit rate", "TTFT hit p50", "p95", "TTFT miss p50", "p95", "ITL p50",
                   "p95")  # fmt: skip
    for name, window in seen.data.windows.items():
        pairs = (window.ttft_hit_s, window.ttft_miss_s, window.itl_s)
        cells = [text for pair in pairs for text in _pair(pair)]
        table.add_row(name, _percent(window.hit_rate.rate), *cells)
    return table


def _load(seen: Look, rates: Rates | None) -> Text:
    requests, totals = seen.data.requests, seen.data.totals
    ended = ", ".join(f"{count:,} {name}" for name, count in requests.ended.items() if count)
    lines = [
        f"requests  {requests.running:,} running, {requests.waiting:,} waiting, "
        f"{requests.queued:,} queued; ended: {ended or 'none'}; {totals.sessions:,} sessions",
        f"tokens    {totals.prompt_tokens:,} prompt, {totals.cached_tokens:,} of them cached, "
        f"{totals.generated_tokens:,} generated; {totals.prefill_saved_s:,.1f} s of prefill saved",
    ]
    if rates is not None:
        lines.append(
            f"now       {rates.computed:,.0f} prefilled, {rates.saved:,.0f} saved, "
            f"{rates.generated:,.0f} generated tokens a second"
        )
    return Text("\n".join(lines))


def _memory(seen: Look) -> Table:
    table = _table("memory", "", "in use", "evictable", "free", "size")
    for tier in seen.data.memory:
        size = tier.total * seen.data.kv_blocks.bytes_per_block
        counts = (f"{count:,}" for count in (tier.locked, tier.evictable, tier.free))
        table.add_row(tier.tier, _bar(tier), *counts, f"{size / 2**30:,.2f} GiB")
    return table


def _bar(tier: TierMemory) -> Text:
    """In use, evictable, free; told apart without colour too."""
    total = max(tier.total, 1)
    locked = round(_BAR * tier.locked / total)
    cached = min(round(_BAR * tier.evictable / total), _BAR - locked)
    bar = Text("█" * locked, style="magenta")
    bar.append("▒" * cached, style="cyan")
    return bar.append("·" * (_BAR - locked - cached), style="dim")


def _workers(seen: Look) -> Table:
    table = _table("worker", "state", "device", "running", "waiting", "step")
    for worker in seen.data.workers:
        detail = f"{worker.state}: {worker.detail}" if worker.detail else worker.state
        cells = (worker.worker_id, detail, worker.device or "-")
        table.add_row(
            *map(Text, cells), f"{worker.running:,}", f"{worker.waiting:,}", _time(worker.step_s)
        )
    return table


def _requests(seen: Look) -> Table:
    has_tenants = any(row.tenant for row in seen.requests)
    headings: list[tuple[str, Callable[[RequestRow], str | Text]]] = [
        ("latest", lambda row: time.strftime("%H:%M:%S", time.localtime(row.started_at)))
    ]
    if has_tenants:
        headings.append(("tenant", lambda row: Text(row.tenant)))
    headings += [
        ("prompt", lambda row: f"{row.num_prompt_tokens:,}"),
        ("cached", lambda row: f"{row.num_cached_tokens:,}"),
        ("output", lambda row: f"{row.num_output_tokens:,}"),
        ("TTFT", lambda row: _time(row.ttft_s)),
        ("ended", lambda row: Text(row.outcome, style=_OUTCOMES.get(row.outcome, ""))),
        ("missed because", lambda row: Text(row.reason)),
    ]
    table = _table(*(name for name, _ in headings))
    for row in seen.requests:
        table.add_row(*(cell(row) for _, cell in headings))
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    words = {"last", "memory", "", "worker", "state", "device", "latest", "tenant", "ended",
             "missed because"}  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="left" if heading in words else "right", no_wrap=True)
    return table


def _pair(found: Percentiles) -> tuple[str, str]:
    return _time(found.p50), _time(found.p95)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
