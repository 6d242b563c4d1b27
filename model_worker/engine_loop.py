"""The loop that joins the engine to its links, from ready to stopped.

Owns the order of things between two steps and how the worker ends. Knows nothing of what a step
does, nor of sockets.
"""

from __future__ import annotations

import logging
import time
from typing import Protocol

from model_worker.engine import Engine
from model_worker.gateway_links import LinkCommand, LinkLost, LinkOpened
from model_worker.log_lines import log_event
from model_worker.protocol import (
    Abort,
    AddRequest,
    CacheReset,
    ErrorCode,
    PrefixCommand,
    RequestError,
    ResetCache,
    TenantPolicies,
)
from model_worker.server import WorkerServer

logger = logging.getLogger(__name__)

# An idle engine that has worked since looks its blocks over: a count that is off is a bug of ours,
# and better found here than by a wrong answer.
IDLE_CHECK_S = 10.0
# How long a worker that is told to stop goes on writing to its disk tier.
SAVE_TIMEOUT_S = 5.0
SAVE_POLL_S = 0.05


class StopRequest(Protocol):
    """What signals and a vanished parent ask for; see model_worker.__main__."""

    @property
    def is_draining(self) -> bool: ...

    @property
    def is_immediate(self) -> bool: ...


class EngineLoop:
    def __init__(
        self, engine: Engine, server: WorkerServer, stop: StopRequest, drain_timeout_s: float
    ) -> None:
        self._engine = engine
        self._server = server
        self._stop = stop
        self._drain_timeout_s = drain_timeout_s
        self._drain_until: float | None = None
        self._is_unchecked = False

    def run(self) -> None:
        """Serve until stopped.

        Raises LinkError when the link's thread fails, EngineError when step after step does, and
        AssertionError when the cache's integrity is lost.
        """
        while not self._is_done():
            is_busy = self._engine.has_work and not self._engine.is_stalled
            # A transfer that ends wakes it, as a command does.
            commands = self._server.poll_commands(0 if is_busy else IDLE_CHECK_S)
            for command in commands:
                self._handle(command)
            is_idle = not self._engine.has_work
            if not is_idle:
                self._engine.step()
                self._is_unchecked = True
            if not self._engine.has_work:
                # A step begins with it. Where none follows it is due here: what has arrived, and
                # what has just gone idle, which begins to be saved now, not at the next command.
                self._engine.advance_transfers()
            if is_idle and not commands and self._is_unchecked:
                self._engine.check_integrity()
                self._is_unchecked = False
            self._publish()
        self._save()

    def _publish(self) -> None:
        outputs = self._engine.take_outputs()
        self._server.publish(outputs, self._engine.stats(), self._engine.take_events())

    def _save(self) -> None:
        """What went idle a moment ago is still written to the lower tiers, within a bound, unless
        it is to be at once."""
        until = time.monotonic() + SAVE_TIMEOUT_S
        while self._engine.is_saving and not self._stop.is_immediate and time.monotonic() < until:
            self._server.poll_commands(SAVE_POLL_S)
            self._engine.advance_transfers()

    def _handle(self, item: LinkCommand) -> None:
        match item.command:
            case AddRequest() as message:
                self._engine.add_request(item.link_id, message)
            case Abort(request_id=request_id):
                self._engine.abort(item.link_id, request_id)
            case ResetCache(call_id=call_id):
                dropped = self._engine.reset_cache()
                reply = CacheReset(call_id=call_id, num_blocks_dropped=dropped)
                self._server.reply(item.link_id, reply)
            case PrefixCommand() as command:
                self._server.reply(item.link_id, self._engine.act_on_prefix(command))
            case TenantPolicies(policies=policies, shared_prefixes=prefixes):
                self._engine.set_tenant_policies(policies)
                self._engine.share_prefixes(prefixes)
            case LinkOpened():
                log_event(logger, logging.INFO, "link opened", link_id=item.link_id)
                self._publish()  # what the snapshot holds is not told again after it
                self._server.publish_events(item.link_id, self._engine.snapshot())
            case LinkLost(reason=reason, is_goodbye=is_goodbye):
                level = logging.INFO if is_goodbye else logging.WARNING
                event = "link closed" if is_goodbye else "link lost"
                log_event(logger, level, event, link_id=item.link_id, reason=reason)
                self._engine.abort_link(item.link_id)

    def _is_done(self) -> bool:
        if self._stop.is_immediate:
            self._end_all("the worker was told to stop at once")
            return True
        if not self._stop.is_draining:
            return False
        if self._drain_until is None:
            self._drain_until = time.monotonic() + self._drain_timeout_s
            self._server.set_status("draining", "running requests end, new ones are refused")
            log_event(logger, logging.INFO, "draining", seconds=self._drain_timeout_s)
        if time.monotonic() >= self._drain_until:
            self._end_all(f"the worker stopped after draining for {self._drain_timeout_s:.0f} s")
            return True
        return not self._engine.has_work

    def _end_all(self, reason: str) -> None:
        self._engine.fail_all(RequestError(code=ErrorCode.SHUTTING_DOWN, message=reason))
        self._publish()
