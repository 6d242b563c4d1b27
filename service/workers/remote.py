"""A worker in another process, reached over a link.

Owns the streams and calls that are open on the link, and the worker's state as seen from here.
Knows nothing of how that process was started. The link's thread hands its events over; all else
happens on the event loop.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from cache_store.events import AllBlocksCleared
from model_worker.protocol import (
    Abort,
    AddRequest,
    CacheReset,
    Command,
    ErrorCode,
    LinkTiming,
    ModelCard,
    PrefixAction,
    PrefixCommand,
    PrefixReply,
    ResetCache,
    StepFrame,
    TenantPolicies,
    TenantPolicy,
    Welcome,
    WorkerStats,
    WorkerStatus,
    encode,
    link_keys_for,
)
from service.workers.base import (
    RequestStream,
    StateListener,
    StreamTable,
    WorkerNotReadyError,
    WorkerState,
    WorkerStatusBoard,
    refusal_code,
)
from service.workers.cache_news import CacheListener, CacheNewsBoard
from service.workers.calls import CallTable
from service.workers.connection import WorkerNews
from service.workers.link import (
    LinkClosed,
    LinkDown,
    LinkEvent,
    LinkMessage,
    LinkWaiting,
    WorkerLink,
)

_STATE_BY_STATUS = {
    "loading": WorkerState.LOADING,
    "draining": WorkerState.DRAINING,
    "failed": WorkerState.FAILED,
}


class RemoteWorker:
    """Implements the Worker contract (service.workers.base) over ZeroMQ.

    ``endpoint`` is ipc:// (no secret) or tcp:// with the secret that the worker has too. Raises
    LinkError at construction for anything else. ``worker_id`` is what the worker is called here:
    its endpoint, unless given.
    """

    def __init__(
        self,
        endpoint: str,
        secret: bytes | None = None,
        *,
        worker_id: str | None = None,
        gateway_id: str | None = None,
        timing: LinkTiming | None = None,
    ) -> None:
        self._worker_id = worker_id or endpoint
        self._board = WorkerStatusBoard(self._worker_id, f"connecting to {endpoint}")
        self._welcome: Welcome | None = None
        self._stats = WorkerStats()
        self._streams = StreamTable()
        self._calls = CallTable()
        self._cache_news = CacheNewsBoard(self._worker_id)
        self._policies: TenantPolicies | None = None  # None: nothing was said of any
        self._link_number = 0
        self._welcomed_link_number = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed: asyncio.Future[None] | None = None
        self._events: list[LinkEvent] = []
        self._events_lock = threading.Lock()
        self._link = WorkerLink(
            endpoint,
            gateway_id or f"gateway-{uuid.uuid4().hex[:8]}",
            link_keys_for(endpoint, secret),
            timing or LinkTiming(),
            self._post,
        )

    # ------------------------------------------------------------ the Worker contract

    @property
    def worker_id(self) -> str:
        return self._worker_id

    @property
    def state(self) -> WorkerState:
        return self._board.state

    @property
    def detail(self) -> str:
        return self._board.detail

    @property
    def card(self) -> ModelCard | None:
        return None if self._welcome is None else self._welcome.model

    @property
    def epoch(self) -> int:
        return 0 if self._welcome is None else self._welcome.epoch

    @property
    def stats(self) -> WorkerStats:
        return self._stats

    def add_state_listener(self, listener: StateListener) -> None:
        self._board.add_listener(listener)

    def add_event_listener(self, listener: CacheListener) -> None:
        self._cache_news.add_listener(listener)

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._closed = self._loop.create_future()
        self._link.start()

    async def wait_ready(self, timeout_s: float | None = None) -> ModelCard:
        await self._board.wait_ready(timeout_s)
        assert self._welcome is not None, "a worker is ready only once it has said Welcome"
        return self._welcome.model

    def submit(self, request: AddRequest) -> RequestStream:
        stream = self._streams.open(request.request_id)
        if self.state is not WorkerState.READY:
            reason = self.detail or self.state
            self._streams.fail(request.request_id, refusal_code(self.state), self._say(reason))
            return stream
        try:
            payload = encode(request)
        except (ValueError, TypeError, OverflowError, msgspec.MsgspecError) as error:
            problem = f"the request cannot be sent to a worker: {type(error).__name__}"
            self._streams.fail(request.request_id, ErrorCode.INVALID_REQUEST, problem)
            return stream
        self._link.send(self._link_number, payload)
        return stream

    def abort(self, request_id: str) -> None:
        if request_id in self._streams:
            self._send(Abort(request_id=request_id))

    async def reset_cache(self) -> int:
        self._require_link()
        call = ResetCache(call_id=self._calls.next_id())
        reply = await self._calls.wait(call, lambda: self._send(call), CacheReset)
        return reply.num_blocks_dropped

    async def act_on_prefix(
        self,
        action: PrefixAction,
        token_ids: NDArray[np.int32],
        *,
        cache_salt: str = "",
        keep_num_tokens: int = 0,
    ) -> PrefixReply:
        self._require_link()
        call = PrefixCommand(
            call_id=self._calls.next_id(),
            action=action,
            prompt_token_ids=token_ids.astype("<i4", copy=False).tobytes(),
            cache_salt=cache_salt,
            keep_num_tokens=keep_num_tokens,
        )
        return await self._calls.wait(call, lambda: self._send(call), PrefixReply)

    def set_tenant_policies(
        self, policies: Sequence[TenantPolicy], shared_prefixes: Sequence[bytes] = ()
    ) -> None:
        told = TenantPolicies(policies=tuple(policies), shared_prefixes=tuple(shared_prefixes))
        if told != self._policies:
            self._policies = told
            if self._welcomed_link_number == self._link_number:
                self._tell_policies()

    async def close(self) -> None:
        self._end_all(ErrorCode.SHUTTING_DOWN, "the gateway is shutting down")
        if self._board.state is not WorkerState.FAILED:
            self._board.set(WorkerState.LOST, "closed")
        if self._closed is not None:
            self._link.stop()
            await asyncio.shield(self._closed)
        self._link.join()

    def _require_link(self) -> None:
        # A link to a worker that drains already is never welcomed, and takes no commands.
        is_welcomed = self._welcomed_link_number == self._link_number
        is_up = is_welcomed and self.state in (WorkerState.READY, WorkerState.DRAINING)
        if self._welcome is None or not is_up:
            raise WorkerNotReadyError(self._say(self.detail or self.state))

    def _tell_policies(self) -> None:
        if self._welcome is not None and self._policies is not None:
            self._send(self._policies)

    def _send(self, message: Command) -> None:
        self._link.send(self._link_number, encode(message))

    # ------------------------------------------------------------ from the link's thread

    def _post(self, event: LinkEvent) -> None:
        """Hand over; one wake-up of the loop takes all events that came meanwhile."""
        with self._events_lock:
            self._events.append(event)
            if len(self._events) > 1:
                return
        assert self._loop is not None, "the link is started after the loop is known"
        try:
            self._loop.call_soon_threadsafe(self._take_events)
        except RuntimeError:
            return  # the loop was closed without closing the worker: nobody listens any more

    def _take_events(self) -> None:
        with self._events_lock:
            events, self._events = self._events, []
        for event in events:
            self._take(event)

    def _take(self, event: LinkEvent) -> None:
        match event:
            case LinkMessage(number=number, message=message):
                self._link_number = number
                self._take_message(message)
            case LinkWaiting(reason=reason):
                if self.state is WorkerState.CONNECTING:
                    self._board.set(WorkerState.CONNECTING, reason)
            case LinkDown(reason=reason, is_refused=is_refused):
                self._lose(WorkerState.FAILED if is_refused else WorkerState.LOST, reason)
            case LinkClosed(failure=failure):
                if failure is not None:
                    self._lose(WorkerState.FAILED, failure)
                if self._closed is not None and not self._closed.done():
                    self._closed.set_result(None)

    def _take_message(self, message: WorkerNews) -> None:
        match message:
            case StepFrame():
                self._stats = message.stats
                for output in message.outputs:
                    self._streams.deliver(output)
                self._cache_news.tell(message.epoch, message.events)
            case Welcome():
                self._welcome = message
                self._welcomed_link_number = self._link_number
                self._tell_policies()  # ahead of the requests that they are about
                self._cache_news.tell(message.epoch, (AllBlocksCleared(),))
                self._board.set(WorkerState.READY)
            case WorkerStatus():
                state = _STATE_BY_STATUS.get(message.state, WorkerState.LOADING)
                self._board.set(state, message.detail)
                if state is WorkerState.FAILED:
                    self._end_all(ErrorCode.WORKER_LOST, self._say(message.detail))
            case CacheReset() | PrefixReply():
                self._calls.answer(message)

    def _lose(self, state: WorkerState, reason: str) -> None:
        self._stats = WorkerStats()
        self._board.set(state, reason)
        self._end_all(ErrorCode.WORKER_LOST, self._say(f"lost: {reason}"))

    def _end_all(self, code: ErrorCode, message: str) -> None:
        self._streams.fail_all(code, message)
        self._calls.fail_all(message)

    def _say(self, problem: str) -> str:
        return f"worker {self._worker_id}: {problem}"
