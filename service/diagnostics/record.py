"""What is told of one request: its figures and times, without anything of its text.

Owns the form. Knows nothing of how any of it was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RequestRecord"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """``started_at`` is in seconds since 1970; all durations are in seconds and None as long as
    they are not known: ``queue_s`` from the worker's receipt to the first admission, ``load_s`` the
    wait for blocks of lower tiers, ``prefill_s`` to the first token, ``decode_s`` from there to the
    end, ``ttft_s`` from the body read to the first content written.

    ``reason`` is why no more was cached (service.diagnostics.reasons); empty until somebody asked.
    ``outcome`` is running, stop, length, abort or error.
    """

    request_id: str
    started_at: float
    tenant: str
    session: str  # empty for none
    model: str
    worker_id: str  # empty until one is chosen
    num_prompt_tokens: int
    num_cached_tokens: int
    num_device_tokens: int  # of the cached ones
    num_host_tokens: int
    num_disk_tokens: int
    num_output_tokens: int
    reason: str
    queue_s: float | None
    load_s: float | None
    prefill_s: float | None
    decode_s: float | None
    ttft_s: float | None
    outcome: str
