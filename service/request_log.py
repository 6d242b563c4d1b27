"""The log lines of one request's life at a worker: admitted, first token, ended.

Owns their words and fields. Knows no prompt and no answer.
"""

from __future__ import annotations

import logging

from model_worker.protocol import RequestOutput, log_event

__all__ = ["RequestLog"]

_log = logging.getLogger("headstart.requests")


class RequestLog:
    """Times are seconds. A request's further choices have its id with their number behind it."""

    def __init__(self, request_id: str, num_prompt_tokens: int) -> None:
        self._request_id = request_id
        self._num_prompt_tokens = num_prompt_tokens
        self._has_token = False

    def admitted(self, output: RequestOutput, worker_id: str, queue_s: float) -> None:
        self._say(
            "request admitted",
            worker_id=worker_id,
            prompt_tokens=self._num_prompt_tokens,
            cached_tokens=output.num_cached_tokens,
            host_tokens=output.num_host_tokens or None,
            disk_tokens=output.num_disk_tokens or None,
            queue_s=queue_s,
            load_s=output.load_s or None,
        )

    def token(self, prefill_s: float | None) -> None:
        """One or more have come; said once."""
        if not self._has_token:
            self._has_token = True
            self._say("request has its first token", prefill_s=prefill_s)

    def ended(
        self, outcome: str, num_cached_tokens: int, num_output_tokens: int, ttft_s: float | None
    ) -> None:
        self._say(
            "request ended",
            outcome=outcome,
            prompt_tokens=self._num_prompt_tokens,
            cached_tokens=num_cached_tokens,
            output_tokens=num_output_tokens,
            ttft_s=ttft_s,
        )

    def _say(self, event: str, **fields: str | float | None) -> None:
        log_event(_log, logging.INFO, event, request_id=self._request_id, **fields)
