"""A plan as tables in the terminal.

Owns the figures' form. Knows nothing of how they were found.
"""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from service.planning.estimate import KVPlan, Plan

__all__ = ["print_plan", "verdict"]

_GIB = 2**30


def print_plan(console: Console, plan: Plan) -> None:
    wanted = plan.wanted
    console.print(
        f"[bold]{escape(plan.model)}[/] ({plan.model_type}): {plan.num_weights / 1e9:,.2f} billion "
        f"weights, {gib(plan.weights_bytes)} in {wanted.dtype}"
    )
    console.print(f"KV per token = {plan.kv_formula}")
    console.print(
        f"Device: {gib(wanted.gpu_memory)} x {wanted.gpu_memory_utilization:g} less the weights "
        f"= {gib(plan.pool_bytes)} for KV"
    )
    console.print(_room_table(plan))
    if wanted.bandwidth is not None or wanted.flops is not None:
        console.print(_speed_table(plan))
    if wanted.bandwidth is None or wanted.flops is None:
        console.print("[dim]Floors of time need --gpu, or --bandwidth and --flops.[/]")
    console.print(verdict(plan))


def _room_table(plan: Plan) -> Table:
    wanted = plan.wanted
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("KV", "bytes per token", f"of {wanted.context:,} tokens"):
        table.add_column(heading, justify="left" if heading == "KV" else "right")
    for room in plan.kv[0].tiers:
        table.add_column(f"fit: {room.tier}, {gib(room.num_bytes)}", justify="right")
    for row in plan.kv:
        table.add_row(
            row.kv_cache_dtype,
            f"{row.bytes_per_token:,}",
            gib(row.bytes_per_conversation),
            *(f"{room.num_conversations:,}" for room in row.tiers),
        )
    return table


def _speed_table(plan: Plan) -> Table:
    """What no program can beat."""
    wanted = plan.wanted
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("at least")
    table.add_column("time", justify="right")
    for row in plan.kv:
        for count, floor in _decode_rows(row, wanted.concurrency):
            speed = "" if not floor else f", {count / floor:,.0f} tokens/s"
            table.add_row(
                f"a token of {count:,} answers at once, {row.kv_cache_dtype} KV{speed}",
                milliseconds(floor),
            )
    for prefill in plan.prefill:
        cached = f", the first {prefill.num_cached:,} cached" if prefill.num_cached else ""
        table.add_row(
            f"prefill of {prefill.num_tokens:,} tokens{cached}", milliseconds(prefill.floor_s)
        )
    return table


def _decode_rows(row: KVPlan, concurrency: int) -> list[tuple[int, float | None]]:
    both = {1: row.decode_floor_one_s, concurrency: row.decode_floor_all_s}
    return list(both.items())


def verdict(plan: Plan) -> str:
    """One sentence for each number format: whether what was asked for fits."""
    wanted = plan.wanted
    if plan.pool_bytes <= 0:
        needed = plan.weights_bytes / wanted.gpu_memory_utilization
        return (
            f"The weights alone do not fit: they need a device of {gib(int(needed))} or more, or a "
            "smaller --dtype."
        )
    return "\n".join(f"With {row.kv_cache_dtype} KV {_fits(row, plan)}." for row in plan.kv)


def _fits(row: KVPlan, plan: Plan) -> str:
    asked, room = plan.wanted.concurrency, row.tiers[0].num_conversations
    if row.holds_concurrency:
        return f"all {asked:,} conversations run at once"
    return f"{room:,} of {asked:,} conversations run at once; the others wait"


def gib(num_bytes: int) -> str:
    size = num_bytes / _GIB
    return f"{size:,.2f} GiB" if abs(size) < 100 else f"{size:,.0f} GiB"


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.2f} ms"
