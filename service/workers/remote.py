"""A worker in another process, reached over a link.

Owns the streams and calls that are open on the link, and the worker's state as seen from here.
Knows nothing of how that process was started. The link's thread hands its events over; all else
happens on the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import uuid

import msgspec

from model_worker.protocol import (
    Abort,
    AddRequest,
    CacheReset,
    ErrorCode,
    LinkTiming,
    ModelCard,
    ResetCache,
    StepFrame,
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
    WorkerLostError,
    WorkerNotReadyError,
    WorkerState,
    WorkerStatusBoard,
    refusal_code,
)
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
        self._card: ModelCard | None = None
        self._stats = WorkerStats()
        self._streams = StreamTable()
        self._calls: dict[str, asyncio.Future[int]] = {}
        self._call_ids = itertools.count(1)
        self._link_number = 0
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
        return self._card

    @property
    def stats(self) -> WorkerStats:
        return self._stats

    def add_state_listener(self, listener: StateListener) -> None:
        self._board.add_listener(listener)

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._closed = self._loop.create_future()
        self._link.start()

    async def wait_ready(self, timeout_s: float | None = None) -> ModelCard:
        await self._board.wait_ready(timeout_s)
        assert self._card is not None, "a worker is ready only once its card is known"
        return self._card

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
            self._link.send(self._link_number, encode(Abort(request_id=request_id)))

    async def reset_cache(self) -> int:
        if self.state not in (WorkerState.READY, WorkerState.DRAINING):
            raise WorkerNotReadyError(self._say(self.detail or self.state))
        call_id = str(next(self._call_ids))
        call: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = call
        self._link.send(self._link_number, encode(ResetCache(call_id=call_id)))
        try:
            return await call
        finally:
            self._calls.pop(call_id, None)

    async def close(self) -> None:
        self._end_all(ErrorCode.SHUTTING_DOWN, "the gateway is shutting down")
        if self._board.state is not WorkerState.FAILED:
            self._board.set(WorkerState.LOST, "closed")
        if self._closed is not None:
            self._link.stop()
            await asyncio.shield(self._closed)
        self._link.join()

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
            case Welcome():
                self._card = message.model
                self._board.set(WorkerState.READY)
            case WorkerStatus():
                state = _STATE_BY_STATUS.get(message.state, WorkerState.LOADING)
                self._board.set(state, message.detail)
                if state is WorkerState.FAILED:
                    self._end_all(ErrorCode.WORKER_LOST, self._say(message.detail))
            case CacheReset():
                call = self._calls.get(message.call_id)
                if call is not None and not call.done():
                    call.set_result(message.num_blocks_dropped)

    def _lose(self, state: WorkerState, reason: str) -> None:
        self._stats = WorkerStats()
        self._board.set(state, reason)
        self._end_all(ErrorCode.WORKER_LOST, self._say(f"lost: {reason}"))

    def _end_all(self, code: ErrorCode, message: str) -> None:
        self._streams.fail_all(code, message)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(WorkerLostError(message))

    def _say(self, problem: str) -> str:
        return f"worker {self._worker_id}: {problem}"
