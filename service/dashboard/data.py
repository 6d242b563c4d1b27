"""What the dashboard shows of this moment, read from the server's own metrics.

Owns the form of GET /dashboard/data. Measures nothing itself.
"""

from __future__ import annotations

from typing import Any

from service.gateway import Gateway
from service.recent import HitRate, Percentiles
from service.workers.registry import WorkerReport

__all__ = ["WINDOWS", "dashboard_data"]

WINDOWS = {"1m": 60.0, "5m": 300.0, "1h": 3600.0}  # seconds


def dashboard_data(gateway: Gateway) -> dict[str, Any]:
    """Plain values for JSON. Times are seconds, rates 0 to 1, null where nothing was measured."""
    metrics = gateway.metrics
    served = gateway.served
    total = HitRate(
        int(metrics.total("prefix_cache_queries_total")),
        int(metrics.total("prefix_cache_hits_total")),
    )
    reason = gateway.unready_reason
    status = gateway.board.status.look()
    return {
        "at": gateway.board.clock(),
        "ready": not reason,
        "reason": reason,
        "status": {"state": status.state, "cause": status.cause, "since": status.since},
        "uptime_s": metrics.clock() - metrics.started_at,
        "models": list(served.names) if served is not None else [],
        "max_model_len": served.card.max_model_len if served is not None else None,
        "block_size": served.card.block_size if served is not None else None,
        "hit_rate": _hit_rate(total),
        "windows": {name: _window(gateway, seconds) for name, seconds in WINDOWS.items()},
        "requests": _requests(gateway),
        "kv_blocks": _kv_blocks(gateway),
        "memory": _memory(gateway),
        "workers": [_worker(gateway, report) for report in gateway.registry.reports()],
        "totals": {
            "prompt_tokens": int(metrics.total("prompt_tokens_total")),
            "cached_tokens": int(metrics.total("prefix_cache_hits_total")),
            "generated_tokens": int(metrics.total("generation_tokens_total")),
            "prefill_saved_s": metrics.total("prefill_seconds_saved_total"),
            "sessions": int(metrics.total("sessions")),
        },
    }


def _window(gateway: Gateway, seconds: float) -> dict[str, Any]:
    metrics = gateway.metrics
    since = metrics.clock() - seconds
    return {
        "hit_rate": _hit_rate(metrics.recent.hit_rate(since)),
        "ttft_hit_s": _percentiles(metrics.recent.first_token(since, is_hit=True)),
        "ttft_miss_s": _percentiles(metrics.recent.first_token(since, is_hit=False)),
        "itl_s": _percentiles(metrics.recent.intervals(since)),
    }


def _requests(gateway: Gateway) -> dict[str, Any]:
    stats = [worker.stats for worker in gateway.registry.workers]
    ended = {
        outcome: int(gateway.metrics.total("requests_total", {"outcome": outcome}))
        for outcome in ("stop", "length", "abort", "error")
    }
    return {
        "running": sum(one.num_running for one in stats),
        "waiting": sum(one.num_waiting for one in stats),
        "queued": gateway.gate.num_queued,
        "in_flight": gateway.gate.num_in_flight,
        "max_queue": gateway.config.max_queue,
        "ended": ended,
    }


def _kv_blocks(gateway: Gateway) -> dict[str, int]:
    stats = [worker.stats for worker in gateway.registry.workers]
    served = gateway.served
    per_block = served.card.kv_bytes_per_token * served.card.block_size if served else 0
    return {
        "total": sum(one.num_blocks for one in stats),
        "used": sum(one.num_locked_blocks for one in stats),
        "evictable": sum(one.num_evictable_blocks for one in stats),
        "free": sum(one.num_free_blocks for one in stats),
        "bytes_per_block": per_block,
    }


def _memory(gateway: Gateway) -> list[dict[str, Any]]:
    """Blocks by tier, over all workers; a tier below the device that no worker has is left out.
    Of those below, what a request or a copy holds is not told apart."""
    device = _kv_blocks(gateway)
    tiers = [
        {
            "tier": "device",
            "bytes_per_block": device["bytes_per_block"],
            "total": device["total"],
            "locked": device["used"],
            "evictable": device["evictable"],
            "free": device["free"],
        }
    ]
    reports = [tier for worker in gateway.registry.workers for tier in worker.stats.tiers]
    for tier in dict.fromkeys(report.tier for report in reports):
        total = sum(report.num_blocks for report in reports if report.tier is tier)
        cached = sum(report.num_cached for report in reports if report.tier is tier)
        tiers.append(
            {
                "tier": tier.value,
                "bytes_per_block": max(item.block_bytes for item in reports if item.tier is tier),
                "total": total,
                "locked": 0,
                "evictable": cached,
                "free": max(0, total - cached),
            }
        )
    return tiers


def _worker(gateway: Gateway, report: WorkerReport) -> dict[str, Any]:
    worker = gateway.registry.get(report.worker_id)
    assert worker is not None
    card = worker.card
    return {
        "worker_id": report.worker_id,
        "state": report.state.value,
        "detail": report.detail,
        "device": card.device if card is not None else None,
        "dtype": card.dtype if card is not None else None,
        "running": worker.stats.num_running,
        "waiting": worker.stats.num_waiting,
        "step_s": worker.stats.step_s,
    }


def _hit_rate(counts: HitRate) -> dict[str, Any]:
    return {"queried": counts.num_queried, "hit": counts.num_hit, "rate": counts.rate}


def _percentiles(found: Percentiles) -> dict[str, Any]:
    return {"p50": found.p50, "p95": found.p95, "count": found.count}
